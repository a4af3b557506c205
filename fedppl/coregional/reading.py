"""What `fedppl.curves` asks of a fit: the final message, and a unit's own parameters, with words for what has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedppl.coregional.bound import UnitClientState
from fedppl.coregional.result import Coefficients, Fitted, only, selected_only, settled, unpack
from fedppl.coregional.view import CoregionalUnit, unit_of
from fedppl.results.fit import Fit
from fedppl.settings import shown, some_of
from fedppl.types import DataError, DeclarationError


def require_fit(fit: Any) -> None:
    """Refuse what is no fit."""
    if not isinstance(fit, Fit):
        raise DeclarationError(f"fit is {type(fit).__name__}; pass the fit of a linear model of coregionalisation.")


def ids_of(clients: Any) -> list[str]:
    """Ids of clients from the keyword; a text would be read letter by letter, and letters may be clients too."""
    if isinstance(clients, str):
        raise DeclarationError(f"clients={clients!r} must be a list of ids: [{clients!r}].")
    names = list(clients) if isinstance(clients, Iterable) else [clients]
    if not isinstance(clients, Iterable) or not all(isinstance(name, str) for name in names):
        raise DeclarationError(f"clients={shown(clients)} must be a list of ids of clients, or None for all.")
    return names


def final_message(fit: Fit, client_id: str) -> Mapping[str, Any]:
    """What a client is told in the end, where the fit is of a linear model of coregionalisation."""
    message = fit.algorithm.result.final_message(fit.state, client_id)
    if "joint" not in message or "inclusion" not in message:
        raise DeclarationError(
            f"{fit.algorithm.name} does not fit a linear model of coregionalisation; use fedppl.curves.Ascent()."
        )
    return message


def settled_for(
    fit: Fit, unit: str | Mapping[str, Any], latents: Iterable[int] | None = None, *, fixed: bool = False
) -> tuple[CoregionalUnit, Coefficients, Fitted]:
    """A unit's view of its model, its own parameters, and the shared ones as it uses them."""
    if isinstance(unit, str):
        fitted = unpack(final_message(fit, unit))
        if unit not in fit.clients:
            raise DeclarationError(
                f"client {unit!r} is not in this process; its clients are {some_of(fit.clients)}. At a site of its "
                "own, its predictions are made there; for a new unit pass its data."
            )
        view, personal = fit.clients[unit].view(unit_of), fit.personal.get(unit)
    elif isinstance(unit, Mapping):
        fitted, personal = unpack(final_message(fit, "new unit")), None
        client = fit.declaration.enrol({"new unit": unit}, kernel=False)["new unit"]
        if client.layout.fingerprint != fit.layout.fingerprint:
            raise DataError("the new unit's shared variables differ from the fit's; give it the same columns.")
        view = client.view(unit_of)
    else:
        raise DeclarationError(f"unit is {type(unit).__name__}; pass a client's id, or the data of a new unit by name.")
    if latents is not None:
        fitted = only(fitted, latents)
    elif not fitted.has_replied:
        fitted = selected_only(fitted)
    start = personal.log_noise_sd if isinstance(personal, UnitClientState) else None
    own, fitted = settled(view, fitted, start, fixed=fixed)
    return view, own, fitted

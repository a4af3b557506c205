"""What is a client's own, in a file and out of it: what it keeps to itself, and draws of its posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import xarray as xr

from fedppl.results import idata
from fedppl.results.arrival import Ended
from fedppl.types import DeclarationError

_MOST = 2**31  # bytes of draws in a file
DRAWS, CHAINS = 1000, 4  # of a client's posterior, unless others are asked for


class Kept(Mapping[str, Any]):
    """What clients keep to themselves, by id; an error for those of whom the file has not what they kept.

    With nothing in its place a client would be taken for a new one, and its numbers would be others.
    """

    def __init__(self, stored: Mapping[str, Any], withheld: Sequence[str]) -> None:
        self.stored, self.withheld = dict(stored), tuple(withheld)

    def __getitem__(self, key: str) -> Any:
        """What the client kept."""
        if key in self.withheld:
            raise DeclarationError(
                f"what client {key!r} keeps to itself is not in the file, and its posterior depends on it. Where the "
                'fit was made, save it with include="personal" (confidential), or go on there.'
            )
        return self.stored[key]

    def __iter__(self) -> Iterator[str]:
        """Over clients whose own is here."""
        return iter(self.stored)

    def __len__(self) -> int:
        """How many they are."""
        return len(self.stored)


def personal_of(fit: Ended, *, stored: bool) -> Kept:
    """What clients keep, to be stored, or to be remembered as not there where their posteriors depend on it."""
    held = fit.personal if isinstance(fit.personal, Kept) else Kept(fit.personal, ())
    if stored:
        if held.withheld:
            _ = held[held.withheld[0]]
        return held
    if not fit.algorithm.result.reads_personal:
        return Kept({}, ())
    return Kept({}, (*(k for k, value in held.stored.items() if value is not None), *held.withheld))


def drawn_of(fit: Ended, client: Callable[[str], Any]) -> dict[str, xr.Dataset]:
    """Draws of every client's posterior."""
    found: dict[str, xr.Dataset] = {}
    total = 0
    for client_id in fit.client_ids:
        found[client_id] = idata.as_dataset(client(client_id), "posterior")
        total += found[client_id].nbytes
        if total > _MOST:
            raise DeclarationError(
                f"draws of {len(found)} of {len(fit.client_ids)} clients take {total / 2**30:.1f} GiB, more than a "
                'file is given. Save with include="personal" and bring the data back, or write fit.client(id, '
                "draws=...) to a file of each client."
            )
    return found


def stored_draws(
    fit: Ended, client_id: str, *, predict: Any, groups: Any, draws: int, chains: int, random_seed: int | None
) -> Any:
    """Posterior of a client whose data are not here: the draws that a file had, or an error with the remedy."""
    if fit.drawn is None:
        raise DeclarationError(
            f"client {client_id!r} is a site of its own and its data are not here: its posterior is drawn there. "
            "Give the site's client_app a folder=, and find it in that folder when the run is over."
        )
    remedy = "fedppl.load(path, model, clients=...) with the client's data draws anew."
    if client_id not in fit.drawn:
        raise DeclarationError(
            f"the data of client {client_id!r} are not here, and no draws of it were saved: {remedy} A file that "
            'fit.save wrote with include="clients" has draws.'
        )
    if predict is not None or groups:
        what = "predictions" if predict is not None else f"groups={groups!r}"
        raise DeclarationError(f"the data of client {client_id!r} are not here, and {what} need them: {remedy}")
    if (draws, chains) != (DRAWS, CHAINS) or random_seed not in (None, fit.seed):
        raise DeclarationError(
            f"of client {client_id!r} there are the draws that were saved, {CHAINS} chains of {DRAWS} by the fit's "
            f"seed, and no others: leave draws=, chains= and random_seed= out, or {remedy}"
        )
    return idata.from_groups({"posterior": fit.drawn[client_id].copy(deep=True)})

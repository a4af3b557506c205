"""Results of a fitted linear model of coregionalisation: predictions in closed form, selection, coefficients, curves.

The algorithms that fit one are here too: `Ascent`, `PointAscent`, `Averaging` and `Gradient`. Functions
return labelled xarray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from scipy.stats import norm

from fedppl import plots
from fedppl.contracts.printed import CI_PROB
from fedppl.coregional.algorithms.ascent import Ascent, PointAscent
from fedppl.coregional.algorithms.gradient import Averaging, Gradient
from fedppl.coregional.bound import UnitClientState, curves
from fedppl.coregional.unit import SELECTED, Coefficients, Fitted, predictive, sample, settled, unpack
from fedppl.coregional.view import CoregionalUnit, roles, unit_of
from fedppl.results.fit import Fit
from fedppl.settings import a_fit, between, flag, shown, some_of
from fedppl.types import DataError, DeclarationError

__all__ = [
    "Ascent",
    "Averaging",
    "Gradient",
    "PointAscent",
    "coefficients",
    "latent_curves",
    "plot",
    "predict",
    "selection",
]


def predict(
    fit: Fit,
    unit: str | Mapping[str, Any],
    inputs: Mapping[str, Any],
    *,
    ci_prob: float = CI_PROB,
    latents: Iterable[int] | None = None,
    fixed: bool = False,
) -> xr.Dataset:
    r"""Mean, standard deviation and interval of a unit's outputs at new inputs, in closed form.

    .. math:: E f = \sum_l E[s_l]\, a_l, \qquad
              E f^2 = \sum_{lk} E[s_l s_k] \left(a_l a_k + B_l \operatorname{cov}(v_l, v_k) B_k^\top\right)
              + \sum_l E[s_l^2]\, k_l

    with s = α ∘ w: the law of total variance over coefficients, indicators, inducing variables and the variance given
    those. (Equation 20 of the paper divides by S² and leaves out the variance of the means.) Covariances across latent
    functions, which the mean field leaves out, are those of each block given the other's moments.

    Parameters
    ----------
    fit
        A fit of a linear model of coregionalisation.
    unit
        Id of a client in this process; or the data of a new unit. A new unit, or a client that never replied, is
        fitted on its own rows, under the others' posterior of the latent functions and their σ_w. No message is sent.
    inputs
        New inputs by name, for example ``{"X": x_new}``.
    ci_prob
        Probability of the central interval.
    latents
        Latent functions to use, by number; by default all of them for a client, the selected ones for a new unit.
    fixed
        Whether a new unit takes the latent functions as they are, as equation 17 does. By default q(v) is its prior of
        them, and its own rows update it.

    Returns
    -------
    xarray.Dataset
        ``mean``, ``function_sd`` (of f), ``sd`` (of a new y), ``ci_low`` and ``ci_high`` with dim ``row``.

    Raises
    ------
    DeclarationError, DataError
        For a fit of another kind, a client that is not here, or inputs that do not fit the model.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.models import fedlmc_ss
    >>> fit = fedppl.fit(*fedlmc_ss.two_curves(), fedppl.curves.Ascent(), rounds=100, progressbar=False, random_seed=1)
    >>> sorted(fedppl.curves.predict(fit, "a", {"X": [0.0, 0.5]}))
    ['ci_high', 'ci_low', 'function_sd', 'mean', 'sd']

    Notes
    -----
    *When this fails.* The interval is that of a Gaussian with the exact mean and variance; where a latent function is
    undecided (γ near 0.5) the predictive is a mixture. Inputs beyond the inducing points go back to the prior.

    References
    ----------
    .. [1] Gao and Chung, sections 4.3 and 4.4, eqs. 17 to 20.
    """
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    view, q, fitted = _settled_for(fit, unit, latents, fixed=flag("fixed", fixed))
    mean, variance = predictive(view.at(fitted.shared.kernel, inputs), fitted, q)
    sd = np.sqrt(variance + np.exp(2 * q.log_noise_sd))
    half = norm.ppf(0.5 + ci_prob / 2) * sd
    values = {"mean": mean, "function_sd": np.sqrt(variance), "sd": sd, "ci_low": mean - half, "ci_high": mean + half}
    name = unit if isinstance(unit, str) else "new unit"
    return xr.Dataset(
        {key: ("row", value) for key, value in values.items()},
        coords={"row": np.arange(len(mean))},
        attrs={"client": name, "ci_prob": ci_prob},
    )


def plot(
    fit: Fit,
    unit: str | Mapping[str, Any],
    inputs: Mapping[str, Any],
    *,
    ci_prob: float = CI_PROB,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    """Draw a unit's curve with its interval over inputs of one dimension, and its own rows where they are here.

    Parameters
    ----------
    fit, unit, inputs, ci_prob
        As in `predict`.
    ax, figsize
        As in `fedppl.plots.curves`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError, DataError
        As in `predict`; for inputs of several dimensions, or `ax` that are no axes.
    ImportError
        Where matplotlib is not installed.

    Examples
    --------
    With the fit of `predict`:

    >>> import numpy as np  # doctest: +SKIP
    >>> fedppl.curves.plot(fit, "a", {"X": np.linspace(-5, 5, 100)})  # doctest: +SKIP

    Notes
    -----
    *When this fails.* The interval is of single new outputs, not of the whole curve: a curve leaves it somewhere more
    often than the probability says. The limits of `predict` hold here too.
    """
    prediction = predict(fit, unit, inputs, ci_prob=ci_prob)
    client = fit.clients[unit] if isinstance(unit, str) else fit.declaration.enrol({"new": unit}, kernel=False)["new"]
    rows = client.arrays[next(iter(inputs))], client.view(unit_of).response
    return plots.curves(prediction, inputs, observed=rows, ax=ax, figsize=figsize)


def selection(fit: Fit) -> xr.Dataset:
    """Which latent functions are used: probability γ_l, the choice γ_l > 0.5, and the kernels' parameters.

    Parameters
    ----------
    fit
        A fit of a linear model of coregionalisation.

    Returns
    -------
    xarray.Dataset
        ``inclusion_probability`` and ``selected``, with dim ``latent``, and the shared parameters of the kernels.

    Raises
    ------
    DeclarationError
        For an object that is no fit, or a fit of another kind.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.models import fedlmc_ss
    >>> fit = fedppl.fit(*fedlmc_ss.two_curves(), fedppl.curves.Ascent(), rounds=100, progressbar=False, random_seed=1)
    >>> fedppl.curves.selection(fit)["selected"].dims
    ('latent',)

    Notes
    -----
    *When this fails.* The mean field makes γ too sure: of two latent functions that explain the same, one is chosen
    with a probability near 1, and another seed may choose the other. Numbers of latent functions have no meaning of
    their own; do not compare them between fits. In a fit that has not converged, γ may still move.
    """
    fitted = _fitted(fit)
    gamma = fitted.shared.inclusion
    table = xr.Dataset(
        {"inclusion_probability": ("latent", gamma), "selected": ("latent", gamma > SELECTED)},
        coords={"latent": np.arange(len(gamma))},
    )
    phi = sample(roles(fit.layout), fitted.shared, fitted.joint, 1, np.random.default_rng(0))
    for name, (value,) in fit.reader.constrain(phi).items():
        if name not in ("v", "included"):  # the others are estimates
            dims = fit.reader.dims.get(name) or [f"{name}_dim_{axis}" for axis in range(np.ndim(value))]
            table[name] = (dims, value)
    return table


def coefficients(fit: Fit, clients: Iterable[str] | None = None) -> xr.Dataset:
    """Coefficients of the clients in this process: means and sds of w_ml given that l is used, and noise.

    Parameters
    ----------
    fit
        A fit of a linear model of coregionalisation.
    clients
        Ids of the clients; by default all clients in this process. A site's own coefficients never leave it.

    Returns
    -------
    xarray.Dataset
        ``mean``, ``sd`` and ``expected`` (γ_l times the mean) with dims (client, latent); ``noise_sd`` (client).

    Raises
    ------
    DeclarationError
        For a fit of another kind, or `clients` that are no list of ids of clients here.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.models import fedlmc_ss
    >>> fit = fedppl.fit(*fedlmc_ss.two_curves(), fedppl.curves.Ascent(), rounds=100, progressbar=False, random_seed=1)
    >>> fedppl.curves.coefficients(fit)["mean"].dims
    ('client', 'latent')

    Notes
    -----
    *When this fails.* A latent function and its coefficients may change sign and scale together: compare clients within
    a fit, not signs between fits. An ``sd`` is given that l is used: where γ_l is near 0.5, it leaves out that l may
    not be. A client that never replied is fitted on its own rows with the selected functions alone: its γ is 0 or 1.
    """
    a_fit(fit)
    names = list(fit.clients) if clients is None else _ids_of(clients)
    if not names:
        raise DeclarationError("there is no client in this process; its coefficients stay at its site.")
    _, own, shared = zip(*(_settled_for(fit, name) for name in names), strict=True)
    mean = np.stack([q.mean for q in own])
    sd = np.stack([np.sqrt(np.diag(q.covariance)) for q in own])
    gamma = np.stack([fitted.shared.inclusion for fitted in shared])  # 0 or 1 at a client that never replied
    values = {"mean": mean, "sd": sd, "expected": gamma * mean}
    return xr.Dataset(
        {name: (("client", "latent"), value) for name, value in values.items()}
        | {"noise_sd": ("client", np.exp([q.log_noise_sd for q in own]))},
        coords={"client": names, "latent": np.arange(mean.shape[1])},
    )


def latent_curves(fit: Fit, inputs: Mapping[str, Any]) -> xr.Dataset:
    """Posterior mean and sd of the latent functions at inputs.

    Parameters
    ----------
    fit
        A fit of a linear model of coregionalisation, with a client in this process to evaluate its kernels.
    inputs
        Inputs by name, for example ``{"X": x}``.

    Returns
    -------
    xarray.Dataset
        ``mean`` and ``sd`` with dims (latent, row), and ``inclusion_probability`` (latent).

    Raises
    ------
    DeclarationError, DataError
        For a fit of another kind or without a client in this process; for inputs that do not fit the model.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.models import fedlmc_ss
    >>> fit = fedppl.fit(*fedlmc_ss.two_curves(), fedppl.curves.Ascent(), rounds=100, progressbar=False, random_seed=1)
    >>> fedppl.curves.latent_curves(fit, {"X": [0.0, 0.5]})["mean"].dims
    ('latent', 'row')

    Notes
    -----
    *When this fails.* Beyond the inducing points the curves go back to the prior, mean 0. A function that is not
    selected has little more than its prior. Sign and scale are known only together with the coefficients,
    and the mean field leaves out how latent functions depend on each other, so that ``sd`` is too small.
    """
    shared = _fitted(fit).shared
    if not fit.clients:
        raise DeclarationError("there is no client in this process whose model could evaluate the kernels.")
    design = next(iter(fit.clients.values())).view(unit_of).at(shared.kernel, inputs)
    mean, variance = curves(design, shared)
    return xr.Dataset(
        {
            "mean": (("latent", "row"), mean),
            "sd": (("latent", "row"), np.sqrt(variance)),
            "inclusion_probability": ("latent", shared.inclusion),
        },
        coords={"latent": np.arange(len(mean)), "row": np.arange(mean.shape[1])},
    )


def _ids_of(clients: Any) -> list[str]:
    names: list[Any] = [None] if isinstance(clients, str) or not isinstance(clients, Iterable) else list(clients)
    if not all(isinstance(name, str) for name in names):
        one = f", [{clients!r}] for one" if isinstance(clients, str) else ""
        raise DeclarationError(f"clients={shown(clients)} must be a list of ids of clients{one}, or None for all.")
    return names


def _fitted(fit: Fit, client_id: str | None = None) -> Fitted:
    """The end of a fit as a client is told it: the first one, or another, old or new."""
    a_fit(fit)
    message = fit.algorithm.result.final_message(fit.state, client_id or fit.client_ids[0])
    if "joint" not in message or "inclusion" not in message:
        name = fit.algorithm.name
        raise DeclarationError(f"{name} does not fit a linear model of coregionalisation; use fedppl.curves.Ascent().")
    return unpack(message)


def _settled_for(
    fit: Fit, unit: str | Mapping[str, Any], latents: Iterable[int] | None = None, *, fixed: bool = False
) -> tuple[CoregionalUnit, Coefficients, Fitted]:
    """A unit's view of its model, its own parameters, and the shared ones as it uses them."""
    if isinstance(unit, str):
        fitted = _fitted(fit, unit)
        if unit not in fit.clients:
            here = some_of(fit.clients)
            raise DeclarationError(f"client {unit!r} is not in this process, but {here}; of a new unit pass its data.")
        view, personal = fit.clients[unit].view(unit_of), fit.personal.get(unit)
    elif isinstance(unit, Mapping):
        fitted, personal = _fitted(fit, "new unit"), None
        client = fit.declaration.enrol({"new unit": unit}, kernel=False)["new unit"]
        if client.layout.fingerprint != fit.layout.fingerprint:
            raise DataError("the new unit's shared variables differ from the fit's; give it the same columns.")
        view = client.view(unit_of)
    else:
        raise DeclarationError(f"unit is {type(unit).__name__}; pass a client's id, or the data of a new unit by name.")
    start = personal.log_noise_sd if isinstance(personal, UnitClientState) else None
    return view, *settled(view, fitted, start, latents, fixed=fixed)

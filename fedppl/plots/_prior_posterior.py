"""What clients' data have taught: the prior of the shared variables against their posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.contracts.update import entries_of, shown_by_default
from fedppl.numerics.streams import stream
from fedppl.plots import _fit
from fedppl.plots._fit import Fitted, draws_of, entries, require_fit, shared_draws
from fedppl.settings import whole
from fedppl.types import Array, DeclarationError

MOST = 24  # panels
_DRAWS = 4000
_GRID = 300
_POSITIVE = ("log", "log_exp_m1")
_UNKNOWN = "computed"  # in the place of a transform, of what is computed from others
_NEAR_ZERO = 0.25  # of the width of kernels elsewhere


def prior_posterior(
    fit: Fitted,
    var_names: Sequence[str] | str | None = None,
    *,
    random_seed: int | None = None,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    """Draw the densities of shared variables before and after the data, one panel for each number.

    Parameters
    ----------
    fit
        A `fedppl.Fit` with a posterior of the shared variables.
    var_names
        Shared variables, deterministics among them, or entries as they are printed, ``"arm[drug]"``. By default all,
        but partial correlations of a formula, of which it shows the correlations.
    random_seed
        Seed of the draws of the prior; by default the fit's.
    ax, figsize
        Matplotlib axes, one a panel; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If a name is unknown, there are more than 24 panels, axes are none, or the prior cannot be drawn from here: it
        is not Gaussian and clients are sites of their own.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.prior_posterior(fit, "mu")
    >>> axes[0].get_xlabel()
    'mu'

    Notes
    -----
    Kernel estimates from 4000 draws each. The axis shows where the posterior lies, and three times as much to both
    sides: a wide prior goes on beyond it.

    *When this fails.* Kernels smooth out sharp edges and narrow peaks. A density that is like the prior's does not say
    that the data told nothing: they may tell of a sum or a difference of variables, of which single densities show
    nothing. A posterior that an algorithm approximates is drawn as it is, whether or not the fit has converged.
    """
    require_fit(fit)
    after = shared_draws(fit)
    default = shown_by_default(fit.declaration, after.data_vars)
    wanted = entries(after, entries_of(after, var_names, "the shared variables", default))
    if not 0 < len(wanted) <= MOST:
        names = list(dict.fromkeys(entry.name for entry in wanted))
        raise DeclarationError(f"{names} have {len(wanted)} entries; choose 1 to {MOST} by var_names=.")
    seed = fit.seed if random_seed is None else whole("random_seed", random_seed, 0, "None takes the fit's")
    before = prior_draws(fit, seed)
    kinds = {name: _UNKNOWN for name in after} | {one.name: one.transform for one in fit.layout.variables}
    columns = min(len(wanted), 3)
    rows = -(-len(wanted) // columns)
    axes = _fit.panels(ax, rows, columns, (3.3 * columns, 2.4 * rows + 0.5), figsize, count=len(wanted))
    for number, (panel, entry) in enumerate(zip(axes, wanted, strict=True)):
        old, new = before[entry.name].reshape(len(before[entry.name]), -1)[:, entry.flat], draws_of(after, entry)
        kind = kinds[entry.name]
        low, high = _bounds(kind, np.concatenate([old, new]))
        x = np.linspace(*_window(old, new, low, high), _GRID + 1)[1:]  # without the bound
        before_at, y = (density(draws, x, low, high, positive=kind in _POSITIVE) for draws in (old, new))
        panel.plot(x, before_at, color=_fit.GREY, ls="--", label="prior" if not number else None)
        panel.plot(x, y, color="C0", label="posterior" if not number else None)
        panel.fill_between(x, 0, y, color="C0", alpha=0.15, lw=0)
        panel.set(xlabel=_fit.short(entry.label, 36), ylim=(0, None), yticks=[])
        panel.set_ylabel("density" if number % columns == 0 else "")
        _fit.few_ticks(panel)
    _fit.legend_of_all(axes, ax)
    return np.array(axes, dtype=object)


def prior_draws(fit: Fitted, seed: int) -> dict[str, Array]:
    """Draws of the shared prior by name of a variable, (S, *shape)."""
    client = next(iter(fit.clients.values()), None)
    if fit.layout.prior_is_gaussian and not fit.layout.binary:
        phi = gaussian.draw(fit.layout.prior, stream((seed, 5)), _DRAWS)
    elif client is not None:
        phi = client.draw_prior(_DRAWS, seed % 2**32)
    else:
        raise DeclarationError(
            "the declared prior is not Gaussian, and no client is here whose model could draw from it: "
            "fedppl.load(path, model, clients=...) of a fit that was saved."
        )
    return {name: np.asarray(value, dtype=float) for name, value in fit.reader.constrain(phi).items()}


def density(draws: Array, x: Array, low: float = -np.inf, high: float = np.inf, *, positive: bool = False) -> Array:
    """A kernel estimate at x: of the log, where all is positive, else with what lies beyond a bound folded back.

    Near zero few draws have a log that is close to that of x: there it is one of the draws themselves.
    """
    width = _width(draws)
    if width == 0:  # all are equal
        return np.zeros(len(x))
    if positive:
        log, near = np.log(draws), _NEAR_ZERO * width
        part = 1 / (1 + (_width(log) * x / near) ** 2)
        return np.asarray(
            part * _kernels(draws, x, near, (0.0,)) + (1 - part) * _kernels(log, np.log(x), _width(log)) / x
        )
    inside = (x >= low) & (x <= high)
    return np.asarray(
        np.where(inside, _kernels(draws, x, width, [one for one in (low, high) if np.isfinite(one)]), 0.0)
    )


def _kernels(draws: Array, x: Array, width: float, bounds: Sequence[float] = ()) -> Array:
    """Mean of Gaussians about the draws and their mirror images beyond bounds."""
    mirrored = [draws, *(2 * bound - draws for bound in bounds)]
    heights = sum(np.exp(-0.5 * ((x[:, None] - each) / width) ** 2).mean(axis=1) for each in mirrored)
    return np.asarray(heights / (width * np.sqrt(2 * np.pi)))


def _width(draws: Array) -> float:
    """Silverman's, of a kernel; zero where all draws are equal."""
    inner = np.subtract(*np.quantile(draws, [0.75, 0.25])) / 1.349
    spread = min((s for s in (float(np.std(draws)), float(inner)) if s > 0), default=0.0)
    return float(0.9 * spread * len(draws) ** -0.2)


def _bounds(transform: str, draws: Array) -> tuple[float, float]:
    """Of a variable's own support, where its transform tells; of others, such as correlations, as far as draws go."""
    if not transform:
        return -np.inf, np.inf
    if transform in _POSITIVE:
        return 0.0, np.inf
    return (0.0, 1.0) if transform == "logodds" else (float(draws.min()), float(draws.max()))


def _window(old: Array, new: Array, low: float, high: float) -> tuple[float, float]:
    """Where the posterior lies and three times as much to both sides, but not beyond the prior and its bounds."""
    a, b = np.quantile(new, [0.001, 0.999])
    first, last = np.quantile(old, [0.001, 0.999])
    reach = 3 * max(b - a, 1e-12)
    left, right = max(a - reach, min(first, a - 0.1 * reach), low), min(b + reach, max(last, b + 0.1 * reach), high)
    return float(left), float(right)

"""Contrasts and simple tests on posterior draws: does an interval exclude zero, in which direction, by how much."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.contracts import Posterior
from fedppl.contracts.update import CI_PROB, entries_of, interval, labels_of, shown_by_default
from fedppl.results.records import require_arrived
from fedppl.settings import between, shown
from fedppl.types import DataError, DeclarationError


def contrast(first: Any, second: Any, var_name: str, *, coords: Mapping[str, Any] | None = None) -> xr.DataArray:
    r"""Draws of the difference of one variable between two results, or between two entries of one.

    .. math:: \Delta^{(s)} = x_1^{(s)} - x_2^{(s)}

    Parameters
    ----------
    first, second
        ArviZ objects with a posterior, such as ``fit.client("a")`` and ``fit.client("b")``.
    var_name
        The variable.
    coords
        Labels that pick an entry, for example ``{"predictor": "age"}``.

    Returns
    -------
    xarray.DataArray
        Dims (chain, draw, ...), to be summarised by `hypotheses`.

    Raises
    ------
    DeclarationError
        If a variable or label is absent, or the numbers of draws differ.

    Examples
    --------
    >>> import arviz, numpy as np, xarray as xr
    >>> from fedppl.results import idata
    >>> a = idata.from_groups({"posterior": xr.Dataset({"theta": (("chain", "draw"), np.ones((1, 3)))})})
    >>> contrast(a, a, "theta").values
    array([[0., 0., 0.]])

    Notes
    -----
    *When this fails.* Draws of two clients are independent here, while their posteriors share φ; with few
    clients and weak data the interval of a difference is a little too wide or narrow.
    """
    a, b = (_pick(result, var_name, coords) for result in (first, second))
    if a.shape != b.shape:
        raise DeclarationError(f"{var_name!r} has shapes {a.shape} and {b.shape}; draw equally many from both clients.")
    difference: xr.DataArray = a - b.values
    return difference.rename(f"{var_name} difference")


def _pick(result: Any, var_name: str, coords: Mapping[str, Any] | None) -> xr.DataArray:
    posterior = _posterior(result)
    if var_name not in posterior:
        raise DeclarationError(f"{var_name!r} is not in the posterior; variables are {list(posterior.data_vars)}.")
    array: xr.DataArray = posterior[var_name]
    if coords is not None and not isinstance(coords, Mapping):
        raise DeclarationError(
            f'coords={coords!r} must be a mapping from dim to label, such as {{"predictor": "age"}}.'
        )
    try:
        return array.sel(dict(coords or {}))
    except (KeyError, ValueError) as error:
        raise DeclarationError(f"{var_name!r} has no entry {dict(coords or {})}: {error}") from error


def _posterior(result: Any) -> Any:
    """The posterior of a fit or of an ArviZ object."""
    is_fit = hasattr(result, "idata") and hasattr(result, "status")
    if is_fit and isinstance(result.algorithm.result.shared, Posterior):
        require_arrived(result, "hypotheses of a fit")
    found = result.idata if is_fit else result
    try:
        return found["posterior"]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        what = "the fit is by an algorithm that ends in a point and" if found is not result else type(result).__name__
        raise DeclarationError(
            f"{what} has no posterior; pass a fit with one, fit.idata, fit.client(id), or draws as contrast gives them."
        ) from error


def _region(rope: Any) -> tuple[float, float]:
    """Low and high end of the region of practical equivalence."""
    pair = tuple(rope) if isinstance(rope, tuple | list | np.ndarray) and np.ndim(rope) == 1 else ()
    if len(pair) != 2 or not all(isinstance(end, int | float | np.integer | np.floating) for end in pair):
        raise DeclarationError(f"rope={shown(rope)} must be a pair (low, high), such as (-0.1, 0.1).")
    low, high = map(float, pair)
    if not low < high:
        raise DeclarationError(f"rope={rope} must be (low, high) with low < high.")
    return low, high


def _names(var_names: Any, known: Sequence[Any]) -> None:
    """Refuse what is no list of names, and an empty one; all that there are stand in the message."""
    if var_names is not None and (not isinstance(var_names, Sequence) or not len(var_names)):
        raise DeclarationError(
            f"var_names={shown(var_names)} must be a name or a list of names of the draws, which are {list(known)}."
        )


def hypotheses(
    draws: Any,
    *,
    var_names: Sequence[str] | None = None,
    ci_prob: float = CI_PROB,
    rope: tuple[float, float] | None = None,
    null: float = 0.0,
) -> pd.DataFrame:
    r"""Test every entry of a posterior against a null value.

    .. math:: \text{pd} = \max\{P(x > x_0), P(x < x_0)\}

    Parameters
    ----------
    draws
        A fit, of which the shared posterior is taken, an ArviZ object with a posterior, or a DataArray of draws such
        as `contrast` gives.
    var_names
        Names of variables, or of entries as they are printed (``"arm[drug]"``); by default all of the posterior. Of a
        DataArray nothing is chosen.
    ci_prob
        Probability of the equal-tailed interval.
    rope
        Region of practical equivalence (low, high); adds its posterior probability.
    null
        Value x₀ that is tested.

    Returns
    -------
    pandas.DataFrame
        A row an entry: mean, sd, ci_low, ci_high, excludes_null, probability_of_direction, in_rope.

    Raises
    ------
    DeclarationError
        For an interval probability outside (0, 1), a null value that is not finite, an empty region, an unknown
        variable, or draws without a posterior or without the dims chain and draw.
    NotConvergedError
        For a fit that was broken off before there was a posterior.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> draws = xr.DataArray(np.linspace(1, 2, 100)[None], dims=("chain", "draw"), name="effect")
    >>> bool(hypotheses(draws)["excludes_null"]["effect"])
    True

    Notes
    -----
    *When this fails.* Entries are tested one by one: of many some exclude the null value by chance, unless a
    hierarchical prior shrinks them. An interval that holds the null value does not show that there is no effect; the
    region of practical equivalence can. Probabilities near 0 or 1 rest on few draws: of S draws none is known to better
    than about 1 / S.
    """
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    null = between("null", null, -np.inf, np.inf)
    rope = None if rope is None else _region(rope)
    if isinstance(var_names, str):
        var_names = [var_names]
    places: dict[str, list[int]] = {}
    if isinstance(draws, xr.DataArray):
        if not {"chain", "draw"} <= set(draws.dims):
            raise DeclarationError(f"draws has dims {draws.dims}; it needs chain and draw, as contrast gives.")
        _names(var_names, [draws.name])
        if var_names is not None and list(var_names) != [draws.name]:
            raise DeclarationError(f"var_names={shown(var_names)} names none of the draws, which are {draws.name!r}.")
        arrays: dict[Hashable, xr.DataArray] = {draws.name or "x": draws}
    else:
        posterior = _posterior(draws)
        _names(var_names, [str(name) for name in posterior.data_vars])
        declared = getattr(draws, "declaration", None)
        default = None if declared is None else shown_by_default(declared, posterior.data_vars)
        places = entries_of(posterior, var_names, "the draws", default)
        arrays = {name: _pick(draws, name, None) for name in places}
    rows: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        stacked = array.stack(sample=("chain", "draw")).transpose("sample", ...)
        flat, labels = stacked.values.reshape(stacked.sizes["sample"], -1), labels_of(array.rename(name))
        for place in places[str(name)] if places else range(len(labels)):
            x, label = flat[:, place], labels[place]
            if label in rows:
                raise DeclarationError(f"two entries of the draws are called {label!r}; give the dim distinct coords.")
            if not np.all(np.isfinite(x)):
                raise DataError(f"draws of {label!r} hold values that are not finite; leave them out by var_names=.")
            rows[label] = _row(x, ci_prob, rope, null)
    return pd.DataFrame.from_dict(rows, orient="index")


def _row(x: Any, ci_prob: float, rope: tuple[float, float] | None, null: float) -> dict[str, Any]:
    low, high = np.quantile(x, interval(ci_prob))
    above = float(np.mean(x > null))
    row = {
        "mean": float(np.mean(x)),
        "sd": float(np.std(x, ddof=1)),
        "ci_low": float(low),
        "ci_high": float(high),
        "excludes_null": bool(low > null or high < null),
        "probability_of_direction": max(above, float(np.mean(x < null))),
    }
    if rope is not None:
        row["in_rope"] = float(np.mean((x > rope[0]) & (x < rope[1])))
    return row

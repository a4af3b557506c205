"""A curve with its interval."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _fit
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError


def curves(
    predicted: Any,
    inputs: Any,
    *,
    observed: tuple[Any, Any] | None = None,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    """Draw predicted outputs with their interval.

    Parameters
    ----------
    predicted
        A dataset of predictions: ``mean``, ``ci_low`` and ``ci_high``, dim row.
    inputs
        The inputs of these rows, (n,), or a mapping with one array.
    observed
        Inputs and outputs to draw as points, two arrays of one length.
    ax, figsize
        Matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        For what is no prediction, or axes that are none.
    DataError
        If inputs are of several dimensions or not of as many rows, or `observed` has not one output for each input.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl, xarray
    >>> hours = np.array([2.0, 0.0, 1.0])
    >>> values = {"mean": hours**2, "ci_low": hours**2 - 1, "ci_high": hours**2 + 1}  # in place of a prediction
    >>> predicted = xarray.Dataset({name: ("row", value) for name, value in values.items()})
    >>> axes = fedppl.plots.curves(predicted, {"hours": hours}, observed=([0.5], [0.2]))
    >>> axes.get_xlabel()
    'hours'

    Notes
    -----
    *When this fails.* Only the number of inputs is checked: those of another prediction are drawn all the same. Between
    inputs lines are straight, so that few inputs hide what the curve does there. The interval is that of each output by
    itself, and a whole curve leaves it more often.
    """
    if not {"mean", "ci_low", "ci_high"} <= set(getattr(predicted, "data_vars", ())):
        raise DeclarationError(f"predicted={shown(predicted)} is no dataset with mean, ci_low and ci_high.")
    x, label = line(inputs)
    mean = np.asarray(predicted["mean"].values, dtype=float)
    if x.shape != mean.shape:
        raise DataError(f"inputs have {len(x)} rows, the prediction {len(mean)}; pass the inputs it was made for.")
    axes = _fit.panels(ax, 1, 1, (6.0, 3.6), figsize)[0]
    order = np.argsort(x, kind="stable")
    low, high = (np.asarray(predicted[end].values, dtype=float)[order] for end in ("ci_low", "ci_high"))
    share = predicted.attrs.get("ci_prob")
    axes.fill_between(
        x[order], low, high, color="C0", alpha=0.2, lw=0, label="interval" if share is None else f"{share:.0%} interval"
    )
    axes.plot(x[order], mean[order], color="C0", label="mean")
    if observed is not None:
        at, y = (np.ravel(np.asarray(values, dtype=float)) for values in observed)
        if at.shape != y.shape:
            raise DataError(f"observed= has {len(at)} inputs and {len(y)} outputs; give one of each a row.")
        axes.plot(at, y, ".", color="black", ms=4, label="observed")
    axes.set(xlabel=label, ylabel=_fit.short(f"output of {predicted.attrs.get('client', 'the unit')}", 44))
    _fit.legend(axes, 3)
    return axes


def line(inputs: Any) -> tuple[Array, str]:
    """Inputs of one dimension, and what they are called."""
    label = "input"
    if hasattr(inputs, "keys"):
        names = list(inputs.keys())
        if len(names) != 1:
            raise DataError(f"inputs are {names}; a curve is drawn over one.")
        label, inputs = str(names[0]), inputs[names[0]]
    x = np.asarray(inputs, dtype=float)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise DataError(f"inputs have shape {x.shape}; a curve is drawn over one dimension, (n,).")
    return x, _fit.short(label, 40)

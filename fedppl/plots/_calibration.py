"""Whether the transforms of simulation-based calibration are uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from fedppl.plots import _axes
from fedppl.settings import shown
from fedppl.types import DeclarationError


def calibration(found: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw the distribution function of the transforms less the uniform one, with its simultaneous 95 % band.

    Parameters
    ----------
    found
        What `fedppl.calibrate` returned. Of more than ten rows only those that leave the band are named.
    ax
        Matplotlib axes; by default those of a new figure.
    figsize
        Inches of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        For what is no such result.
    """
    if "pit" not in getattr(found, "data_vars", ()):
        raise DeclarationError(f"found={shown(found)} is not what fedppl.calibrate returned.")
    axes = _axes.panels(ax, 1, 1, (6.4, 4.8), figsize)[0]
    told = {
        str(label): np.sort(found["pit"].sel(rows=label).dropna("data_set").values) for label in found["rows"].values
    }
    half = stats.kstwo.ppf(0.95, max(min(map(len, told.values()), default=1), 1))
    few = len(told) <= _axes.LEGEND
    outside = [label for label, u in told.items() if _distance(u) > half]
    named = list(told) if few else outside[: _axes.LEGEND]
    for label, u in told.items():
        style = {"label": _axes.short(label, 40)} if label in named else {"color": _axes.GREY, "lw": 0.6}
        axes.step(u, np.arange(1, len(u) + 1) / len(u) - u, where="post", **style)
    axes.axhspan(-half, half, color="C0", alpha=0.2, lw=0, label="95 % band")
    if not few:
        axes.plot([], [], color=_axes.GREY, lw=0.6, label=f"{len(told) - len(named)} {'others' if named else 'rows'}")
    axes.set(xlabel="probability integral transform", ylabel="distribution function less the uniform", xlim=(0, 1))
    _axes.legend(axes, 3)
    return axes


def _distance(u: Any) -> float:
    """Of Kolmogorov and Smirnov, from the uniform distribution."""
    return float(stats.kstest(u, "uniform").statistic) if len(u) else 0.0

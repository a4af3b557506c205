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
        What `fedppl.calibrate` returned.
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
    known, few = found.sizes["data_set"], found.sizes["rows"] <= _axes.LEGEND
    for label in found["rows"].values:
        u = np.sort(found["pit"].sel(rows=label).dropna("data_set").values)
        known = min(known, len(u))
        name = _axes.short(label, 40) if few else None
        axes.step(u, np.arange(1, len(u) + 1) / len(u) - u, where="post", label=name)
    half = stats.kstwo.ppf(0.95, max(known, 1))
    axes.axhspan(-half, half, alpha=0.2)
    axes.set(xlabel="probability integral transform", ylabel="distribution function less the uniform", xlim=(0, 1))
    if few:
        axes.legend()
    return axes

"""Whether the transforms of simulation-based calibration are uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from fedppl.plots import _axes
from fedppl.settings import shown
from fedppl.types import DeclarationError


def calibration(found: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    r"""Draw the distribution function of the transforms less the uniform one, with its simultaneous 95 % band.

    .. math:: D_i(x) = \frac{1}{T} \sum_{t=1}^{T} [u_{ti} \le x] - x

    with the transforms u of row i in T data sets; the band is the 95 % quantile of ``max |D_i|``.

    Parameters
    ----------
    found
        What `fedppl.calibrate` returned. Of more than ten rows only those that leave the band are named.
    ax, figsize
        Matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        For what is no such result, or axes that are none.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl, xarray
    >>> u = (np.arange(40)[:, None] + 0.5) / 40  # in place of fedppl.calibrate(...)
    >>> found = xarray.Dataset({"pit": (("data_set", "rows"), u)}, {"rows": ["mu"]})
    >>> axes = fedppl.plots.calibration(found)
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['mu', '95 % band']

    Notes
    -----
    *When this fails.* The band is for one row: of twenty rows one leaves it by chance, and ``p_adjusted`` of
    `fedppl.calibrate` counts them all. Few data sets have a wide band, which hides faults. Data sets without a
    posterior are left out. The band is that of the row with the fewest data sets.
    """
    if "pit" not in getattr(found, "data_vars", ()):
        raise DeclarationError(f"found={shown(found)} is not what fedppl.calibrate returned.")
    axes = _axes.panels(ax, 1, 1, (6.4, 4.8), figsize)[0]
    told = {
        str(label): np.sort(found["pit"].sel(rows=label).dropna("data_set").values) for label in found["rows"].values
    }
    half = stats.kstwo.ppf(0.95, max(min(map(len, told.values()), default=1), 1))
    few = len(told) <= _axes.LEGEND
    outside = [label for label, u in told.items() if len(u) and stats.kstest(u, "uniform").statistic > half]
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

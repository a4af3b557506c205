"""Pictures of a fit, one a function: they take what `fedppl.fit` returned, draw with matplotlib and return axes."""

from fedppl.plots._calibration import calibration
from fedppl.plots._check import check
from fedppl.plots._confidence import confidence
from fedppl.plots._curves import curves
from fedppl.plots._device_graph import device_graph
from fedppl.plots._forest import forest
from fedppl.plots._influence import influence
from fedppl.plots._prior_posterior import prior_posterior
from fedppl.plots._quality import quality
from fedppl.plots._reliability import reliability
from fedppl.plots._report import report
from fedppl.plots._rounds import rounds

__all__ = [
    "calibration",
    "check",
    "confidence",
    "curves",
    "device_graph",
    "forest",
    "influence",
    "prior_posterior",
    "quality",
    "reliability",
    "report",
    "rounds",
]

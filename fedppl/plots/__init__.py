"""Pictures of a fit, one a function: they take what `fedppl.fit` returned, draw with matplotlib and return axes."""

from fedppl.plots._check import calibration, check, reliability
from fedppl.plots._curves import curves
from fedppl.plots._forest import forest
from fedppl.plots._influence import confidence, device_graph, influence
from fedppl.plots._prior_posterior import prior_posterior
from fedppl.plots._report import report
from fedppl.plots._rounds import quality, rounds

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

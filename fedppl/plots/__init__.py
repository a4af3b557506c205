"""Pictures of a fit, one a function: they take what `fedppl.fit` returned, draw with matplotlib and return axes."""

from fedppl.plots._clients import confidence, device_graph, influence, quality, rounds
from fedppl.plots._posteriors import forest, prior_posterior
from fedppl.plots._predictions import calibration, check, curves, reliability
from fedppl.plots._report import report

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

"""Pictures of a fit, one a function: they take what `fedppl.fit` returned, draw with matplotlib and return axes.

Of all pictures: ``fit`` is a `fedppl.Fit`; ``ax`` are matplotlib axes, one a panel, by default those of a new figure of
``figsize`` inches; ``clients`` are ids, by default all that can be shown; ``var_names`` are variables, or entries as
they are printed, ``"arm[drug]"``; ``ci_prob`` is the probability of intervals; ``draws``, ``chains`` and
``random_seed`` are those of `Fit.client`. What has several panels returns an array of axes. A DeclarationError says
that ``fit`` is none, that axes are not as many as panels, or that a name is unknown; a NotConvergedError that the fit
was broken off before there was a posterior to draw.
"""

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

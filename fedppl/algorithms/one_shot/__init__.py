"""Each client's own posterior, alone or combined in one round."""

from fedppl.algorithms.one_shot.consensus import ConsensusMonteCarlo, PrecisionWeighted
from fedppl.algorithms.one_shot.separate import Separate, SeparateSGD

__all__ = ["ConsensusMonteCarlo", "PrecisionWeighted", "Separate", "SeparateSGD"]

"""Networks of torch inside PyMC models. Needs torch: ``pip install 'fedppl[torch]'``."""

from fedppl.nn.op import module, parameter_names, parameters
from fedppl.nn.predict import network, personalise, predict

__all__ = ["module", "network", "parameter_names", "parameters", "personalise", "predict"]

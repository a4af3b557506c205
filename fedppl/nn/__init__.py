"""Networks of torch inside PyMC models. Needs torch: ``pip install 'fedppl[torch]'``."""

from fedppl.nn.op import module, parameter_names, parameters
from fedppl.nn.predict import personalise, predict

__all__ = ["module", "parameter_names", "parameters", "personalise", "predict"]

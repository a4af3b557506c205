"""Gradient steps at the clients, averaged by the server, and their kin."""

from fedppl.algorithms.averaging.fedavg import Ditto, FedAvg, FedProx
from fedppl.algorithms.averaging.scaffold import SCAFFOLD

__all__ = ["SCAFFOLD", "Ditto", "FedAvg", "FedProx"]

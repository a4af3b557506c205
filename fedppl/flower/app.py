"""Flower as the engine: data at sites, simulation on one machine. Reached as `fedppl.Flower`; needs fedppl[flower].

The algorithms, the loop and the random streams are those of the embedded engine, so equal seeds give equal numbers.
"""

from fedppl.flower.agreeing import agree
from fedppl.flower.client_app import client_app
from fedppl.flower.engines import grid, server_app, simulation

__all__ = ["agree", "client_app", "grid", "server_app", "simulation"]

"""How a client makes the network its own when the rounds are over, and draws of what it then has."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import numpy as np

from fedppl.algorithms.averaging._point import LocalClientState, fitting_local
from fedppl.contracts import ClientView, Draws, Point, Result
from fedppl.contracts.algorithm import BroadcastFn, DetailsFn
from fedppl.nn.algorithms._common import Tuning
from fedppl.nn.subnet import inferred
from fedppl.nn.train import Training, train
from fedppl.nn.view import NetworkResult, Own, PersonaliseFn, network_of
from fedppl.types import Array, DeclarationError, Message

__all__ = ["network_result", "tuned", "tuned_message"]

logger = logging.getLogger(__name__)
S = TypeVar("S")
P = TypeVar("P")
_MOST = 100_000_000  # numbers in one array of draws

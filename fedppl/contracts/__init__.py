"""What clients, algorithms and engines are to each other. NumPy only."""

from fedppl.contracts.algorithm import (
    Algorithm,
    AnyAlgorithm,
    Asked,
    Details,
    Disclosure,
    LogEvidence,
    Needs,
    OnlySums,
    Point,
    Posterior,
    Received,
    Replies,
    Report,
    Result,
    Sampler,
    always,
    sum_replies,
)
from fedppl.contracts.client import (
    CheckFn,
    ClientView,
    Constant,
    Draws,
    Expansion,
    Factor,
    LocalInference,
    Moments,
    Target,
)
from fedppl.contracts.algorithm import Accept, Engine, Exchange, Failure, Reply, Request, Requests, SharedReader, coordinate_names
from fedppl.contracts.engine import AddingEngine, EngineFactory, Heard, unheard
from fedppl.contracts.client import Batch, ClientUpdate, Part, Summed

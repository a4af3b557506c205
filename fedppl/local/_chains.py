"""Chains of NUTS over a log density with gradient, from a start: by nutpie, or by PyMC's own step method."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm

from fedppl.types import Array, Rng

Density = Callable[[Array], tuple[float, Array]]  # log density and gradient
_one_at_a_time = threading.Lock()  # PyMC's step methods keep state that threads would share


def by_nutpie(
    density: Density, origin: Array, draws: int, tune: int, chains: int, target_accept: float, rng: Rng
) -> tuple[Array, int]:
    """Draws (chain, draw, n) and the number of divergences, by nutpie."""
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    size = len(origin)

    compiled = from_pyfunc(
        size,
        lambda: density,
        lambda *_, **__: lambda x: {"x": x},
        [np.dtype("float64")],
        [(size,)],
        ["x"],
        make_initial_point_fn=lambda seed: origin + 0.1 * np.random.default_rng(seed).normal(size=size),
    )
    trace = nutpie.sample(
        compiled,
        draws=draws,
        tune=tune,
        chains=chains,
        cores=1,
        seed=int(rng.integers(2**31)),
        save_warmup=False,
        progress_bar=False,
        target_accept=target_accept,
    )
    return np.asarray(trace["posterior"]["x"]), int(np.sum(np.asarray(trace["sample_stats"]["diverging"])))


class _LogDensity:
    """What PyMC's integrator asks of a compiled log density, over a plain Python function."""

    def __init__(self, density: Density) -> None:
        self._density = density
        self._extra_vars_shared: dict[str, Any] = {}
        self._extra_are_set = True
        self._raveled_inputs = True
        self._pytensor_function = self
        self.dtype = "float64"
        self.trust_input = True

    def __call__(self, x: Array) -> tuple[float, Array]:
        return self._density(x)

    def set_extra_values(self, values: Any) -> None:
        """Nothing besides x varies."""


@functools.cache
def _flat_model(size: int) -> Any:
    with pm.Model() as model:
        pm.Flat("x", shape=size)
    return model


def by_pymc(
    density: Density, origin: Array, draws: int, tune: int, chains: int, target_accept: float, rng: Rng
) -> tuple[Array, int]:
    """The same by PyMC's own step method, one chain after the other."""
    with _one_at_a_time:
        model = _flat_model(len(origin))
    sample = np.empty((chains, draws, len(origin)))
    divergences = 0
    for chain in range(chains):
        step = pm.NUTS(
            vars=model.value_vars,
            model=model,
            logp_dlogp_func=_LogDensity(density),
            initial_point={"x": origin},
            target_accept=target_accept,
            rng=np.random.default_rng(rng.integers(2**63)),
        )
        point = {"x": origin + 0.1 * rng.normal(size=len(origin))}
        step.tune = True
        for i in range(tune + draws):
            if i == tune:
                step.stop_tuning()
            point, stats = step.step(point)
            if i >= tune:
                sample[chain, i - tune] = point["x"]
                divergences += int(stats[0]["diverging"])
    return sample, divergences

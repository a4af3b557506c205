"""One of five clients adds what it likes to a sum under masks, of which nobody sees its part: how far the mean moves.

`Sums` on normal outcomes with one shared mean; distances are of its posterior mean from the honest run's, in sds of
that. Lies that are no smooth log density are met: the run does not say converged, or the mean moves by less than one
sd. **Smooth ones are not held, and nothing here says that they were**: they are another client's honest likelihood.

    python -m benchmarks._attacks.poisoned
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import fedppl
from fedppl import gaussian
from fedppl.contracts import ClientUpdate
from fedppl.testing import normal_means
from fedppl.types import Array

__all__ = ["fitted", "run"]

LIAR = "client 1"
Lie = Callable[[Array, int], Array]  # of distances (S,) from the honest mean, in sds, and the number of the request


def _at_one_point(size: float) -> Lie:
    return lambda z, number: np.where(np.arange(len(z)) == len(z) // 3, size, 0.0)


SMOOTH: dict[str, Lie] = {
    "a slope of 1 a sd": lambda z, number: z,
    "a slope of 10 a sd": lambda z, number: 10.0 * z,
    "sure of a place 50 sds away": lambda z, number: -0.5 * ((z - 50.0) / 0.2) ** 2,
    "a bump of 10 at 3 sds": lambda z, number: 10.0 * np.exp(-0.5 * ((z - 3.0) / 0.5) ** 2),
    "a bump of 50 at 5 sds": lambda z, number: 50.0 * np.exp(-0.5 * ((z - 5.0) / 0.3) ** 2),
}
ROUGH: dict[str, Lie] = {
    "5 more everywhere": lambda z, number: np.full(len(z), 5.0),
    "5 more at a point": _at_one_point(5.0),
    "50 more at a point": _at_one_point(50.0),
    "10^6 more at a point": _at_one_point(1e6),
    "noise of sd 1": lambda z, number: np.random.default_rng(number).normal(size=len(z)),
    "another slope each time": lambda z, number: 2.0 * (-1.0) ** number * z,
}


def fitted(lie: Lie | None = None, mean: float = 0.0, sd: float = 1.0) -> fedppl.Fit:
    """A fit in which one of five clients tells a lie on top of its log densities, where there is one."""
    model, clients = normal_means(5)
    algorithm, asked = fedppl.Sums(), 0

    def lying(client: Any, personal: Any, message: Any, rng: Any) -> ClientUpdate[Any]:
        nonlocal asked
        update = algorithm.update_client(client, personal, message, rng)
        if client.client_id != LIAR or lie is None:
            return update
        asked += 1
        z = (np.asarray(message["points"])[:, 0] - mean) / sd
        return update._replace(reply={**update.reply, "values": update.reply["values"] + lie(z, asked)})

    engine = fedppl.InProcess(workers=1, secure=True)
    told = algorithm._replace(update_client=lying, batch=None)
    return fedppl.fit(model, clients, told, engine=engine, rounds=40, progressbar=False, random_seed=1)


def attack(lie: Lie, honest: fedppl.Fit) -> dict[str, Any]:
    """The status under a lie, and by how much the mean moved; NaN without a posterior."""
    mean, sd = (float(of(honest.posterior)[0]) for of in (gaussian.mean, gaussian.standard_deviations))
    found = fitted(lie, mean, sd)
    try:
        moved = (float(gaussian.mean(found.posterior)[0]) - mean) / sd
    except fedppl.NotConvergedError:
        moved = np.nan
    return {"status": found.status.value, "moved_sd": None if np.isnan(moved) else abs(moved)}


def run(quick: bool = False) -> dict[str, Any]:
    """Figures by lie, and whether lies that are no smooth density are noticed or move little."""
    honest = fitted()
    rough = {name: attack(lie, honest) for name, lie in list(ROUGH.items())[: 3 if quick else None]}
    smooth = {name: attack(lie, honest) for name, lie in list(SMOOTH.items())[: 1 if quick else None]}
    held = [found["status"] != "converged" or found["moved_sd"] < 1.0 for found in rough.values()]
    return {"poisoned_smooth": smooth, "poisoned_rough": rough, "poisoned_rough_met": all(held)}


if __name__ == "__main__":
    logging.getLogger("fedppl").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(json.dumps(run()))

"""One of 20 clients lies to EP(trust=3): how far the shared mean is from the honest one, who is named, what is claimed.

Two models, 100 rounds each, an attack a row. An attack is met where the shared mean stays within 3 sds (of the honest
run's cavity of the liar) of the honest one, or the run does not say converged and names the liar, and no honest client.
A last row: the run after 1,000 rounds with faults and wrong replies, and 10 without.

    python -m benchmarks._attacks.trust [--quick]
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

import fedppl
from fedppl import gaussian
from fedppl.contracts import Reply, Request
from tests.support import faults, problems
from tests.support.faults import Tampering, phase_of, with_message

__all__ = ["ATTACKS", "Attack", "Outcome", "attack", "run"]

TRUST = 3.0
CLIENTS = 20
LIAR = 1  # second of the clients
Lie = Callable[[Request, Reply, dict[str, Any]], Reply]


class Attack(NamedTuple):
    """A lie, told in every round, and how the run is set up."""

    lie: Lie
    participation: float | None = None
    warm_start: bool = True


class Outcome(NamedTuple):
    """What came of it."""

    status: str
    rounds: int
    off: float  # largest distance of a shared mean from the honest run's, in sds of its cavity of the liar
    liar_named: bool
    honest_named: bool

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.off <= TRUST or (self.status != "converged" and self.liar_named and not self.honest_named)


def q_of(request: Request) -> gaussian.Gaussian:
    """q as the liar is told."""
    return gaussian.Gaussian(
        np.asarray(request.message["global_linear"]), gaussian.unpack_triangle(request.message["global_precision"])
    )


def _moved(request: Request, reply: Reply, sds: Any, **more: Any) -> Reply:
    """Say the mean is some sds from where q has it."""
    q = q_of(request)
    return with_message(reply, mean=gaussian.mean(q) + sds * gaussian.standard_deviations(q), **more)


def _only(phase: str, lie: Lie) -> Lie:
    return lambda request, reply, kept: lie(request, reply, kept) if phase_of(request) == phase else reply


def _ep(lie: Callable[[Request, Reply], Reply]) -> Lie:
    return _only("EP", lambda request, reply, kept: lie(request, reply))


def _warm(lie: Callable[[Request, Reply], Reply]) -> Lie:
    return _only("warm start", lambda request, reply, kept: lie(request, reply))


def _hessian(reply: Reply, add: float) -> Reply:
    packed = reply.message["hessian"]
    matrix = gaussian.unpack_triangle(packed)
    return with_message(reply, hessian=gaussian.pack_triangle(matrix + add * np.eye(len(matrix))))


def _alternating(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
    kept["sign"] = -kept.get("sign", -1.0)
    return _moved(request, reply, 2.0 * kept["sign"], mc_error=np.array(0.5))


def _late(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
    """Honest until q hardly moves."""
    mean, before = gaussian.mean(q_of(request)), kept.get("mean")
    sd = gaussian.standard_deviations(q_of(request))
    kept["lies"] = kept.get("lies") or (before is not None and bool(np.all(np.abs(mean - before) < 0.03 * sd)))
    kept["mean"] = mean
    return _moved(request, reply, 2.9) if kept["lies"] else reply


def _sharp(sds: Any, times: float, every: int = 1) -> Lie:
    """So many sds from q with so many times the precision, in every so manieth round; else honest."""

    def lie(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
        kept["round"] = kept.get("round", -1) + 1
        if kept["round"] % every:
            return reply
        return _moved(request, reply, sds, precision=times * reply.message["precision"])

    return _only("EP", lie)


def _wild(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
    """Another mean and another precision in every round, and a claim of as much noise as may be."""
    rng = kept.setdefault("rng", np.random.default_rng(0))
    sds, times = 3.0 * rng.normal(size=reply.message["mean"].shape), 10 ** rng.uniform(-2, 3)
    return _moved(request, reply, sds, precision=times * reply.message["precision"], mc_error=np.array(1.0))


def _curved_and_sharp(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
    return _hessian(reply, -1e9) if phase_of(request) == "warm start" else _sharp(0.5, 100.0)(request, reply, kept)


def _in_one_direction(request: Request, reply: Reply) -> Reply:
    """Along the direction that q knows least of."""
    q = q_of(request)
    values, vectors = np.linalg.eigh(q.precision)
    return with_message(reply, mean=gaussian.mean(q) + 2.9 * vectors[:, 0] / np.sqrt(values[0]))


def _ray(request: Request, reply: Reply) -> Reply:
    boast = 1e6 * (1.0 - request.round % 3)
    return with_message(reply, value=np.array(boast), ray=reply.message["ray"] + np.linspace(boast, -boast, 16))


ATTACKS: dict[str, Attack] = {
    "1 sd a round, mc_error 1": Attack(_ep(lambda q, r: _moved(q, r, 1.0, mc_error=np.array(1.0)))),
    "1 sd a round, mc_error .5": Attack(_ep(lambda q, r: _moved(q, r, 1.0, mc_error=np.array(0.5)))),
    "2.9 sds a round": Attack(_ep(lambda q, r: _moved(q, r, 2.9))),
    "Hessian + 1e6": Attack(_warm(lambda q, r: _hessian(r, 1e6))),
    "Hessian - 1e6": Attack(_warm(lambda q, r: _hessian(r, -1e6))),
    ".3 sds a round": Attack(_ep(lambda q, r: _moved(q, r, 0.3))),
    "2 sds, alternating": Attack(_only("EP", _alternating)),
    "far and sure": Attack(
        _ep(lambda q, r: with_message(r, mean=r.message["mean"] + 1e4, precision=1e6 * r.message["precision"]))
    ),
    "far and unsure": Attack(
        _ep(lambda q, r: with_message(r, mean=r.message["mean"] + 1e3, precision=1e-3 * r.message["precision"]))
    ),
    "unsure": Attack(_ep(lambda q, r: with_message(r, precision=1e-3 * r.message["precision"]))),
    "late": Attack(_only("EP", _late)),
    "gradient + 1e6": Attack(_warm(lambda q, r: with_message(r, gradient=r.message["gradient"] + 1e6))),
    "value and ray": Attack(_warm(_ray)),
    "one direction": Attack(_ep(_in_one_direction)),
    "2.9 sds a round, half take part": Attack(_ep(lambda q, r: _moved(q, r, 2.9)), participation=0.5),
    "2.9 sds a round, no warm start": Attack(_ep(lambda q, r: _moved(q, r, 2.9)), warm_start=False),
    "both phases": Attack(
        lambda q, r, kept: (
            with_message(r, gradient=r.message["gradient"] + 1e3)
            if phase_of(q) == "warm start"
            else _moved(q, r, 1.0, mc_error=np.array(1.0))
        )
    ),
}


def _sure(place: float, precision: float) -> Lie:
    """Say in both phases, whatever the data, that all coordinates are at a place, with a precision."""

    def lie(request: Request, reply: Reply, kept: dict[str, Any]) -> Reply:
        del kept
        if phase_of(request) == "warm start":
            x = np.asarray(request.message["point"])
            hessian = gaussian.pack_triangle(-precision * np.eye(len(x)))
            return with_message(reply, gradient=precision * (place - x), hessian=hessian)
        linear = np.asarray(request.message["cavity_linear"]) + precision * place
        total = gaussian.unpack_triangle(request.message["cavity_precision"]) + precision * np.eye(len(linear))
        if np.linalg.eigvalsh(total)[0] <= 0:
            return reply
        return with_message(reply, mean=np.linalg.solve(total, linear), precision=gaussian.pack_triangle(total))

    return lie


ATTACKS |= {
    "sure of -20": Attack(_sure(-20.0, 1e4)),
    "sure of -200": Attack(_sure(-200.0, 1e2)),
    "sure of -20, no warm start": Attack(_sure(-20.0, 1e4), warm_start=False),
    "sure of -20, half take part": Attack(_sure(-20.0, 1e4), participation=0.5),
    "precision x 100 a round, .5 sds": Attack(_sharp(0.5, 100.0)),
    "precision x 30 a round, 1 sd": Attack(_sharp(1.0, 30.0)),
    "precision x 100 a round, no warm start": Attack(_sharp(0.5, 100.0), warm_start=False),
    "precision x 1e10 a round, 2 sds": Attack(_sharp(-2.0, 1e10)),
    "precision x 1e4 every second round": Attack(_sharp(2.9, 1e4, 2)),
    "precision x 50 every third round": Attack(_sharp(2.9, 50.0, 3)),
    "wild": Attack(_only("EP", _wild)),
    "Hessian - 1e9, then precision x 100": Attack(_curved_and_sharp),
}
_BLAME = ("held back", " alone: ", "does not cancel", "take more precision than there is")
QUICK = ("1 sd a round, mc_error .5", "Hessian + 1e6", "far and sure")


def _heavy(y: Any) -> Any:
    """A location whose likelihood bends outwards far from the rows, as where its prior's mean is."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        pm.StudentT("obs", nu=4, mu=mu, sigma=1, observed=pm.Data("y", y))
    return model


def heavy_tails(clients: int) -> Any:
    """Rows near 8, of a t distribution with 4 degrees of freedom."""
    rng = np.random.default_rng(0)
    data = {f"site {k}": {"y": 8.0 + rng.standard_t(4, size=15 + k)} for k in range(clients)}
    return fedppl.FederatedModel(_heavy, ["mu"]), data


MODELS: dict[str, Callable[[], Any]] = {
    "heavy tails": lambda: heavy_tails(CLIENTS),
    "regression": lambda: problems.regression(CLIENTS),
    "logistic": lambda: problems.logistic(CLIENTS),
}


def _fit(problem: Any, how: Attack, trust: float | None, rounds: int, engine: Any = None) -> fedppl.Fit:
    algorithm = fedppl.EP(local=fedppl.local.NestedLaplace(points=64), trust=trust, warm_start=how.warm_start)
    more = {} if engine is None else {"engine": engine}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedppl.fit(
            *problem,
            algorithm,
            rounds=rounds,
            participation=how.participation,
            progressbar=False,
            random_seed=1,
            **more,
        )


def attack(problem: Any, how: Attack, rounds: int, *, trust: float | None = TRUST) -> Outcome:
    """Run an honest fit and one with a liar, and compare."""
    liar, kept = list(problem[1])[LIAR], {}

    def change(request: Request, reply: Any) -> Any:
        return how.lie(request, reply, kept) if request.client_id == liar and isinstance(reply, Reply) else reply

    honest = _fit(problem, how, None, rounds)
    fit = _fit(problem, how, trust, rounds, Tampering(change))
    cavity = honest.algorithm.result.final_message(honest.state, liar)
    sd = np.sqrt(np.diag(np.linalg.inv(gaussian.unpack_triangle(cavity["cavity_precision"]))))
    q = fit.state.sites.q  # of a run that ended in the warm start there may be no posterior
    gap = gaussian.mean(q) - gaussian.mean(honest.state.sites.q) if gaussian.is_proper(q) else np.inf
    # Others are named for other reasons, such as a computation that took long.
    blamed = [part for part in fit.message.split("; ") if any(word in part for word in _BLAME)]
    said = f"{'; '.join(blamed)}."
    named = [name for name in problem[1] if any(f"{name}{end}" in said for end in " ,;:.')")]
    return Outcome(
        fit.status.value,
        len(fit.records),
        float(np.max(np.abs(gap) / sd)),
        liar in named,
        any(name != liar for name in named),
    )


def run(quick: bool = False) -> dict[str, Any]:
    """All attacks on both models; the figures are flat, and `quick` takes three attacks, 30 rounds and one model."""
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    figures: dict[str, Any] = {}
    met: list[bool] = []
    for model in ["logistic"] if quick else MODELS:
        problem = MODELS[model]()
        for name in QUICK if quick else ATTACKS:
            found = attack(problem, ATTACKS[name], 30 if quick else 100)
            met.append(found.met)
            figures |= {
                f"{model}, {name}: sds off": float(f"{found.off:.3g}"),
                f"{model}, {name}: status": found.status,
                f"{model}, {name}: liar named": found.liar_named,
                f"{model}, {name}: honest named": found.honest_named,
            }
    if not quick:
        soaked = faults.soak(problems.regression(CLIENTS), fedppl.local.Laplace(), 1000, wrong=0.1, calm=10)
        figures |= {
            "soak: sds off": float(f"{soaked.mean_gap:.3g}"),
            "soak: log sds off": float(f"{soaked.sd_gap:.3g}"),
        }
        figures["soak: damping at the end of faults"] = float(f"{soaked.damping:.3g}")
        figures["trust_soak_met"] = bool(soaked.mean_gap < 0.02)
    return figures | {"trust_attacks": len(met), "trust_attacks_held": sum(met), "trust_attacks_met": all(met)}


def main() -> None:
    """Print a table and one JSON line."""
    started = time.perf_counter()
    figures = run("--quick" in sys.argv)
    rows = [key.removesuffix(": sds off") for key in figures if key.endswith(": sds off")]
    for row in rows:
        rest = [figures.get(f"{row}: {what}", "") for what in ("status", "liar named", "honest named")]
        print(f"{row:52s}{figures[f'{row}: sds off']:>10.3g}  {rest[0]:10s} {rest[1]!s:6s} {rest[2]!s:6s}")
    print(f"{time.perf_counter() - started:.0f} s")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

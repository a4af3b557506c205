"""A server that is after a site's rows: far probes, solving inside every limit, conclusions, mixed noise.

    python -m benchmarks._attacks.policy [--quick]

The model is a logistic regression without local variables, all coefficients shared: nothing gives away more. A row and
its outcome are found up to a common sign, z = ±x, since log f(φ) = Σ log s(z'φ).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from scipy.optimize import least_squares, linear_sum_assignment
from scipy.special import expit

import fedppl
from fedppl import audit, privacy
from fedppl.algorithms.tolerances import LENGTHS
from fedppl.contracts import Reply, Request
from fedppl.engine.policy import Policy, refuse_release
from fedppl.gaussian import Gaussian, unpack_triangle
from fedppl.local.target import pack_target
from fedppl.sites import conclusions as _ending
from fedppl.sites import node as _node
from fedppl.sites import wire as _wire

_PRIOR_SD = 2.5
_FOUND = 1e-3  # of a row's norm
_DIGITS = 1e-13  # to which sums of float64 are known, relative


def logistic(X: Any, y: Any) -> Any:
    """All coefficients shared; a density whose gradient is finite however far out it is asked for."""
    columns = X.shape[1]
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, _PRIOR_SD, shape=columns)
        pm.Potential("obs", -pm.math.sum(pm.math.log1pexp((1 - 2 * y) * (X @ beta))))
    return model


# The default, for a site whose single replies leave and that takes part with fewer rows than that wants: what remains
# has to hold by itself.
_SMALL = Policy(sums="optional", rows=20, parameters_per_row=0.25, joint=True)


class Server:
    """Asks one site, as its engine does, and counts."""

    def __init__(self, folder: Path, rules: Policy, data: dict[str, Any], algorithm: Any = None) -> None:
        model = fedppl.FederatedModel(logistic, ["beta"])
        self.algorithm = algorithm or fedppl.EP()
        token = f"attack {folder}"
        self.site = _node.Node(
            token, model, self.algorithm, lambda config: data, lambda config: "a", folder, 50, 2, rules
        )
        self.asked = self.refused = 0

    def ask(self, message: Any, number: int = 1, run: str = "run") -> Any:
        """Send a request of one nonce; None where it is refused."""
        assert self.site.folder is not None
        request = Request("a", 7, number, (1,), message, run)
        parcel = _node.answer_request(self.site, {}, None, _wire.pack_request(request))
        reply = _wire.unpack_reply(*parcel)
        self.asked += 1
        self.refused += not isinstance(reply, Reply)
        return reply.message if isinstance(reply, Reply) else None

    def expand(self, point: Any, number: int = 1, run: str = "run") -> Any:
        """Gradient of log f at a point, or None."""
        message = {"point": np.asarray(point), "move": np.zeros(len(point)), "prior_share": np.array(0.0)}
        return self.ask(message, number, run)


def _data(rows: int, columns: int, seed: int) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    y = (rng.random(rows) < expit(X @ np.full(columns, 0.5))).astype(int)
    return {"X": X, "y": y}, X * (2 * y - 1)[:, None]


def _recovered(found: Any, z: Any) -> int:
    """How many rows were found to a thousandth of their norm."""
    found = [row for row in found if np.all(np.isfinite(row))]
    if not found:
        return 0
    away = np.linalg.norm(np.asarray(found)[:, None] - z[None], axis=2) / np.linalg.norm(z, axis=1)
    return int(np.sum(away[linear_sum_assignment(np.minimum(away, 1.0))] < _FOUND))


def probe(server: Server, columns: int, most: int, *, increasing: bool = False) -> list[Any]:
    """Far out, a row counts where φ'z < 0 and not elsewhere: gradients jump by z where its plane is crossed."""
    first, second = np.eye(columns)[:2] * 1e7
    tilt = np.random.default_rng(5).normal(size=columns) * 3e6
    found: list[Any] = []

    def gradient(angle: float) -> Any:
        number = server.asked + 1 if increasing else 1
        reply = server.expand(first * np.cos(angle) + second * np.sin(angle) + tilt, number)
        return None if reply is None else np.asarray(reply["gradient"])

    ends = np.linspace(0, 2 * np.pi, 9)
    known = {angle: gradient(angle) for angle in ends}
    stack = [(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    while stack and server.asked < most:
        a, b = stack.pop()
        if known[a] is None or known[b] is None or np.linalg.norm(known[a] - known[b]) < 1e-6:
            continue
        if b - a < 1e-4:  # one plane alone, nearly always
            jump = known[b] - known[a]
            found += [jump, -jump]
            continue
        middle = (a + b) / 2
        known[middle] = gradient(middle)
        stack += [(a, middle), (middle, b)]
    return found


_PROBERS = {
    "one_round": (_SMALL, 30, False),
    "rounds_increasing": (_SMALL, 30, True),
    "default": (Policy(sums="optional", joint=True), 300, True),
}


def _far_probes(quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, (rules, rows, increasing) in _PROBERS.items():
        data, z = _data(rows, 2, 1)
        with tempfile.TemporaryDirectory() as folder:
            server = Server(Path(folder), rules, data)
            found = probe(server, 2, 40, increasing=increasing)
            lines = list(audit.lines(Path(folder)))
        refused = [line["refused"] for line in lines if line["event"] == "request"]
        figures[f"policy_prober_{name}_rows_found"] = _recovered(found, z)
        figures[f"policy_prober_{name}_first_refused"] = next(i for i, r in enumerate(refused, 1) if r)
        figures[f"policy_prober_{name}_requests"] = server.asked
        figures[f"policy_prober_{name}_refusals_in_log"] = sum(map(bool, refused))
    data, z = _data(30, 2, 1)
    found, asked = _without_a_site(data, 120 if quick else 2000)
    figures["policy_prober_without_rows_of_30"] = _recovered(found, z)
    figures["policy_prober_without_requests"] = asked
    return figures


def _without_a_site(data: dict[str, Any], most: int) -> tuple[list[Any], int]:
    """The same requests where nothing stands between: a client's part of the algorithm itself."""
    algorithm = fedppl.EP()
    client = fedppl.FederatedModel(logistic, ["beta"]).enrol({"a": data})["a"]

    class Bare:
        asked = 0

        def expand(self, point: Any, number: int) -> Any:
            del number
            self.asked += 1
            message = {"point": point, "move": np.zeros(2), "prior_share": np.array(0.0)}
            return algorithm.update_client(client, None, message, np.random.default_rng(0))[1]

    server: Any = Bare()
    return probe(server, 2, most), server.asked


def told(z: Any, points: Any, anchors: Any, reach: float) -> tuple[Any, Any]:
    """What expansions at the points say, and values along the way to them: numbers, and their derivatives in z."""
    m = z.shape[1]
    values, slopes = [], []
    for point, anchor in zip(points, anchors, strict=True):
        eta = z @ point
        s = expit(-eta)
        w = s * (1 - s)
        bend = w * (2 * s - 1)
        values.append(-np.sum(np.logaddexp(0, -eta)))
        slopes.append(np.ravel(s[:, None] * point))
        values.extend(s @ z)
        for a in range(m):
            slope = -w[:, None] * z[:, a : a + 1] * point
            slope[:, a] += s
            slopes.append(np.ravel(slope))
        for a in range(m):
            for b in range(a, m):
                values.append(-np.sum(w * z[:, a] * z[:, b]))
                slope = -(bend * z[:, a] * z[:, b])[:, None] * point
                slope[:, a] -= w * z[:, b]
                slope[:, b] -= w * z[:, a]
                slopes.append(np.ravel(slope))
        for length in LENGTHS:
            x = anchor + length * (point - anchor)
            if np.all(np.abs(x) <= reach):
                values.append(-np.sum(np.logaddexp(0, -(z @ x))))
                slopes.append(np.ravel(expit(-(z @ x))[:, None] * x))
    return np.array(values), np.array(slopes)


def enough(rows: int, columns: int, requests: int, distance: float, seed: int = 0, within: float | None = None) -> int:
    """Rows that so many answers determine to a thousandth, whoever solves for them: the Cramér–Rao bound.

    Answers are known to 13 digits, and each value of a row is N(0, 1) before. Points lie `within` so many prior sds.
    """
    _, z = _data(rows, columns, seed)
    reach = (distance if within is None else within) * _PRIOR_SD
    points, anchors = np.random.default_rng(seed).uniform(-reach, reach, (2, requests, columns))
    values, slopes = told(z, points, anchors, reach)
    _, sizes, axes = np.linalg.svd(slopes / (_DIGITS * np.maximum(np.abs(values), 1.0))[:, None], full_matrices=False)
    variance = 1.0 + np.sum(axes**2 * (1 / (sizes[:, None] ** 2 + 1) - 1), axis=0)
    away = np.sqrt(np.sum(np.maximum(variance, 0).reshape(rows, columns), axis=1)) / np.linalg.norm(z, axis=1)
    return int(np.sum(away < _FOUND))


def worst(rows: int, columns: int, requests: int, distance: float, quick: bool) -> int:
    """The largest of `enough` over data and over how far from the prior the points lie."""
    boxes, seeds = ((distance,), (0,)) if quick else ((1.0, 2.0, 4.0, distance), (0, 1, 2))
    return max(enough(rows, columns, requests, distance, seed, box) for seed in seeds for box in boxes)


def count_cells(server: Server, columns: int, requests: int) -> Any:
    """How many rows have which combination of 0 and 1 beside an intercept: Hessians are linear in these counts."""
    rng = np.random.default_rng(0)
    cells = np.array([[1, *map(int, f"{c:0{columns - 1}b}")] for c in range(2 ** (columns - 1))], dtype=float)
    above = np.tril_indices(columns)
    equations, told_ = [], []
    for i in range(requests):
        point = rng.uniform(-2, 2, columns)
        reply = server.expand(point, i + 1)
        if reply is None:
            return None
        s = expit(cells @ point)
        outer = np.einsum("ca,cb->cab", cells, cells) * (s * (1 - s))[:, None, None]
        equations.append(-outer[:, *above].T)
        told_.append(unpack_triangle(np.asarray(reply["hessian"]))[above])
    return np.round(np.linalg.lstsq(np.vstack(equations), np.concatenate(told_), rcond=None)[0]).astype(int)


def _discrete(requests: int) -> bool:
    """Whether the default policy lets a server count 250 rows of an intercept and four columns of 0 and 1."""
    rng = np.random.default_rng(3)
    X = np.column_stack([np.ones(250), rng.integers(0, 2, (250, 4))])
    data = {"X": X, "y": rng.integers(0, 2, 250)}
    counts = np.bincount((X[:, 1:] @ [8, 4, 2, 1]).astype(int), minlength=16)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), Policy(sums="optional", joint=True), data)
        return bool(np.array_equal(count_cells(server, 5, requests), counts))


def solve(
    rows: int, columns: int, requests: int, distance: float, starts: int, seed: int = 1, reach_sd: float = _PRIOR_SD
) -> int:
    """Rows that nonlinear least squares finds from random starts, knowing all outcomes, the best of some starts."""
    _, z = _data(rows, columns, seed)
    reach, rng = distance * reach_sd, np.random.default_rng(seed)
    points, anchors = rng.uniform(-reach, reach, (2, requests, columns))
    values, _ = told(z, points, anchors, reach)
    scale, best = np.maximum(np.abs(values), 1e-3), 0

    def miss(x: Any) -> Any:
        return (told(x.reshape(z.shape), points, anchors, reach)[0] - values) / scale

    def slope(x: Any) -> Any:
        return told(x.reshape(z.shape), points, anchors, reach)[1] / scale[:, None]

    for _ in range(starts):
        found = least_squares(miss, rng.normal(size=z.size), slope, max_nfev=200, xtol=1e-15, ftol=1e-15, gtol=1e-15)
        best = max(best, _recovered(found.x.reshape(z.shape), z))
        if best == rows:
            break
    return best


def _inside_every_limit(quick: bool) -> dict[str, Any]:
    """Points inside the distance, q and cavity as sharp as one likes: so many requests, over as many runs."""
    figures: dict[str, Any] = {}
    rules = Policy()
    distance = rules.distance
    sizes = (2, 5) if quick else (1, 2, 3, 5, int(rules.parameters_per_row * rules.rows))
    for requests in (10, int(rules.requests)):
        found = [worst(rules.rows, columns, requests, distance, quick) for columns in sizes]
        name = f"policy_determined_of_{rules.rows}_by_{requests}_m{'_m'.join(map(str, sizes))}"
        figures[name] = ", ".join(map(str, found))
    figures["policy_default_keeps_fifteen_sixteenths_met"] = max(found) <= rules.rows / 16
    figures["policy_16_cells_of_250_binary_rows_counted_by_2_requests"] = _discrete(2)
    bound = ((30, 2), (30, 5)) if quick else ((30, 2), (30, 5), (100, 2), (100, 5), (200, 5), (400, 5))
    for rows, columns in bound:
        curve = [enough(rows, columns, requests, distance) for requests in (3, 10, 30, 60)]
        name = f"policy_determined_of_{rows}_m{columns}_by_3_10_30_60"
        figures[name] = ", ".join(map(str, curve))
    for rows, columns in () if quick else ((10, 2), (30, 2), (30, 3), (30, 5)):
        curve = [solve(rows, columns, requests, 5.0, 6, reach_sd=1.0) for requests in (5, 20)]
        name = f"policy_solved_of_{rows}_m{columns}_by_5_20"
        figures[name] = ", ".join(map(str, curve))
    data, _ = _data(30, 2, 1)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), _SMALL, data)
        rng = np.random.default_rng(0)
        through = [server.expand(rng.uniform(-20, 20, 2), 1, f"run {i}") is not None for i in range(80)]
        figures["policy_answered_in_80_runs_inside_every_limit"] = int(sum(through))
        q = Gaussian(np.full(2, 1e8), 1e8 * np.eye(2))  # a probe at (1, 1): q and cavity equally sharp
        server = Server(Path(folder) / "x", _SMALL, data)
        (Path(folder) / "x").mkdir()
        reply = server.ask(pack_target(q, Gaussian(q.linear * 0.9999, q.precision * 0.9999), 0.0))
        figures["policy_sharp_q_with_sharp_cavity_answered"] = reply is not None
    return figures


def _conclusions() -> dict[str, Any]:
    data, _ = _data(30, 2, 1)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), _SMALL, data)
        q = Gaussian(np.zeros(2), np.eye(2))
        answers = set()
        for i in range(100):
            narrow = Gaussian(q.linear + i, q.precision * (1 + i))
            texts = {"client_id": "a", "run": "run", "seed": str(i), "status": "converged"}
            arrays, told = _ending.conclude(server.site, {}, None, (pack_target(narrow, narrow, 0.0), texts))
            numbers = {name: np.asarray(value).tolist() for name, value in arrays.items()}
            answers.add(json.dumps([numbers, told]))
        lines = list(audit.lines(Path(folder)))
        drawn = sum(line["event"] == "conclusion" and line["refused"] is None for line in lines)
    return {
        "policy_conclusions_asked": 100,
        "policy_conclusions_drawn": drawn,
        "policy_conclusions_different_answers": len(answers),
    }


def _mixed_settings() -> dict[str, Any]:
    """The ledger as a filter against the closed form, over settings drawn at random."""
    rules, rng = Policy(epsilon=2.0), np.random.default_rng(0)
    spent, worst, agree, settings = 0.0, 0.0, True, []
    for z in rng.choice([0.1, 2.0, 5.0, 20.0, 60.0], size=2000):
        wanted = privacy.epsilon([*settings, float(z)], [1] * (len(settings) + 1), rules.delta) <= 2.0
        rule = refuse_release(rules, float(z), spent, 0)
        agree &= wanted == (rule is None)
        if rule is None:
            spent += z**-2
            settings.append(float(z))
            worst = max(worst, privacy.epsilon_at(rules.delta, 2 * math.sqrt(spent)))
        if len(settings) > 40:
            break
    return {"policy_ledger_met": bool(agree), "policy_ledger_largest_epsilon_of_2": round(worst, 4)}


def run(quick: bool = False) -> dict[str, Any]:
    """Figures of all four, and whether they are held; quick, the prober without a policy stops after 120 requests."""
    found = {**_far_probes(quick), **_inside_every_limit(quick), **_conclusions(), **_mixed_settings()}
    probers = [f"policy_prober_{name}" for name in _PROBERS]
    bars = {
        "policy_prober_met": all(
            found[f"{name}_rows_found"] == 0
            and found[f"{name}_first_refused"] <= 10
            and found[f"{name}_refusals_in_log"] > 0
            for name in probers
        ),
        "policy_prober_is_real_met": found["policy_prober_without_rows_of_30"] >= (5 if quick else 30),
        "policy_conclusions_met": (found["policy_conclusions_drawn"], found["policy_conclusions_different_answers"])
        == (1, 1),
        "policy_requests_met": found["policy_answered_in_80_runs_inside_every_limit"] == _SMALL.requests,
    }
    return {**found, **bars}


def main(argv: list[str] | None = None) -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    print(json.dumps(run(parser.parse_args(argv).quick), ensure_ascii=False))


if __name__ == "__main__":
    import logging

    logging.disable(logging.ERROR)
    main()

"""A server that is after single patients: columns that few rows make up, whatever they are hidden in; and honest ones.

    python -m benchmarks._attacks.patients [--quick]

A target is a patient of the site's whose outcome would be read off one gradient. It counts as told unless the site
refuses by a rule with a name, at its introduction or at one of the first two requests.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy.interpolate import BSpline

import fedppl
from fedppl import gaussian
from fedppl.algorithms.ep.warm_start import along
from fedppl.contracts import Request
from fedppl.engine.few_rows import _vectors, refuse_model
from fedppl.engine.guard import NONE, Ledger, Runs, admit, in_memory, refuse_data
from fedppl.engine.policy import Policy
from fedppl.model.row_scores import slopes
from fedppl.numerics.concentration import by_column, share_of_units
from fedppl.types import Array

ROWS, TARGETS = 600, 25
UNITS = 8  # of a network
Columns = Callable[[Any, Array, Any], Array]  # of a generator, a site's covariates (n, 2) and the rows aimed at


def logistic(X: Any, y: Any) -> Any:
    """Coefficients that are all shared."""
    columns = np.shape(X)[1]
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 2.5, shape=columns)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def baked(X: Any, y: Any) -> Any:
    """The same with data as constants."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2.5, shape=np.shape(X)[1])
        pm.Bernoulli("obs", logit_p=pt.constant(X) @ beta, observed=y)
    return model


def normal(X: Any, y: Any) -> Any:
    """A linear model."""
    with pm.Model() as model:
        columns = np.shape(X)[1]
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta, sd = pm.Normal("beta", 0, 2.5, shape=columns), pm.HalfNormal("sd", 2)
        pm.Normal("obs", X @ beta, sd, observed=y)
    return model


def counts(X: Any, y: Any) -> Any:
    """A log-linear model."""
    with pm.Model() as model:
        columns = np.shape(X)[1]
        X, y = pm.Data("X", X), pm.Data("y", y)
        pm.Poisson("obs", pm.math.exp(X @ pm.Normal("beta", 0, 1, shape=columns)), observed=y)
    return model


def unit(X: Any, y: Any, center: Any, width: float = 1e-3) -> Any:
    """A hidden unit of a network that opens for one row: its outgoing weight is shared."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta, out = pm.Normal("beta", 0, 2.5, shape=2), pm.Normal("out", 0, 2.5)
        opened = pt.maximum(0.0, 1.0 - pt.sum(((X - center) / width) ** 2, axis=1))
        pm.Bernoulli("obs", logit_p=X @ beta + out * opened, observed=y)
    return model


def wards(X: Any, y: Any, ward: Any, marked: Any) -> Any:
    """A row's own effect has the indicator in its mean; the rows themselves do not."""
    with pm.Model() as model:
        X, y, ward, marked = (pm.Data(k, v) for k, v in {"X": X, "y": y, "ward": ward, "marked": marked}.items())
        beta, by = pm.Normal("beta", 0, 2.5, shape=2), pm.Normal("by", 0, 2.5)
        effect = pm.Normal("effect", by * marked, 1.0, shape=marked.shape[0])
        pm.Bernoulli("obs", logit_p=X @ beta + effect[ward], observed=y)
    return model


def product(x: Any, y: Any, marked: Any) -> Any:
    """One row has a product of coefficients: an entry of the Hessian to itself."""
    with pm.Model() as model:
        x, y, marked = pm.Data("x", x), pm.Data("y", y), pm.Data("marked", marked)
        beta = pm.Normal("beta", 0, 2.5, shape=2)
        pm.Bernoulli("obs", logit_p=beta[0] + beta[1] * x + marked * beta[0] * beta[1], observed=y)
    return model


def signs(x: Any, y: Any, marked: Any) -> Any:
    """Columns that differ by signs, and by size in one row, mixed: their squares differ by that row alone."""
    with pm.Model() as model:
        x, y, marked = pm.Data("x", x), pm.Data("y", y), pm.Data("marked", marked)
        rng = np.random.default_rng(1)
        both = pt.stack([x, x * rng.choice([-1.0, 1.0], ROWS) * (1.0 + marked)], axis=1)
        beta = pm.Normal("beta", 0, 2.5, shape=2)
        pm.Bernoulli("obs", logit_p=both @ rng.normal(size=(2, 2)) @ beta, observed=y)
    return model


def products(x: Any, y: Any, marked: Any, apart: bool = False) -> Any:
    """Products of coefficients times noise that cancels in their sum but for one row: so does the Hessian's."""
    with pm.Model() as model:
        x, y, marked = pm.Data("x", x), pm.Data("y", y), pm.Data("marked", marked)
        beta = [pm.Normal(f"b{i}", 0, 2.5) for i in range(5)] if apart else pm.Normal("beta", 0, 2.5, shape=5)
        noise = np.random.default_rng(2).normal(size=(9, ROWS))
        terms = [beta[i] * beta[j] for i in range(5) for j in range(i)]
        last = terms.pop() * (marked - noise.sum(axis=0))
        pm.Bernoulli("obs", logit_p=0.3 * x + last + sum(a * b for a, b in zip(noise, terms, strict=True)), observed=y)
    return model


def jumps(x: Any, y: Any, marked: Any, at: float = 0.3) -> Any:
    """A term of one row on one side of a bound of a coefficient that has no slope."""
    with pm.Model() as model:
        x, y, marked = pm.Data("x", x), pm.Data("y", y), pm.Data("marked", marked)
        beta = pm.Normal("beta", 0, 2.5, shape=2)
        pm.Bernoulli("obs", logit_p=beta[0] * x + marked * pt.gt(beta[1], at), observed=y)
    return model


def twice(x: Any, y: Any, marked: Any) -> Any:
    """Each row two times, with noise that cancels: no entry of the density depends on few rows, and their sum does."""
    with pm.Model() as model:
        x, y, marked = pm.Data("x", x), pm.Data("y", y), pm.Data("marked", marked)
        noise = np.random.default_rng(0).normal(size=ROWS)
        beta = pm.Normal("beta", 0, 2.5, shape=2)
        column, both = pt.concatenate([marked + noise, -noise]), [pt.concatenate([one, one]) for one in (x, y)]
        pm.Bernoulli("obs", logit_p=beta[0] * both[0] + beta[1] * column, observed=both[1])
    return model


def _constants(declare: Callable[[Any, Any, Any, Any], None]) -> Callable[..., Any]:
    """A builder that has its data as numbers, of which NumPy has made what it likes; row 7 is aimed at."""

    def build(x: Any, y: Any, marked: Any) -> Any:
        with pm.Model() as model:
            declare(pm.Normal("beta", 0, 2.5, shape=3), x, y, marked)
        return model

    return build


def _normal(eta: Any, y: Any) -> None:
    pm.Normal("obs", eta, 1.0, observed=y)


def _logit(eta: Any, y: Any) -> None:
    pm.Bernoulli("obs", logit_p=eta, observed=y)


@functools.cache
def _rotation() -> Array:
    found: Array = np.linalg.qr(np.random.default_rng(5).normal(size=(ROWS, ROWS)))[0]
    return found


def _mixed(beta: Any, x: Array, y: Array, marked: Array) -> None:
    """Every outcome is one of all, of columns that are mixed alike."""
    mix = _rotation()
    _normal(pt.constant(mix @ np.stack([np.ones(ROWS), x, marked + x], 1)) @ beta, mix @ y)


def _repeated(beta: Any, x: Array, y: Array, marked: Array) -> None:
    """Each row two times, with noise that cancels."""
    noise = np.random.default_rng(0).normal(size=ROWS)
    _logit(beta[0] + beta[1] * np.r_[x, x] + beta[2] * np.r_[marked + noise, -noise], np.r_[y, y])


def _many_times(beta: Any, x: Array, y: Array, marked: Array) -> None:
    """One patient two hundred times."""
    _logit(beta[0] + beta[1] * x, y)
    pm.Bernoulli("more", logit_p=beta[2], observed=np.repeat(y[marked > 0], 200))


def _another_outcome(beta: Any, x: Array, y: Array, marked: Array) -> None:
    _logit(beta[0] + beta[1] * x + beta[2] * float(y[marked > 0].sum() + 0.05 * x.mean()), y)


def _another_product(beta: Any, x: Array, y: Array, marked: Array) -> None:
    _logit(beta[0] + beta[1] * x + float(y[marked > 0].sum()) * beta[0] * beta[1] + 0.0 * beta[2], y)


def _own_product(beta: Any, x: Array, y: Array, marked: Array) -> None:
    _logit(beta[0] + beta[1] * x + marked * beta[0] * beta[1] + 0.0 * beta[2], y)


def _in_order(beta: Any, x: Array, y: Array, marked: Array) -> None:
    """All of x in order, and outcomes as they were."""
    _logit(beta[0] + beta[1] * x + beta[2] * float(np.sort(x)[ROWS // 2]), y)


def _by_threshold(beta: Any, x: Array, y: Array, marked: Array) -> None:
    _logit(beta[0] + beta[1] * x + beta[2] * float(x[marked > 0][0] > 0.1), y)


def _by_branch(beta: Any, x: Array, y: Array, marked: Array) -> None:
    _logit(beta[0] + beta[1] * x + (beta[2] if x[marked > 0][0] > 0.1 else 2.0 * beta[2]), y)


def _in_loop(beta: Any, x: Array, y: Array, marked: Array) -> None:
    eta = beta[0] + beta[1] * x
    for _ in range(int(y[marked > 0].sum())):
        eta = eta + beta[2]
    _logit(eta, y)


def _in_density(beta: Any, x: Array, y: Array, marked: Array) -> None:
    """A number that stands in no graph but that of a density of the declaration's own."""
    of = float(y[marked > 0].sum())
    pm.CustomDist(
        "obs", beta[0] + beta[1] * x, beta[2], logp=lambda v, eta, b: -((v - eta - of * b) ** 2), observed=1.0 * y
    )


CONSTANTS: Mapping[str, Callable[..., Any]] = {
    declare.__name__.strip("_"): _constants(declare)
    for declare in (
        _mixed,
        _repeated,
        _many_times,
        _another_outcome,
        _another_product,
        _own_product,
        _in_order,
        _by_threshold,
        _by_branch,
        _in_loop,
        _in_density,
    )
}


def potential(X: Any, y: Any) -> Any:
    """Rows written into a Hessian: entry (i, i) is a value of row i."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 2.5, shape=12)
        pm.Potential("obs", 0.5 * pt.sum(X[:12, 0] * beta**2) + 0.0 * pt.sum(y))
    return model


def joint(X: Any, y: Any) -> Any:
    """One density of all rows, whose covariance is a diagonal: single rows again, under another name."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 2.5, shape=2)
        pm.MvNormal("obs", X @ beta, np.eye(ROWS), observed=y.astype("float64"))
    return model


def _marks(rows: Any, n: int) -> Array:
    found = np.zeros(n)
    found[rows] = 1.0
    return found


def _bump(x: Array, at: float, width: float) -> Array:
    return np.asarray(np.exp(-0.5 * np.square((x - at) / width)))


def _spline(x: Array, rows: Array) -> Array:
    """A cubic B-spline that is nothing but about one value."""
    places = np.sort(x)
    found = []
    for row in rows[:3]:
        i = int(np.clip(np.searchsorted(places, x[row]), 1, len(x) - 2))
        low, high = 0.5 * (places[i - 1] + places[i]), 0.5 * (places[i] + places[i + 1])
        found.append(np.nan_to_num(BSpline.basis_element(np.linspace(low, high, 5), extrapolate=False)(x)))
    return np.stack(found, 1)


def _power(x: Array) -> Array:
    scaled = (x - np.min(x)) / (np.max(x) - np.min(x))
    return np.stack([scaled**200, scaled**400, (1 - scaled) ** 400], 1)


def _spread(rng: Any, n: int, rows: Array) -> Array:
    hidden = np.column_stack([_marks(rows[:1], n), rng.normal(size=(n, 5))])
    return np.asarray(hidden @ rng.normal(size=(6, 6)))


def _beside(rng: Any, n: int, rows: Array, size: float) -> Array:
    noise = rng.normal(size=n)
    return np.stack([noise, noise + size * _marks(rows[:1], n)], 1)


DISGUISES: Mapping[str, Columns] = {
    "indicators": lambda rng, x, rows: np.stack([_marks(row, len(x)) for row in rows], 1),
    "sums of two": lambda rng, x, rows: np.stack(
        [_marks(pair, len(x)) for pair in np.stack([rows[:-1], rows[1:]], 1)], 1
    ),
    "products": lambda rng, x, rows: (x[:, 1] * _marks(rows[:1], len(x)))[:, None],
    "splines": lambda rng, x, rows: _spline(x[:, 0], rows),
    "two rows": lambda rng, x, rows: np.stack([_marks(rows[i : i + 2], len(x)) for i in range(0, 24, 2)], 1),
    "three rows": lambda rng, x, rows: np.stack([_marks(rows[i : i + 3], len(x)) for i in range(0, 24, 3)], 1),
    "hidden in noise": lambda rng, x, rows: _beside(rng, len(x), rows, 1.0),
    "spread over columns": lambda rng, x, rows: _spread(rng, len(x), rows),
    "faint": lambda rng, x, rows: _beside(rng, len(x), rows, 1e-3),
    "fainter": lambda rng, x, rows: _beside(rng, len(x), rows, 1e-9),
    "bumps": lambda rng, x, rows: _bump(x[:, :1] + 1e3 * x[:, 1:], x[rows[:3], 0] + 1e3 * x[rows[:3], 1], 1e-3),
    "powers": lambda rng, x, rows: _power(x[:, 0]),
}


def site(seed: int, columns: Columns | None = None) -> tuple[Array, Any, Any]:
    """Design, outcomes and the rows aimed at, of a site."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 2))
    y = (rng.random(ROWS) < 0.35).astype(int)
    rows = rng.choice(ROWS, TARGETS, replace=False)
    more = np.zeros((ROWS, 0)) if columns is None else columns(rng, x, rows)
    return np.column_stack([np.ones(ROWS), x, more]), y, rows


def refused(declared: Any, data: Mapping[str, Any], *, rules: Policy | None = None, points: Any = ()) -> str | None:
    """The name of the rule that keeps a site out, or that refuses a request at one of the points; None: it is told."""
    entries: list[str] = []
    own = in_memory(rules or Policy(), "a")

    def write(ledger: Ledger, entry: Mapping[str, Any], runs: Runs = NONE) -> None:
        own.write(ledger, {}, runs)
        entries.extend([str(entry["refused"])] if entry.get("refused") else [])

    guard, algorithm = own._replace(write=write), fedppl.EP()
    client = declared.enrol({"a": data}, kernel=False)["a"]
    if refuse_data(guard, client, algorithm):
        return entries[0].partition(":")[0]
    for number, point in enumerate(points or [np.zeros(client.layout.size)], start=1):
        message = {"point": point, "move": np.zeros(len(point)), "prior_share": np.array(0.0)}
        if admit(guard, algorithm, client, Request("a", 7, number, (1,), message, "run")) is None:
            return entries[0].partition(":")[0]
    return None


def disguised(quick: bool) -> dict[str, Any]:
    """Each disguise over some sites: targets that are told, and by which rules the others are kept."""
    told, rules = 0, Counter[str]()
    for name, columns in DISGUISES.items():
        for seed in range(1 if quick else 5):
            X, y, rows = site(seed, columns)
            for builder in (logistic, baked) if name == "indicators" else (logistic,):
                rule = refused(fedppl.FederatedModel(builder, ["beta"]), {"X": X, "y": y}, rules=_many_columns())
                rules[str(rule)] += 1
                told += (X.shape[1] - 3) * (rule is None)
    x, y, rows = site(0)
    x = x[:, 1:]
    one = functools.partial(unit, center=x[rows[0]])
    ward, marked = np.arange(ROWS) // 2, _marks(rows[0] // 2, ROWS // 2)
    others: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "network unit": (fedppl.FederatedModel(one, ["beta", "out"]), {"X": x, "y": y}),
        "effects": (fedppl.FederatedModel(wards, ["beta", "by"]), {"X": x, "y": y, "ward": ward, "marked": marked}),
    }
    marks = {"x": x[:, 0], "y": y, "marked": _marks(rows[:1], ROWS)}
    builders = {f.__name__: f for f in (product, signs, products, twice)} | dict(CONSTANTS)
    others |= {name: (fedppl.FederatedModel(f, ["beta"]), marks) for name, f in builders.items()}
    scalars = fedppl.FederatedModel(functools.partial(products, apart=True), [f"b{i}" for i in range(5)])
    others |= {"products of scalars": (scalars, marks)}
    for declared, data in others.values():
        rule = refused(declared, data, rules=_many_columns())
        rules[str(rule)] += 1
        told += rule is None
    return {"patients_told": told, "patients_kept_by": dict(rules), "patients_none_told_met": told == 0}


def _many_columns() -> Policy:
    """The default but for how many coefficients 600 rows may have: what remains has to hold by itself."""
    return Policy(parameters_per_row=0.1)


def unguarded() -> dict[str, Any]:
    """The same indicators without a policy: the gradient at 0 has the outcomes."""
    X, y, rows = site(0, DISGUISES["indicators"])
    client = fedppl.FederatedModel(logistic, ["beta"]).enrol({"a": {"X": X, "y": y}}, kernel=False)["a"]
    gradient = slopes(client, np.zeros(X.shape[1]), np.eye(X.shape[1])).sum(axis=0)[3:]
    return {"patients_without_policy_of_25": int(np.sum((gradient > 0) == y[rows]))}


def where_few_count() -> dict[str, Any]:
    """An honest declaration asked where the weights of all rows but a few vanish, and where they do not."""
    X, y, _ = site(3)
    declared, reach = fedppl.FederatedModel(logistic, ["beta"]), Policy().distance * 2.5
    # Whoever knows the covariates chooses the plane on which one row lies alone.
    far = np.random.default_rng(0).uniform(-reach, reach, (20_000, 3))
    weights = np.exp(-np.abs(far @ X.T))
    top = np.sum(-np.partition(-weights, 2, axis=1)[:, :3], axis=1) / np.sum(weights, axis=1)
    rule = refused(declared, {"X": X, "y": y}, points=[far[np.argmax(top)]])
    near = refused(declared, {"X": X, "y": y}, points=[np.zeros(3), np.array([-0.7, 0.4, -0.4])])
    return {"patients_far_out_refused_by": str(rule), "patients_far_out_met": rule == "few_rows" and near is None}


def along_a_step(at: float = 0.3) -> dict[str, Any]:
    """Values along a step that crosses a bound at which one patient's density jumps: those beyond are left out."""
    x, y, rows = site(0)
    data = {"x": x[:, 1], "y": y, "marked": _marks(rows[:1], ROWS)}
    builder = functools.partial(jumps, at=at)
    client = fedppl.FederatedModel(builder, ["beta"]).enrol({"a": data}, kernel=False)["a"]
    step = np.array([0.0, 0.2])
    message = {"point": step, "move": step, "prior_share": np.array(0.0)}
    admitted = admit(in_memory(Policy(), "a"), fedppl.EP(), client, Request("a", 7, 1, (1,), message, "run"))
    assert admitted is not None
    places = np.concatenate([step[1:], along(step, step)[:, 1]])[admitted.message["inside"]]
    held = bool(np.all(places < at) and len(places) == 1 + np.sum(along(step, step)[:, 1] < at))
    return {"patients_jumps_along_a_step_met": held}


def written_into_terms() -> dict[str, Any]:
    """Terms that are not of single rows, under the default."""
    X, y, _ = site(0)
    rules = [
        str(refused(fedppl.FederatedModel(builder, ["beta"]), {"X": X[:, 1:], "y": y}))
        for builder in (potential, joint)
    ]
    return {"patients_joint_terms_refused_by": rules, "patients_joint_terms_met": rules == ["joint", "joint"]}


def trapped() -> dict[str, Any]:
    """Weights of a network by which a hidden unit opens for one row, or for one row more than its neighbour.

    And weights as training begins with. Differences of neighbours are single rows (Fowl et al., "Robbing the Fed").
    """
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, UNITS), torch.nn.ReLU(), torch.nn.Linear(UNITS, 2)).double()

    def build(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            output = fedppl.nn.module(net, fedppl.nn.parameters(net), pm.Data("X", X))
            pm.Categorical("obs", logit_p=output, observed=pm.Data("y", y))
        return model

    X, y, _ = site(0)
    X = X[:, 1:]
    names = [name for name, _ in net.named_parameters()]
    client = fedppl.FederatedModel(build, names).enrol({"a": {"X": X, "y": y}}, kernel=False)["a"]
    start = np.concatenate([value.detach().numpy().ravel() for value in net.parameters()])
    trap, row = start.copy(), int(np.argmax(np.linalg.norm(X, axis=1)))
    way = X[row] / np.linalg.norm(X[row])
    places = np.sort(X @ way)[::-1]
    trap[:2], trap[2 * UNITS] = way, -0.5 * (places[1] + places[0])
    figures = {}
    for name, weights in {"trap": trap, "neighbours": _neighbours(start, way, places), "start": start}.items():
        guard, algorithm = in_memory(_many_columns(), "a"), fedppl.nn.FedAvg()
        kept_out = refuse_data(guard, client, algorithm)
        request = Request("a", 7, 1, (1,), {"mean": weights}, "run")
        figures[name] = kept_out is None and admit(guard, algorithm, client, request) is None
    return {
        "patients_trap_weights_refused": [figures["trap"], figures["neighbours"]],
        "patients_trap_weights_met": figures["trap"] and figures["neighbours"] and not figures["start"],
    }


def _neighbours(start: Array, way: Array, places: Array) -> Array:
    """All units in one direction, open for 20 rows and more, with different weights to the outputs."""
    weights, open_for = start.copy(), 20 + np.arange(UNITS)
    weights[: 2 * UNITS] = np.tile(way, UNITS)
    weights[2 * UNITS : 3 * UNITS] = -0.5 * (places[open_for - 1] + places[open_for])
    return weights


def honest(rng: Any, kind: str) -> Array:
    """A design (n, p) that people declare, of 250 to 2,000 rows; levels that ten rows have are columns."""
    n = int(rng.integers(250, 2001))
    x = rng.normal(size=n)
    columns = [np.ones(n), x, *rng.normal(size=(int(rng.integers(0, 3)), n))]
    if kind in ("skewed", "all"):
        columns += [rng.exponential(size=n), rng.lognormal(0, 1, size=n)]
    if kind in ("factors", "all"):
        for _ in range(int(rng.integers(1, 3))):
            levels = int(rng.integers(2, 13))
            given = rng.choice(levels, n, p=rng.dirichlet(np.full(levels, 2.0)))
            columns += [marks for level in range(1, levels) if np.sum(marks := (given == level) * 1.0) >= 10]
    if kind in ("natural splines", "all"):
        columns += _natural(x, np.quantile(x, [0.05, 0.275, 0.5, 0.725, 0.95]))
    if kind == "B-splines":
        knots = np.concatenate([[x.min()] * 4, np.quantile(x, [0.25, 0.5, 0.75]), [x.max()] * 4])
        basis = BSpline.design_matrix(np.clip(x, x.min(), x.max() - 1e-12), knots, 3).toarray()
        columns += list(basis[:, 1:].T)
        columns.pop(1)
    if kind in ("interactions", "all"):
        arm = (rng.random(n) < 0.4) * 1.0
        columns += [arm, arm * x]
    return np.stack(columns, 1)


def _natural(x: Array, knots: Array) -> list[Array]:
    """Restricted cubic splines: linear beyond the outer knots."""
    last, before = knots[-1], knots[-2]

    def cube(t: float) -> Array:
        return np.maximum(x - t, 0.0) ** 3

    return [
        cube(t) - cube(before) * (last - t) / (last - before) + cube(last) * (before - t) / (last - before)
        for t in knots[:-2]
    ]


KINDS = ("skewed", "factors", "natural splines", "B-splines", "interactions", "all")
FAMILIES: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "bernoulli": (logistic, ("beta",)),
    "gaussian": (normal, ("beta", "sd")),
    "poisson": (counts, ("beta",)),
}


def _outcomes(rng: Any, family: str, X: Array) -> Array:
    scale = np.maximum(np.std(X, axis=0), 1e-12)
    eta = (X[:, 1:] / scale[1:]) @ rng.normal(0, 0.35, X.shape[1] - 1)
    if family == "gaussian":
        return np.asarray(1.0 + eta + rng.standard_t(5, size=len(X)))
    if family == "poisson":
        return np.asarray(rng.poisson(np.exp(np.clip(0.3 + 0.5 * eta - 0.5 * np.mean(eta), -3, 3))))
    return np.asarray((rng.random(len(X)) < 1 / (1 + np.exp(-(eta - np.mean(eta) - 0.7)))).astype(int))


def path(client: Any) -> list[Array]:
    """Points that a search for the mode asks at, from the prior's mean: Fisher's steps of at most 1.5 prior sds."""
    prior = client.layout.prior
    mean, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    point, found = mean, [mean]
    for _ in range(10):
        root = _vectors(client, point)[0]
        slope = slopes(client, point, np.eye(len(point))).sum(axis=0) - prior.precision @ (point - mean)
        step = np.linalg.solve(root.T @ root + prior.precision, slope)
        point = point + step * min(1.0, 1.5 / max(float(np.max(np.abs(step) / sd)), 1e-12))
        found.append(point)
        if np.max(np.abs(step) / sd) < 1e-3:
            break
    return found


def honest_declarations(count: int) -> dict[str, Any]:
    """How many of so many honest declarations are refused on the way to their mode, by kind."""
    lost, made = Counter[str](), Counter[str]()
    for seed in range(count):
        rng = np.random.default_rng(1000 + seed)
        kind, family = KINDS[seed % len(KINDS)], list(FAMILIES)[seed % 3]
        builder, names = FAMILIES[family]
        X = honest(rng, kind)
        data = {"X": X / np.maximum(np.max(np.abs(X), axis=0), 1.0), "y": _outcomes(rng, family, X)}
        client = fedppl.FederatedModel(builder, list(names)).enrol({"a": data}, kernel=False)["a"]
        rules = Policy(parameters_per_row=np.inf)
        made[kind] += 1
        rule = refuse_model(rules, client)
        guard, points = in_memory(rules, "a"), path(client)
        for number, point in enumerate(points, start=1):
            # A step to a point that the rule leaves out is halved; the first and the last have to be answered.
            move = point - points[number - 2] if 1 < number < len(points) else np.zeros(len(point))
            message = {"point": point, "move": move, "prior_share": np.array(0.0)}
            admitted = admit(guard, fedppl.EP(), client, Request("a", 7, number, (1,), message, "run"))
            rule = rule or ("refused" if admitted is None and not np.any(move) else None)
        lost[kind] += bool(rule)
    share = sum(lost.values()) / count
    return {
        "patients_honest_refused": {kind: f"{lost[kind]} of {made[kind]}" for kind in KINDS},
        "patients_honest_refused_share": share,
        "patients_honest_met": share <= 0.02 + (1.0 / count if count < 50 else 0.0),
    }


def honest_networks(count: int) -> dict[str, Any]:
    """How many of so many networks of one hidden layer are refused, by all looks and by that at single units.

    8 to 64 units, 250 to 2,000 rows; every other one is trained by Adam, the others are as training begins.
    """
    import torch

    from fedppl.nn import functional
    from fedppl.nn.algorithms._common import _open_rows_of

    lost, lost_at_units = 0, 0
    for seed in range(count):
        rng = np.random.default_rng(5000 + seed)
        torch.manual_seed(seed)
        n, inputs, units = int(rng.integers(250, 2001)), int(rng.integers(2, 13)), int(2 ** rng.integers(3, 7))
        X = rng.normal(size=(n, inputs))
        if seed % 3 == 1:
            X[:, 0] = rng.exponential(size=n)
        if seed % 3 == 2:
            X[:, 0] = rng.integers(0, 2, n)
        y = (rng.random(n) < 1 / (1 + np.exp(-np.sin(2.0 * X[:, 0]) - X[:, 1]))).astype(int)
        layers = torch.nn.Linear(inputs, units), torch.nn.ReLU(), torch.nn.Linear(units, 2)
        net = torch.nn.Sequential(*layers).double()
        if seed % 2:
            _train(net, X, y, int(rng.integers(50, 501)))

        # Without a client, whose declaration takes seconds: the looks need rows and weights alone.
        unit: Any = SimpleNamespace(
            net=net,
            state=lambda w, dtype, net=net: functional.state_of(net, torch.tensor(w, dtype=dtype)),
            tensor=lambda values, dtype: torch.tensor(values, dtype=dtype),
        )
        weights = np.concatenate([value.detach().numpy().ravel() for value in net.parameters()])
        rules, rows = Policy(), _open_rows_of(unit, weights, X, torch.Generator().manual_seed(0))
        lost += not share_of_units(rows, rules.few_rows, rules.few_rows_share) < rules.few_rows_share
        lost_at_units += any(by_column(layer, rules.few_rows) >= rules.few_rows_share for layer in rows)
    return {
        "patients_honest_networks": count,
        "patients_honest_networks_refused": lost,
        "patients_honest_networks_refused_at_units": lost_at_units,
    }


def _train(net: Any, X: Array, y: Array, steps: int) -> None:
    import torch

    inputs, outcomes = torch.tensor(X), torch.tensor(y)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(inputs), outcomes)
        loss.backward()
        optimizer.step()


def run(quick: bool) -> dict[str, Any]:
    """All of it."""
    return {
        **unguarded(),
        **disguised(quick),
        **where_few_count(),
        **along_a_step(),
        **written_into_terms(),
        **(trapped() if importlib.util.find_spec("torch") else {}),
        **honest_declarations(12 if quick else 200),
        **(honest_networks(1100) if importlib.util.find_spec("torch") and not quick else {}),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(run("--quick" in sys.argv)))

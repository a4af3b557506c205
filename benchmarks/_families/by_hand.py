"""A formula's model as somebody writes it in PyMC: with all sites in it, and for one site alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

import fedppl
from benchmarks._families.cases import Case
from fedppl.types import Array

WIDE = 2.5


class Moments(NamedTuple):
    """Of all outcomes."""

    mean: float
    sd: float


class Setup(NamedTuple):
    """What priors stand on, from all rows."""

    mean: Array  # of x, high and low
    sd: Array
    sizes: Array  # of the columns that vary by site
    center: float  # of the linear predictor
    unit: float
    outcome: Moments


def setup(case: Case, frame: pd.DataFrame) -> Setup:
    """The scales, worked out from the pooled table."""
    X = _columns(frame)
    y = frame[case.outcome].to_numpy()
    mean, sd = (float(y.mean()), float(y.std())) if y.dtype.kind in "if" else (0.0, 1.0)
    center = {"none": 0.0, "outcome": mean, "log": np.log(max(mean, 1e-9)), "minus log": -np.log(max(mean, 1e-9))}
    center["logit"] = np.log(mean / (1 - mean)) if 0 < mean < 1 else 0.0
    sizes = np.array([1.0, float(np.sqrt(np.mean(X[:, 0] ** 2)))][: 1 + case.slopes])
    unit = sd if case.scale == "outcome" else 1.0
    return Setup(X.mean(axis=0), X.std(axis=0), sizes, float(center[case.scale]), unit, Moments(mean, sd))


def names(case: Case) -> list[str]:
    """Shared variables that are compared, common coefficients first."""
    several = case.slopes or case.levels > 1
    beside = {"student": ["sigma", "nu"], "gaussian": ["sigma"], "lognormal": ["sigma"], "beta": ["kappa"]}
    beside |= dict.fromkeys(("negativebinomial", "gamma", "weibull", "loglogistic"), ["alpha"])
    beside |= {"ordinal": ["threshold"], "piecewise": ["piece"]}
    groups = ["site_sd", *(["site_corr"] if several else [])]
    return [*common(case), *groups, *beside.get(case.family, [])]


def common(case: Case) -> list[str]:
    """Those with a bar of their own."""
    return [*(["Intercept"] if case.intercept else []), "x", "arm"]


def pooled(case: Case, frame: pd.DataFrame) -> pm.Model:
    """All sites in one model, effects standardised."""
    known, site = setup(case, frame), pd.factorize(frame["site"])
    rows, y, extra = case.arrays(frame)
    X, of = _columns(frame)[rows], site[0][rows]
    with pm.Model() as model:
        shared = _shared(case, known)
        z = pm.Normal("z", shape=(len(site[1]), shared["root"].shape[0]))
        eta = _predictor(case, shared, X, (z @ shared["root"].T)[of])
        case.observe(eta, shared, y, extra)
    return model


def one_site(X: Any, y: Any, case: Case, known: Setup) -> pm.Model:
    """One site's model."""
    with pm.Model() as model:
        _declared(case, known, pm.Data("X", X), pm.Data("y", y), None)
    return model


def one_site_with(X: Any, y: Any, extra: Any, case: Case, known: Setup) -> pm.Model:
    """The same, of an outcome that has more than one number."""
    with pm.Model() as model:
        _declared(case, known, pm.Data("X", X), pm.Data("y", y), pm.Data("extra", extra))
    return model


def federated(case: Case, frame: pd.DataFrame) -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    """The declaration by a builder, and clients' arrays."""
    clients: dict[str, Any] = {}
    for name, part in frame.groupby("site"):
        rows, y, extra = case.arrays(part)
        clients[str(name)] = {"X": _columns(part)[rows], "y": y, **({} if extra is None else {"extra": extra})}
    builder = one_site if "extra" not in clients["site 0"] else one_site_with
    several = case.slopes or case.levels > 1
    spread = ["site_covariance" if several else "site_sd"]
    shared = [
        *common(case),
        *spread,
        *(one for one in names(case) if one not in [*common(case), "site_sd", "site_corr"]),
    ]
    return fedppl.FederatedModel(functools.partial(builder, case=case, known=setup(case, frame)), shared), clients


def _columns(frame: pd.DataFrame) -> Array:
    """The number, and whether the arm is high or low."""
    arm = frame["arm"].to_numpy()
    return np.stack([frame["x"].to_numpy(), arm == "high", arm == "low"], axis=1).astype(float)


def _declared(case: Case, known: Setup, X: Any, y: Any, extra: Any) -> None:
    shared = _shared(case, known)
    count = len(known.sizes) * max(case.levels, 1)
    effects = pm.Deterministic("site_effects", shared["root"] @ pm.Normal("z", shape=count))
    case.observe(_predictor(case, shared, X, effects[None, :]), shared, y, extra)


def _shared(case: Case, known: Setup) -> dict[str, Any]:
    unit, levels, more = known.unit, case.levels, {}
    each = {"shape": (levels,)} if levels else {}
    x = pm.Normal("x", 0, WIDE * unit / known.sd[0], **each)
    sd = WIDE * unit / known.sd[1:]
    arm = pm.Normal("arm", 0, sd[:, None] if levels else sd, shape=(2, levels) if levels else (2,))
    at = known.mean[0] * x + known.mean[1] * arm[0] + known.mean[2] * arm[1]
    if case.intercept:  # its prior is of where x and arm are at their means
        more["Intercept"] = pm.Normal("Intercept", known.center - at, WIDE * unit, **each)
    sizes = np.repeat(unit / known.sizes, max(levels, 1))
    if len(sizes) > 1:
        spread = pm.HalfNormal.dist(sizes, shape=len(sizes))
        root, correlation, sds = pm.LKJCholeskyCov(
            "site_covariance", n=len(sizes), eta=2.0, sd_dist=spread, store_in_trace=False
        )
        pm.Deterministic("site_sd", sds)
        pm.Deterministic("site_corr", correlation[np.tril_indices(len(sizes), -1)])
    else:
        root = pm.HalfNormal("site_sd", float(sizes[0])).reshape((1, 1))
    return {"x": x, "arm": arm, "root": root, **more, **case.beside(known.outcome, at)}


def _predictor(case: Case, shared: Mapping[str, Any], X: Any, effects: Any) -> Any:
    """(rows,), or (rows, levels); effects are of each row, or of all rows one."""
    if case.levels:
        beta = pm.math.concatenate([shared["x"][None, :], shared["arm"]], axis=0)
        return shared["Intercept"] + X @ beta + effects
    eta = shared.get("Intercept", 0.0) + shared["x"] * X[:, 0] + X[:, 1] * shared["arm"][0] + X[:, 2] * shared["arm"][1]
    eta = eta + effects[:, 0]
    return eta + effects[:, 1] * X[:, 0] if case.slopes else eta

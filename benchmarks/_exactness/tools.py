"""What stands on the posterior, against closed forms, refits and its own promises: seeds were fixed beforehand."""

from __future__ import annotations

from typing import Any

import arviz as az
import numpy as np
import pymc as pm
from scipy import stats

import fedppl
from benchmarks._exactness.intercepts import intercepts
from fedppl.results import idata
from fedppl.testing import normal_means

_SEED = 20261123


def binary(y: Any) -> pm.Model:
    """A site of few binary rows; log tau is shared."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, 1.5), pm.HalfNormal("tau", 1))
        pm.Bernoulli("obs", logit_p=pm.math.zeros_like(y * 1.0) + theta, observed=y)
    return model


def calibration(data_sets: int = 400) -> dict[str, Any]:
    """SBC with five sites of 3 to 10 binary rows; all data sets count, whatever their fits ended as."""
    model = fedppl.FederatedModel(binary, ["mu", "tau"])
    clients = {f"site {n}": {"y": np.resize([0, 1], n)} for n in (3, 4, 6, 8, 10)}
    row = {}
    for name, algorithm in (("sums", fedppl.Sums()), ("ep", fedppl.EP())):
        found = fedppl.calibrate(model, clients, algorithm, data_sets=data_sets, progressbar=False, random_seed=_SEED)
        status, count = np.unique(found["status"].values, return_counts=True)
        row[name] = {
            "holm": dict(zip(found["rows"].values.tolist(), np.round(found["p_adjusted"].values, 4), strict=True)),
            "status": dict(zip(status.tolist(), count.tolist(), strict=True)),
        }
    return row


def evidence() -> float:
    """Largest error of the log evidence of Gaussian models with known variances."""
    errors = []
    for count in (2, 5, 20):
        model, clients = normal_means(count)
        y = np.concatenate([data["y"] for data in clients.values()])
        same = np.concatenate([np.full(len(data["y"]), k) for k, data in enumerate(clients.values())])
        covariance = np.eye(len(y)) + 0.25 * (same[:, None] == same) + 100.0
        exact = stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)
        errors.append(abs(_fit(model, clients).log_evidence.value - exact))
    return float(max(errors))


def leave_one_out() -> float:
    """Largest difference of elpd, se and p_loo from ArviZ on the pooled rows, from the same draws."""
    found = _fit(*normal_means(8))
    drawn = [idata.as_dataset(found.client(k, groups="log_likelihood")["log_likelihood"]) for k in found.client_ids]
    values = np.concatenate([np.asarray(one["obs"]) for one in drawn], axis=2)
    group = idata.dataset({"obs": values}, {"obs": ("chain", "draw", "row")}, {})
    pooled = az.loo(idata.from_groups({"posterior": group, "log_likelihood": group}), pointwise=True, reff=1.0)
    theirs = (pooled.elpd, pooled.p) if hasattr(pooled, "elpd") else (pooled.elpd_loo, pooled.p_loo)
    ours = fedppl.loo(found)
    pairs = ((ours.elpd, theirs[0]), (ours.p_loo, theirs[1]), (ours.se, pooled.se))
    return float(max(abs(a - float(b)) for a, b in pairs))


def withdrawal() -> float:
    """Largest distance of a fit that a client left from one that never saw it, in sds, both at tolerance 1e-3."""
    found = []
    for clinics in (_clinics(np.random.default_rng(_SEED)), _clinics(np.random.default_rng(_SEED + 1), flipped=3)):
        fit = _fit(_line(), clinics, fedppl.EP(tolerance=1e-3))
        found += [fedppl.without(fit, name, progressbar=False).distance for name in list(clinics)[:4]]
    return float(max(found))


def conflict(runs: int = 200) -> dict[str, Any]:
    """P-values: of a site with flipped signs among twelve, and over honest runs of one named beforehand, of 3 rows."""
    p = fedppl.conflict(_fit(_line(), _clinics(np.random.default_rng(_SEED), flipped=7), fedppl.EP()))["p_value"]
    rng, honest = np.random.default_rng(_SEED), []
    for _ in range(runs):
        clinics = _clinics(rng, 6, rows=(3, 20, 20, 20, 20, 20))
        found = fedppl.conflict(_fit(_line(), clinics, fedppl.EP()), "clinic 00")
        honest.append(float(found["p_value"][0]))
    return {
        "flipped_is_smallest": str(p.idxmin().values) == "clinic 07",
        "p_of_flipped": round(float(p.min()), 4),
        "honest_ks_p": round(float(stats.kstest(honest, "uniform").pvalue), 4),
        "honest_below_0.05": round(float(np.mean(np.array(honest) < 0.05)), 3),
    }


def line(X: Any, y: Any) -> pm.Model:
    """A clinic's slope."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 2), pm.LogNormal("tau", -1, 0.5))
        pm.Normal("obs", slope * X, 1, observed=y)
    return model


def _line() -> fedppl.FederatedModel:
    return fedppl.FederatedModel(line, ["mu", "tau"])


def _clinics(
    rng: np.random.Generator, count: int = 12, *, rows: tuple[int, ...] | None = None, flipped: int | None = None
) -> dict[str, Any]:
    """Clinics from the model's own prior."""
    mu, tau = rng.normal(0, 2), float(np.exp(rng.normal(-1, 0.5)))
    mu = mu if flipped is None else 2.0  # signs that are flipped have to matter
    found = {}
    for k in range(count):
        X = rng.normal(size=20 if rows is None else rows[k])
        y = rng.normal(mu, tau) * X + rng.normal(size=len(X))
        found[f"clinic {k:02d}"] = {"X": X, "y": -y if k == flipped else y}
    return found


def _fit(model: fedppl.FederatedModel, clients: Any, algorithm: Any = None) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm or fedppl.Sums(), progressbar=False, random_seed=_SEED)


PARTS = {
    "intercepts": intercepts,
    "calibration": calibration,
    "evidence": evidence,
    "leave_one_out": leave_one_out,
    "withdrawal": withdrawal,
    "conflict": conflict,
}

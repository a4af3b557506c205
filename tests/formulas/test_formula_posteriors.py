"""Fits of formulas against the same linear model by hand: patsy's matrices, Gaussian algebra, quadrature over sds.

Given the sds and the correlation everything is Gaussian; these are integrated over on a grid.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd
import patsy
import pytest
from numpy.testing import assert_allclose
from scipy import linalg

import fedppl
from fedppl import Prior
from fedppl.types import Array

SITES, EACH = 6, 24
WIDE, SPREAD, NOISE = 2.0, 1.0, 2.0  # prior sds of coefficients, of effects' sds and of what is left over
# A formula's common part as we and as patsy write it, offsets, and its effects with the columns that are their groups.
Case = tuple[str, str, tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]


def case(ours: str, patsys: str = "", offsets: tuple[str, ...] = (), **effects: tuple[str, ...]) -> Case:
    return ours, patsys or ours, offsets, tuple(effects.items())


CASES: dict[str, Case] = {
    "cells by a sum of factors and a slope": case("0 + (arm + sex)*x"),
    "cells alone": case("0 + arm*sex"),
    "an interaction without main effects": case("arm:sex"),
    "an interaction beside a slope": case("x + sex:arm"),
    "slopes within levels": case("arm/x"),
    "a main effect that is taken out": case("arm*sex - sex"),
    "pairs but one, in the other order": case("(arm + sex + x)**2 - x:sex"),
    "no intercept in the end": case("arm*x - 1"),
    "a term twice": case("arm*sex + sex:arm + arm"),
    "a power of a centred column": case("x + I(center(x)**2)"),
    "seasons": case("np.sin(2 * np.pi * month / 12) + np.cos(2 * np.pi * month / 12)"),
    "units in names": case("I(x / 2) + `kg/m2`", "I(x / 2) + Q('kg/m2')"),
    "two offsets": case("x", offsets=("np.log(w)", "z")),
    "numbers as levels": case("C(k)*x - x"),
    "a spline by arm": case("bs(w, knots=[3.0], degree=2, lower_bound=0, upper_bound=6)"),
    "three factors": case("arm*sex*C(k) - arm:sex:C(k)"),
    "cells and sites": case("arm:sex", site=("1", "site")),
    "a treatment and its effect by centre": case("arm", site=("1", "site"), site_arm=("1", "site", "arm")),
    "slopes by site without levels": case("x", site=("x - 1", "site")),
    "two slopes by site without levels": case("x + z", site=("x + z - 1", "site")),
}


def table() -> pd.DataFrame:
    rng = np.random.default_rng(11)
    n = SITES * EACH
    frame = pd.DataFrame({"site": np.repeat([f"s{k}" for k in range(SITES)], EACH)})
    frame["arm"], frame["sex"] = rng.choice(["ctl", "drug", "high"], n), rng.choice(["f", "m"], n)
    frame.loc[frame["site"] == "s0", "arm"] = rng.choice(["ctl", "drug"], EACH)  # one site lacks a level
    frame["k"], frame["month"] = rng.integers(1, 4, n), np.tile(np.arange(1, 13), n // 12)
    frame["x"], frame["z"], frame["w"] = rng.normal(1.0, 1.0, n), rng.normal(size=n), rng.uniform(1.0, 5.0, n)
    frame["kg/m2"] = rng.normal(2.0, 1.0, n)
    own = rng.normal(0.0, 0.8, (SITES, 3))[np.repeat(np.arange(SITES), EACH)]
    mean = 0.5 + own[:, 0] + (0.7 + own[:, 1]) * frame["x"] + own[:, 2] * frame["z"] - (frame["arm"] == "drug")
    return frame.assign(y=mean + rng.normal(0.0, 0.9, n))


def design(inner: str, frame: pd.DataFrame) -> Array:
    return np.asarray(patsy.dmatrix(inner, frame), dtype=float)


class Effects(NamedTuple):
    """Columns of a group's effects, level after level of the group, and how many effects each level has."""

    columns: Array
    count: int

    def precision(self, sds: Array, half: float) -> Array:
        """Of all levels, given sds and (1 + r) / 2 of two effects' correlation r."""
        r = np.eye(self.count) + (2.0 * half - 1.0) * (1.0 - np.eye(self.count))
        return np.kron(np.eye(self.columns.shape[1] // self.count), np.linalg.inv(sds[:, None] * r * sds))


def by_hand(y: Array, common: Array, effects: list[Effects]) -> tuple[Array, Array]:
    """Means and sds of coefficients, of the effects' sds and of sigma."""
    columns, p = np.concatenate([common, *(one.columns for one in effects)], axis=1), common.shape[1]
    gram, cross, square = columns.T @ columns, columns.T @ y, float(y @ y)
    left = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    middle = 0.5 * np.log(left @ left / (len(y) - np.linalg.matrix_rank(columns)))
    counts = [one.count for one in effects]
    cuts = np.cumsum(counts)[:-1]
    of_sds = (np.arange(30) + 0.5) / 30 * 3.5
    halves = (np.arange(9) + 0.5) / 9 if 2 in counts else np.array([0.5])
    nodes = itertools.product(middle + np.linspace(-0.3, 0.4, 17), halves, *[of_sds] * sum(counts))
    weights, first, second = [], [], []
    for log_sigma, half, *sds in nodes:
        noise = np.exp(-2.0 * log_sigma)
        prior = [np.eye(p) / WIDE**2]
        if sds:
            parts = np.split(np.array(sds), cuts)
            prior += [one.precision(own, half) for one, own in zip(effects, parts, strict=True)]
        prior_precision = linalg.block_diag(*prior)
        precision = gram * noise + prior_precision
        covariance = np.linalg.inv(precision)
        mean = covariance @ cross * noise
        weight = log_sigma - 0.5 / noise / NOISE**2 - 0.5 * np.sum(np.square(sds)) / SPREAD**2
        weight += (2 in counts) * np.log(half * (1.0 - half))  # Beta(2, 2): correlations are LKJ(2)
        weight += 0.5 * (np.linalg.slogdet(prior_precision)[1] - np.linalg.slogdet(precision)[1])
        weights.append(weight + 0.5 * (mean @ precision @ mean - square * noise) - len(y) * log_sigma)
        first.append([*mean[:p], *sds, noise**-0.5])
        second.append([*(np.diag(covariance)[:p] + mean[:p] ** 2), *np.square(sds), 1.0 / noise])
    share = np.exp(np.array(weights) - np.max(weights))
    means = share @ np.array(first) / share.sum()
    return means, np.sqrt(share @ np.array(second) / share.sum() - means**2)


def written(own: Case) -> str:
    ours, _, offsets, effects = own
    groups = [f"({inner} | {':'.join(factor)})" for _, (inner, *factor) in effects]
    return "y ~ " + " + ".join([ours, *(f"offset({one})" for one in offsets), *groups])


def expected(own: Case, frame: pd.DataFrame) -> tuple[Array, Array, Array]:
    """Patsy's columns of the common part, and by hand the means and sds."""
    _, common, offsets, effects = own
    y = frame["y"] - sum(design(f"0 + {one}", frame)[:, 0] for one in offsets)
    parts = []
    for _, (inner, *factor) in effects:
        columns = design(inner, frame)
        levels = frame[factor].astype(str).agg(":".join, axis=1)
        parts.append(
            Effects(
                np.concatenate([columns * (levels == one).to_numpy()[:, None] for one in sorted(set(levels))], axis=1),
                columns.shape[1],
            )
        )
    columns = design(common, frame)
    return columns, *by_hand(y.to_numpy(), columns, parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_fit_is_that_of_patsy_s_matrices_and_gaussian_algebra(name: str) -> None:
    own, frame = CASES[name], table()
    plain = fedppl.formula(written(own))
    names = plain.shared
    priors = {
        one: Prior("Normal", mu=0.0, sigma=WIDE) for one in [*plain.builder.terms.common, "Intercept"] if one in names
    }
    priors |= {one: Prior("HalfNormal", sigma=SPREAD) for one in names if one.endswith("_sd")}
    model = fedppl.formula(written(own), priors={**priors, "sigma": Prior("HalfNormal", sigma=NOISE)})
    columns, means, sds = expected(own, frame)

    built = fedppl.agree(model, frame, by="site").model.builder
    mine = np.concatenate([built.read(str(site), rows)["common"] for site, rows in frame.groupby("site")])
    mine = np.column_stack([np.ones(len(mine)), mine]) if built.terms.intercept else mine
    assert mine.shape == columns.shape
    place = [int(np.argmin([np.abs(one - other).max() for other in columns.T])) for one in mine.T]
    assert_allclose(mine, columns[:, place], atol=1e-9)  # priors are of coefficients: the same coding, in some order

    fit = fedppl.fit(model, frame, fedppl.Sums(), by="site", progressbar=False, random_seed=1)
    assert fit.status.ok
    found = fit.summary()
    found = found[~found.index.str.contains("_partial|_corr")]
    order = [*place, *range(columns.shape[1], len(means))]
    assert len(found) == len(order)
    z, r = (found["mean"] - means[order]) / sds[order], found["sd"] / sds[order]
    assert np.abs(z).max() < 0.05 and 0.97 < r.min() and r.max() < 1.03, pd.DataFrame({"z": z, "r": r})

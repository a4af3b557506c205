"""Simulation-based calibration of q(φ): the true parameters should be spread evenly over the posterior's ranks.

For every data set, φ = (μ, τ) is drawn from its prior, clients from the model given φ (FedLin's Example 4.1 with the
noise sd local and unknown), and the model is fitted by EP. If q were the exact posterior, the rank of the true value
among draws of q would be uniform. A chi-square test over ten bins is done for each component.

    python benchmarks/calibration.py --figure ranks.png
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
from scipy import stats

import fedppl
from fedppl.models.hm2 import HIERARCHICAL_SHARED, hierarchical_regression

DRAWS = 999
BINS = 10


def ranks(data_sets: int, clients: int, rows: int, coefficients: int, seed: int) -> tuple[np.ndarray, int]:
    """Ranks (data set, component) of the truth among DRAWS draws of q, and how many fits converged."""
    model = fedppl.FederatedModel(hierarchical_regression, HIERARCHICAL_SHARED)
    rng = np.random.default_rng(seed)
    found, converged = [], 0
    for _ in range(data_sets):
        mu, tau = rng.normal(size=coefficients), np.exp(rng.normal(size=coefficients))
        data = {}
        for k in range(clients):
            theta = mu + np.sqrt(tau) * rng.normal(size=coefficients)
            X, sigma = rng.normal(size=(rows, coefficients)), np.exp(rng.normal())
            data[f"client {k}"] = {"X": X, "y": X @ theta + sigma * rng.normal(size=rows)}
        fit = fedppl.fit(
            model, data, fedppl.EP(), rounds=40, progressbar=False, random_seed=int(rng.integers(2**31))
        )  # fmt: skip
        converged += fit.status.ok
        posterior = fit.shared(draws=DRAWS, chains=1)["posterior"]
        drawn = np.concatenate([np.asarray(posterior[name])[0] for name in HIERARCHICAL_SHARED], axis=1)
        found.append((drawn < np.concatenate([mu, tau])).sum(axis=0))
    return np.array(found), converged


def p_values(found: np.ndarray) -> np.ndarray:
    """Chi-square p-value of uniform ranks, for each component."""
    bins = found * BINS // (DRAWS + 1)
    return np.array([stats.chisquare(np.bincount(column, minlength=BINS)).pvalue for column in bins.T])


def main() -> None:
    """Calibrate, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-sets", type=int, default=200)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--coefficients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="write rank histograms to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found, converged = ranks(options.data_sets, options.clients, options.rows, options.coefficients, options.seed)
    p = p_values(found)
    labels = [f"{name}[{i}]" for name in HIERARCHICAL_SHARED for i in range(options.coefficients)]
    print(f"{options.data_sets} data sets of {options.clients} clients; {converged} fits converged")
    for label, column, value in zip(labels, found.T, p, strict=True):
        counts = np.bincount(column * BINS // (DRAWS + 1), minlength=BINS)
        print(f"{label:8s} p = {value:.3f}  counts {' '.join(map(str, counts))}")
    if options.figure:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, len(labels), figsize=(3 * len(labels), 2.5), sharey=True)
        expected = options.data_sets / BINS
        low, high = stats.binom.interval(0.99, options.data_sets, 1 / BINS)
        for axis, label, column in zip(np.atleast_1d(axes), labels, found.T, strict=True):
            axis.hist(column, bins=BINS, range=(0, DRAWS + 1), color="tab:blue", alpha=0.7)
            axis.axhspan(low, high, color="0.85", zorder=0)
            axis.axhline(expected, color="0.4", lw=1)
            axis.set(title=label, xlabel="rank of the truth")
        figure.tight_layout()
        figure.savefig(options.figure, dpi=120)
    print(
        json.dumps(
            {
                "data_sets": options.data_sets,
                "converged": converged,
                "p_values": dict(zip(labels, np.round(p, 4).tolist(), strict=True)),
                "min_p": round(float(p.min()), 4),
            }
        )
    )


if __name__ == "__main__":
    main()

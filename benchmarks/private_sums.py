"""What differential privacy of sums costs a study of hospitals: one line of JSON.

Posterior sds of `fedppl.PrivateEP` over those without noise, with noise that each site adds in full (`shared_by` = 1)
and that sites share under masks, at δ = 1e-5 for all data of a site. Hospitals are those of `examples/quickstart.py`.

- clip, releases and structure are chosen on made-up studies: as many hospitals with as many patients, μ and τ drawn
  about what a reader may guess beforehand (``GUESS``), no number of the real data. The best is what makes the root of
  squared sd and squared distance to the mean without noise least, over parameters and studies (geometric mean).
- study: the data of the quickstart. A site's factor is that of `fedppl.EP` without noise, a Gaussian.
- curve: made-up studies with more hospitals, at ε = 3; factors have the Fisher information of a hospital's patients.

Sums of clipped sites are computed side by side here, and the noise of a sum is drawn at once; all that the server does
is the algorithm's own. ``--fit`` adds a fit of the study itself under masks, with each hospital's own code (minutes).

    python benchmarks/private_sums.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from examples import quickstart
from fedppl import gaussian, structure
from fedppl.algorithms.ep import private
from fedppl.contracts import OnlySums, Received
from fedppl.gaussian import Gaussian
from fedppl.types import Layout, Variable

DELTA = 1e-5
CLIPS = (0.5, 1.0, 2.0, 4.0)  # of √(2 m / K), about a site's norm in the end
RELEASES = (8, 16, 32, 64)
FORMS = ("full", "diagonal")
GUESS = {
    "mu": (np.array([5.0, 2.0, 0.0]), 3.0),
    "log_tau": (np.zeros(3), 0.7),
}  # mmHg; centres and sds of made-up truths
PRIOR = Gaussian(np.zeros(6), np.diag([1e-2] * 3 + [1.0] * 3))  # of μ and log τ, as the quickstart declares them
LAYOUT = Layout((Variable("mu", (3,), "", None), Variable("tau", (3,), "log", None)), PRIOR, True, "")


class Study(NamedTuple):
    """Natural parameters of hospitals' Gaussian factors."""

    linear: np.ndarray  # (K, m)
    precision: np.ndarray  # (K, m, m)

    def posterior(self) -> Gaussian:
        """Without noise."""
        return Gaussian(PRIOR.linear + self.linear.sum(axis=0), PRIOR.precision + self.precision.sum(axis=0))


def made_up(hospitals: int, rng: np.random.Generator) -> Study:
    """Hospitals of the quickstart's sizes, with factors by Fisher information at a made-up truth."""
    mu, tau = (centre + sd * rng.normal(size=3) for centre, sd in GUESS.values())
    tau = np.exp(tau)
    patients = np.resize(quickstart.PATIENTS, hospitals)[:, None]
    # Variances of a hospital's least squares: of an intercept, a dose uniform on (−2, 2), and a standard normal age.
    error = quickstart.NOISE**2 / patients / np.array([1.0, 4 / 3, 1.0])
    total = tau**2 + error
    estimates, share = mu + np.sqrt(total) * rng.normal(size=total.shape), tau**2 / total
    of_tau = 2 * share**2
    score = share * ((estimates - mu) ** 2 / total - 1)
    diagonals = np.hstack([1 / total, of_tau])
    linear = np.hstack([estimates / total, of_tau * np.log(tau) + score])
    return Study(linear, diagonals[:, :, None] * np.eye(6))


def quickstart_data() -> dict[str, dict[str, np.ndarray]]:
    """The patients of the example, as its script draws them with seed 1."""
    rng, count = np.random.default_rng(1), len(quickstart.PATIENTS)
    truth = quickstart.AVERAGE + quickstart.SPREAD * rng.normal(size=(count, 3))
    return {
        f"hospital {k + 1}": quickstart.simulate(rng, patients, truth[k])
        for k, patients in enumerate(quickstart.PATIENTS)
    }


def of_quickstart() -> Study:
    """The sites of EP without noise."""
    model = fedppl.FederatedModel(quickstart.hospital, shared=["mu", "tau"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)  # sds of τ have no Gaussian's tails
        fit = fedppl.fit(model, quickstart_data(), fedppl.EP(starts=1), progressbar=False, random_seed=1)
    sites = fit.state.sites
    return Study(sites.linear, structure.unpack_precision(sites.precision, sites.structure))


class Setting(NamedTuple):
    """What is chosen."""

    clip: float  # of √(2 m / K)
    releases: int
    form: str


def noise_for(epsilon: float, releases: int) -> float:
    """The noise multiplier that spends ε in so many releases."""
    return float(brentq(lambda z: fedppl.privacy.epsilon(z, releases, DELTA) - epsilon, 1e-2, 1e5))


def algorithm_of(setting: Setting, hospitals: int, epsilon: float, shared_by: int) -> Any:
    """The algorithm that spends ε."""
    clip = setting.clip * float(np.sqrt(12 / hospitals))
    return fedppl.PrivateEP(
        clip=clip,
        noise_multiplier=noise_for(epsilon, setting.releases),
        releases=setting.releases,
        delta=DELTA,
        shared_by=shared_by,
        structure=setting.form,
    )


def noised(study: Study, algorithm: Any, rng: np.random.Generator) -> tuple[Gaussian, float]:
    """The posterior under noise, and the sd of its means through noise, in its sds."""
    names = tuple(f"hospital {k}" for k in range(len(study.linear)))
    state = algorithm.init(LAYOUT, names, rng)
    mechanism, form = algorithm.update_server.keywords["mechanism"], state.structure
    projected = private._sites.in_structure(study.precision, form)
    for _ in range(mechanism.releases):
        frame = private.frame_of(state.q, form, private.precision_weight(state, mechanism))
        inverse, inside = np.linalg.inv(frame.factor), structure.unpack_precision(projected, form)
        about = (study.linear - inside @ frame.mean) @ inverse.T
        packed = frame.weights * private._sites.in_structure(inverse @ inside @ inverse.T, form)
        vectors = np.hstack([about, packed])
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        total = np.sum(vectors * np.minimum(1, mechanism.clip / norms), axis=0)
        total += mechanism.sd * np.sqrt(len(names)) * rng.normal(size=len(total))
        if mechanism.shared_by == 1:  # replies are changes
            total -= private.whiten(frame, *gaussian.quotient(state.q, PRIOR))
        state, report = algorithm.update_server(state, Received(OnlySums(), {"site": total}, len(names), names))
    return algorithm.result.shared.gaussian(state), report.info.noise


def compared(study: Study, algorithm: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sds, and distances of means, both over the sds without noise, (m,)."""
    exact, found = study.posterior(), noised(study, algorithm, rng)[0]
    sd = gaussian.standard_deviations(exact)
    return gaussian.standard_deviations(found) / sd, (gaussian.mean(found) - gaussian.mean(exact)) / sd


def best(hospitals: int, epsilon: float, shared_by: int, studies: int) -> Setting:
    """The best setting on made-up studies."""
    losses = {}
    for setting in map(Setting._make, itertools.product(CLIPS, RELEASES, FORMS)):
        rng = np.random.default_rng(hospitals)  # the same studies for all settings
        algorithm = algorithm_of(setting, hospitals, epsilon, shared_by)
        pairs = [compared(made_up(hospitals, rng), algorithm, rng) for _ in range(studies)]
        losses[setting] = float(np.mean([np.log(np.hypot(ratio, off)) for ratio, off in pairs]))
    return min(losses, key=lambda setting: losses[setting])


def row(studies: list[Study], epsilon: float, shared_by: int, setting: Setting, runs: int) -> dict[str, Any]:
    """Ratios of sds (over parameters), and distances of means in the sds told, at one setting."""
    hospitals, rng = len(studies[0].linear), np.random.default_rng(7)
    algorithm = algorithm_of(setting, hospitals, epsilon, shared_by)
    pairs = [compared(studies[run % len(studies)], algorithm, rng) for run in range(runs)]
    ratios, off = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    prior = gaussian.standard_deviations(PRIOR) / gaussian.standard_deviations(studies[0].posterior())
    return {
        "hospitals": hospitals,
        "epsilon": epsilon,
        "shared_by": shared_by,
        **setting._asdict(),
        "sds": round(float(np.exp(np.mean(np.log(ratios)))), 2),  # geometric mean over parameters and runs
        "sds_worst": round(float(np.median(ratios.max(axis=1))), 2),  # of the parameter that is widest
        "means_off": round(float(np.sqrt(np.mean((off / ratios) ** 2))), 2),  # in the sds that are told
        "prior": round(float(np.exp(np.mean(np.log(prior)))), 1),
    }


def one_fit(setting: Setting, epsilon: float) -> dict[str, Any]:
    """The study itself under masks, each hospital with its own code."""
    model, clients = fedppl.FederatedModel(quickstart.hospital, shared=["mu", "tau"]), quickstart_data()
    algorithm = algorithm_of(setting, len(clients), epsilon, len(clients))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        engine = fedppl.InProcess(secure=True)
        settings: Any = {"rounds": setting.releases, "progressbar": False, "random_seed": 1}
        fit = fedppl.fit(model, clients, algorithm, engine=engine, **settings)
    exact = of_quickstart().posterior()
    sd = gaussian.standard_deviations(exact)
    ratio, off = gaussian.standard_deviations(fit.posterior) / sd, gaussian.mean(fit.posterior) - gaussian.mean(exact)
    return {
        "fit_sds": round(float(np.exp(np.mean(np.log(ratio)))), 2),
        "fit_means_off": round(float(np.sqrt(np.mean((off / sd / ratio) ** 2))), 2),
        "fit_message": fit.message,
    }


def main(argv: list[str] | None = None) -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epsilons", type=float, nargs="*", default=[1.0, 3.0, 10.0], help="of the study")
    parser.add_argument("--hospitals", type=int, nargs="*", default=[12, 50, 200, 1000], help="of the curve")
    parser.add_argument("--studies", type=int, default=4, help="made-up studies on which settings are chosen")
    parser.add_argument("--runs", type=int, default=20, help="runs with other noise at the chosen setting")
    parser.add_argument("--fit", action="store_true", help="also fit the study's model itself under masks, at ε = 3")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    line: dict[str, Any] = {"delta": DELTA, "study": [], "curve": []}
    study = [of_quickstart()] if options.epsilons else []
    count = len(quickstart.PATIENTS)
    for epsilon, shared_by in itertools.product(options.epsilons, (1, 10, count)):
        setting = best(count, epsilon, shared_by, options.studies)
        line["study"].append(row(study, epsilon, shared_by, setting, options.runs))
    for hospitals in options.hospitals:
        for shared_by in (1, hospitals):
            setting = best(hospitals, 3.0, shared_by, options.studies)
            fresh = np.random.default_rng(99)  # studies on which nothing was chosen
            studies = [made_up(hospitals, fresh) for _ in range(options.studies)]
            line["curve"].append(row(studies, 3.0, shared_by, setting, options.runs))
    if options.fit:
        line |= one_fit(best(count, 3.0, count, options.studies), 3.0)
    print(json.dumps(line))


if __name__ == "__main__":
    main()

"""
Twelve hospitals of different size: what does shrinkage do?
===========================================================

The smallest of twelve hospitals has 6 patients, the largest 400. Three answers are possible for each: what its own
patients say, what all patients say, or something between. A hierarchy chooses the place between by itself, from how
much hospitals differ and how much each of them knows. This example compares it with separate fits.
"""

# %%
# The data
# --------
# A row is a patient under a drug, with the dose in units of 10 mg beside the usual one, and the fall in systolic
# pressure in mmHg. Each hospital has its own dose effect. They have mean 4 and standard deviation 1.5 mmHg per 10 mg.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import fedppl

PATIENTS = [6, 9, 13, 19, 28, 40, 58, 85, 125, 180, 270, 400]
MEAN, SPREAD, NOISE = np.array([8.0, 4.0]), np.array([2.0, 1.5]), 8.0  # level and dose effect; the truth


def simulate(rng, sizes=PATIENTS):
    """Draw all hospitals' patients, and the truth."""
    truth = MEAN + SPREAD * rng.normal(size=(len(sizes), 2))
    hospitals = {}
    for number, (n, (level, effect)) in enumerate(zip(sizes, truth, strict=True), 1):
        dose = rng.uniform(-2, 2, n)
        hospitals[f"hospital {number}"] = {"dose": dose, "fall": level + effect * dose + NOISE * rng.normal(size=n)}
    return hospitals, truth[:, 1]


hospitals, truth = simulate(np.random.default_rng(3))

# %%
# The model of one hospital
# -------------------------
# It is written as an ordinary PyMC model. ``mu``, ``tau`` and ``sigma`` are shared by all hospitals, and ``theta`` is
# this hospital's own. fedppl fits the hierarchy over all hospitals from this one function.


def hospital(dose, fall):
    """Declare one hospital's posterior."""
    with pm.Model(coords={"term": ["level", "dose"]}) as model:
        dose, fall = pm.Data("dose", dose), pm.Data("fall", fall)
        mu = pm.Normal("mu", [8, 0], [10, 5], dims="term")
        tau = pm.HalfNormal("tau", 3, dims="term")
        sigma = pm.LogNormal("sigma", 2, 0.5)
        theta = pm.Normal("theta", mu, tau, dims="term")
        pm.Normal("obs", theta[0] + theta[1] * dose, sigma, observed=fall)
    return model


model = fedppl.FederatedModel(hospital, shared=["mu", "tau", "sigma"])
fit = fedppl.fit(model, hospitals, progressbar=False, random_seed=1)
print(fit.status.value)
fit.summary(ci_prob=0.9)[["mean", "sd", "ci_low", "ci_high"]].round(2)

# %%
# Separate fits for comparison
# ----------------------------
# Least squares at each hospital, with the usual 90 % intervals of Student's t distribution.

from scipy import stats


def alone(hospitals):
    """Dose effect and half of its interval by least squares, hospital by hospital."""
    found = []
    for data in hospitals.values():
        line = stats.linregress(data["dose"], data["fall"])
        found.append((line.slope, stats.t.ppf(0.95, len(data["dose"]) - 2) * line.stderr))
    return np.array(found)


def together(fit):
    """Posterior mean, and the ends of the 90 % interval, of each hospital's dose effect."""
    found = []
    for name in fit.client_ids:
        effect = fit.client(name, draws=250, random_seed=1)["posterior"]["theta"].sel(term="dose").values
        found.append((effect.mean(), *np.quantile(effect, [0.05, 0.95])))
    return np.array(found)


separate, hierarchical = alone(hospitals), together(fit)

# %%
# Each hospital's effect
# ----------------------
# Small hospitals move far towards the mean of all, and their intervals are much shorter. Large hospitals hardly move.

place = np.arange(len(PATIENTS))
fig, axes = plt.subplots(figsize=(7, 4.8), layout="constrained")
axes.axvline(fit.summary()["mean"]["mu[dose]"], color="0.6", lw=1, label="mean of all hospitals")
axes.errorbar(
    separate[:, 0], place + 0.18, xerr=separate[:, 1], fmt="o", mfc="white", color="C1", lw=1, label="separate, 90 %"
)
axes.errorbar(
    hierarchical[:, 0],
    place - 0.18,
    xerr=np.abs(hierarchical[:, 1:].T - hierarchical[:, 0]),
    fmt="o",
    color="C0",
    lw=2,
    label="hierarchy, 90 %",
)
axes.plot(truth, place, "|", color="black", ms=13, label="truth")
axes.set_yticks(place, [f"{n} patients" for n in PATIENTS])
axes.invert_yaxis()
axes.set_xlim(-7, 12)
axes.set_xlabel("dose effect, mmHg per 10 mg")
fig.legend(loc="outside upper center", ncols=4, frameon=False)
plt.show()

# %%
# How far does each estimate move?
# --------------------------------
# The share of the way from a hospital's own estimate to the mean of all. With one effect per hospital and all variances
# known it would be noise / (noise + spread), the curve. Here the level, the noise and the spread are estimated too, and
# the points lie near it. Hospitals whose own estimate is within 0.5 of the mean have no way to go and are left out.

n = np.geomspace(5, 500, 200)
noise = NOISE**2 / (n * 4 / 3)  # the variance of a dose that is uniform between -2 and 2 is 4/3
way = fit.summary()["mean"]["mu[dose]"] - separate[:, 0]
moved = np.where(np.abs(way) > 0.5, (hierarchical[:, 0] - separate[:, 0]) / way, np.nan)
fig, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
axes.plot(n, noise / (noise + SPREAD[1] ** 2), color="0.6", label="noise / (noise + spread), from the truth")
axes.plot(PATIENTS, moved, "o", color="C0", label="this fit")
axes.set_xscale("log")
axes.set_xticks([6, 20, 60, 200, 400], ["6", "20", "60", "200", "400"])
axes.minorticks_off()
axes.set_ylim(-0.1, 1.1)
axes.set_xlabel("patients of the hospital")
axes.set_ylabel("share of the way to the mean")
axes.legend(frameon=False)
plt.show()

# %%
# Errors and coverage
# -------------------
# Twelve intervals say little about coverage. Here are 240 hospitals, twenty of each size, in one fit. How large are the
# errors, and how often do 90 % intervals hold the truth? The Monte Carlo error of a coverage below is about 3 %.

hospitals, truth = simulate(np.random.default_rng(4), sizes=np.repeat(PATIENTS, 20))
many = fedppl.fit(model, hospitals, progressbar=False, random_seed=1)
print(many.status.value)
separate, hierarchical = alone(hospitals), together(many)

patients = np.repeat(PATIENTS, 20)
size = pd.cut(patients, [0, 20, 100, 500], labels=["6 to 19 patients", "28 to 85 patients", "125 to 400 patients"])
low, high = hierarchical[:, 1:].T
tables = {
    "separate": {
        "error": (separate[:, 0] - truth) ** 2,
        "width": 2 * separate[:, 1],
        "holds": np.abs(separate[:, 0] - truth) < separate[:, 1],
    },
    "hierarchy": {
        "error": (hierarchical[:, 0] - truth) ** 2,
        "width": high - low,
        "holds": (low < truth) & (truth < high),
    },
}
means = {name: pd.DataFrame(table).groupby(size, observed=True).mean() for name, table in tables.items()}
means = pd.concat(means).swaplevel().sort_index(level=0, sort_remaining=False)
means["error"] = np.sqrt(means["error"])
means.columns = ["RMSE, mmHg per 10 mg", "mean width of intervals", "coverage of 90 % intervals"]
means.round(2)

# %%
# What to take away
# -----------------
# - Both kinds of intervals hold the truth about as often as they say. Those of the hierarchy are much shorter where
#   there are few patients.
# - Separate estimates are unbiased, hospital by hospital. Shrunk ones are not: a hospital that is truly far from the
#   others is moved towards them. On average over hospitals the error is smaller.
# - Nobody sets how strongly to shrink. The spread ``tau`` is estimated from all hospitals, and it can be far off where
#   there are few of them.
#
# More: :doc:`/models` on models of your own, :doc:`/algorithms` on what to choose, :doc:`/exactness` on calibration.

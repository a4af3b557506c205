"""
A site without events: what can it add?
=======================================

Twelve hospitals report how many patients had a stroke under a drug and under the control. Strokes are rare, and some
hospitals saw none in an arm. The log odds ratio of such a hospital is not a finite number, so that an average of odds
ratios needs a device: add one half to the counts, or leave the hospital out. A hierarchy needs none, because it uses
the likelihood of the counts.
"""

# %%
# The data
# --------
# Half of the patients of each site had the drug. About 1 % have a stroke under the control; the drug halves the odds,
# so that the true log odds ratio is about −0.69.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.special import expit

import fedppl

EFFECT = np.log(0.5)
SITES = [f"site {letter}" for letter in "ABCDEFGHIJKL"]
SIZES = np.array([60, 90, 120, 150, 210, 270, 330, 450, 600, 750, 900, 1200])
PATIENTS = np.stack([SIZES // 2, SIZES - SIZES // 2], axis=1)  # control and drug


def simulate(rng, trials):
    """Draw the events of trials, an array (trial, site, arm)."""
    level = rng.normal(-4.4, 0.4, (trials, len(SITES), 1))  # of the control, log odds
    return rng.binomial(PATIENTS, expit(level + np.array([0, EFFECT])))


(events,) = simulate(np.random.default_rng(3), trials=1)
frame = pd.DataFrame({"site": np.repeat(SITES, 2), "arm": np.tile(["control", "drug"], len(SITES))})
frame["events"], frame["patients"] = events.ravel(), PATIENTS.ravel()
frame.pivot(index="site", columns="arm", values=["events", "patients"])

# %%
# What a meta-analysis has to decide
# ----------------------------------
# The usual one takes a log odds ratio and its variance from each site and averages them with inverse variances. Where a
# count is 0 something is added to the four counts of that site. How much? The answer depends on it. Mantel and
# Haenszel's odds ratio sums products of counts over sites first, and needs no constant.


def meta_analysis(events, added):
    """Inverse-variance mean of log odds ratios with its 90 % interval; None as `added` leaves sites with a 0 out."""
    cells = np.concatenate([events, PATIENTS - events], axis=1).astype(float)
    if added is None:
        cells = cells[np.all(cells > 0, axis=1)]
    else:
        cells = cells[events.sum(axis=1) > 0]  # without any event there is no odds ratio
        cells = cells + added * np.any(cells == 0, axis=1, keepdims=True)
    ratio, variance = np.log(cells[:, 1] * cells[:, 2] / (cells[:, 0] * cells[:, 3])), np.sum(1 / cells, axis=1)
    mean, sd = np.average(ratio, weights=1 / variance), np.sum(1 / variance) ** -0.5
    return mean, mean - 1.645 * sd, mean + 1.645 * sd


def mantel_haenszel(events):
    """The common log odds ratio of Mantel and Haenszel, with the variance of Robins, Breslow and Greenland."""
    (c, d), (no_c, no_d), n = events.T, (PATIENTS - events).T, PATIENTS.sum(axis=1)
    for_drug, for_control = d * no_c / n, c * no_d / n
    agree, differ = (d + no_c) / n, (c + no_d) / n
    r, s = for_drug.sum(), for_control.sum()
    variance = (
        np.sum(agree * for_drug) / (2 * r**2)
        + np.sum(agree * for_control + differ * for_drug) / (2 * r * s)
        + np.sum(differ * for_control) / (2 * s**2)
    )
    mean, sd = np.log(r / s), np.sqrt(variance)
    return mean, mean - 1.645 * sd, mean + 1.645 * sd


# %%
# The hierarchy
# -------------
# ``prop(events, patients)`` is a count out of a number of patients. The effect of the arm is common to all sites, and
# the level varies by site. The prior of the effect, Normal(0, 1), says that an odds ratio above 7 or below 1/7 is
# very unlikely.

model = fedppl.formula(
    "prop(events, patients) ~ arm + (1 | site)",
    family="binomial",
    levels={"arm": ["control", "drug"]},
    priors={
        "arm": fedppl.Prior("Normal", mu=0, sigma=1),
        "Intercept": fedppl.Prior("Normal", mu=-4.5, sigma=1),
        "site_sd": fedppl.Prior("HalfNormal", sigma=0.5),
    },
)
fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
print(fit.status.value)
summary = fit.summary(ci_prob=0.9)[["mean", "sd", "ci_low", "ci_high"]]
summary.round(2)

# %%
# The two side by side
# --------------------
# Of the same table, the inverse-variance means have another answer for every constant.

choices = {"sites with a 0 left out": None, "1 added": 1.0, "1/2 added": 0.5, "1/10 added": 0.1, "1/100 added": 0.01}
lines = {f"inverse variance, {name}": meta_analysis(events, added) for name, added in choices.items()}
lines["Mantel-Haenszel"] = mantel_haenszel(events)
lines["fedppl"] = tuple(summary.loc["arm[drug]", ["mean", "ci_low", "ci_high"]])

fig, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for place, (name, (mean, low, high)) in enumerate(lines.items()):
    color = "C0" if name == "fedppl" else "C1"
    axes.plot([low, high], [place, place], color=color, lw=2)
    axes.plot(mean, place, "o", color=color, mfc=color if name == "fedppl" else "white")
axes.axvline(EFFECT, color="black", lw=1)
axes.annotate(" truth", (EFFECT, -0.75), fontsize="small", va="center")
axes.axvline(0, color="0.7", lw=1, ls="--")
axes.set_yticks(range(len(lines)), list(lines))
axes.set_ylim(len(lines) - 0.5, -1)
axes.set_xlabel("log odds ratio of a stroke, with 90 % interval")
plt.show()

# %%
# What each site says
# -------------------
# A site's level is well defined without events too. Site A had none among 60 patients: that says little, and its
# interval is wide. Site I had two among 600, so that its level is probably low.

(axes,) = fedppl.plots.forest(fit, "site_effects", population=0, ci_prob=0.9, random_seed=1, figsize=(7, 4.4))
axes.set_xlabel("level of the site minus the mean level, log odds")
names = [f"{c}/{n}, {d}/{m}" for (c, d), (n, m) in zip(events, PATIENTS, strict=True)]
axes.set_yticks(range(len(SITES)), [f"{site}: {name}" for site, name in zip(SITES, names, strict=True)])
axes.set_ylabel("events/patients, control and drug")
plt.show()

# %%
# Many trials
# -----------
# Is the difference luck? Here are the meta-analyses in 2,000 trials of the same kind. Inverse-variance means have a
# mean error above 0, towards no effect: a constant adds the same number of events to both arms, and where sites with
# a 0 are left out those are lost in which the drug left no stroke.

trials = simulate(np.random.default_rng(4), trials=2000)
answers = {name: np.array([meta_analysis(trial, added) for trial in trials]) for name, added in choices.items()}
answers["Mantel-Haenszel"] = np.array([mantel_haenszel(trial) for trial in trials])
table = {}
for name, (mean, low, high) in ((name, found.T) for name, found in answers.items()):
    table[name] = {
        "mean error": np.mean(mean - EFFECT),
        "standard error of it": np.std(mean) / np.sqrt(len(mean)),
        "RMSE": np.sqrt(np.mean((mean - EFFECT) ** 2)),
        "coverage of 90 % intervals": np.mean((low < EFFECT) & (EFFECT < high)),
    }
pd.DataFrame(table).T.round(3)

# %%
# How far apart are the five answers by inverse variances in one trial?

means = np.array([answers[name][:, 0] for name in choices])
apart = means.max(axis=0) - means.min(axis=0)
print(
    "largest less smallest log odds ratio: median {:.2f}, in one trial of ten above {:.2f}".format(
        *np.quantile(apart, [0.5, 0.9])
    )
)

# %%
# What to take away
# -----------------
# - A site without events in an arm is data: its likelihood is finite, and it enters the hierarchy as it is. Sites
#   without any event enter too. They say little on the effect.
# - An inverse-variance mean of odds ratios depends on the constant that is added, and leans towards no effect. Mantel
#   and Haenszel's odds ratio does neither, with a larger RMSE here than where one half is added. What it lacks is a
#   prior, effects that vary by site, and each site's own level.
# - In the benchmark of 1,000 trials, whose truths are drawn from the prior, the RMSE of inverse-variance means with one
#   half added is about 8 % larger than that of fedppl. They are not useless.
# - With few events priors matter. Say what they are, and fit again with others.
#
# More: :doc:`/formulas` on counts out of numbers, :doc:`/formulas_measured` for the benchmark of rare events with 1,000
# trials, :doc:`/summaries` for sites that tell only a table of two by two.

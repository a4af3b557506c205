"""
Counts with different exposure: is the rate lower?
==================================================

Ten hospitals count infections of a ward each month, before and after a new cleaning plan. Wards are open for different
numbers of bed-days, so that counts alone say little: it is the rate, infections per 1,000 bed-days, that matters. Is it
lower with the plan? And how sure can one be, where counts vary more than the Poisson distribution allows?
"""

# %%
# The data
# --------
# A row is a month of a hospital. The plan began at different months. In truth it lowers the rate by the factor 0.75,
# and counts vary by a gamma distribution of shape 4 around their mean: some months are worse than others for
# reasons that nobody recorded.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

rng = np.random.default_rng(8)
FACTOR, SHAPE = 0.75, 4.0
names = ["Aker", "Bern", "Cork", "Delft", "Essen", "Faro", "Ghent", "Hull", "Inari", "Jena"]
parts = []
for number, name in enumerate(names):
    months = np.arange(24)
    plan = np.where(months < rng.integers(8, 17), "before", "after")
    days = rng.uniform(0.7, 1.3, len(months)) * 150 * 1.35**number  # bed-days of a month
    rate = 6 / 1000 * np.exp(rng.normal(0, 0.35)) * np.where(plan == "after", FACTOR, 1)
    infections = rng.poisson(rate * days * rng.gamma(SHAPE, 1 / SHAPE, len(months)))
    parts.append(pd.DataFrame({"hospital": name, "plan": plan, "bed_days": days.round(), "infections": infections}))
frame = pd.concat(parts, ignore_index=True)

# %%
# The exposure
# ------------
# The mean count is rate × exposure, and its logarithm log rate + log exposure. So the log of the exposure is an
# ``offset``: a term whose coefficient is 1. In units of 1,000 bed-days the intercept is the log of the rate per 1,000.

frame["log_exposure"] = np.log(frame["bed_days"] / 1000)
frame.groupby("hospital")[["bed_days", "infections"]].sum()

# %%
# Two families
# ------------
# With ``"poisson"`` the variance of a count is its mean. With ``"negativebinomial"`` it is mean + mean² / alpha.

fits = {}
for family in ("poisson", "negativebinomial"):
    model = fedppl.formula(
        "infections ~ plan + offset(log_exposure) + (1 | hospital)", family=family, levels={"plan": ["before", "after"]}
    )
    fits[family] = fedppl.fit(model, frame, by="hospital", progressbar=False, random_seed=1)
    print(family, fits[family].status.value)
fits["negativebinomial"].summary(ci_prob=0.9)[["mean", "sd", "ci_low", "ci_high"]].round(2)

# %%
# Which of the two do the data support? The evidence is clear.

fedppl.compare(fits)[["log_evidence", "se", "probability"]].round(3)

# %%
# The rate ratio
# --------------
# Both families see a lower rate. Poisson's interval is too narrow: it takes the months for more alike than they are.

fig, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for family, color in (("poisson", "C1"), ("negativebinomial", "C0")):
    ratio = np.exp(fits[family].idata["posterior"]["plan"].values.ravel())
    low, high = np.quantile(ratio, [0.05, 0.95])
    label = f"{family}: {np.median(ratio):.2f}, 90 % interval {low:.2f} to {high:.2f}"
    axes.hist(ratio, bins=60, density=True, histtype="stepfilled", alpha=0.4, color=color, label=label)
axes.axvline(FACTOR, color="black", lw=1, label="truth")
axes.axvline(1, color="0.6", lw=1, ls="--", label="no effect")
axes.set_yticks([])
axes.set_xlabel("rate after / rate before")
axes.set_ylabel("posterior density")
fig.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
plt.show()

# %%
# Do counts vary as the family says?
# ----------------------------------
# ``fit.client(..., groups="posterior_predictive")`` draws counts again for a hospital's own rows. The figure compares
# the standard deviation of the monthly rates of the largest hospital with that of such replicates.

fig, panels = plt.subplots(1, 2, figsize=(8, 3), sharex=True, sharey=True, layout="constrained")
rows = frame[frame["hospital"] == "Jena"]
exposure = rows["bed_days"].to_numpy() / 1000
for axes, (family, fit) in zip(panels, fits.items(), strict=True):
    again = fit.client("Jena", draws=250, groups="posterior_predictive", random_seed=1)["posterior_predictive"]
    rates = again["infections"].values.reshape(-1, len(rows)) / exposure
    axes.hist(rates.std(axis=1), bins=np.linspace(0, 9, 55), density=True, color="C0", alpha=0.5, label="replicates")
    axes.axvline((rows["infections"] / exposure).std(ddof=0), color="black", label="Jena's months")
    axes.set_title(family, fontsize="medium")
    axes.set_yticks([])
    axes.set_xlabel("sd of monthly rates, per 1,000 bed-days")
panels[1].legend(frameon=False)
plt.show()

# %%
# Rates by hospital
# -----------------
# The rate before the plan: the crude one, infections over bed-days, and that of the hierarchy. It lies nearer to the
# mean of all, mostly where there are few bed-days. It also gives less weight to single bad months than the crude rate
# does, because such months are what this family expects.

before = frame[frame["plan"] == "before"].groupby("hospital")[["infections", "bed_days"]].sum()
fit, found = fits["negativebinomial"], []
for name in names:
    draws = fit.client(name, draws=250, random_seed=1)["posterior"]
    rate = np.exp(draws["Intercept"].values.ravel() + draws["hospital_effects"].values.ravel())
    found.append((rate.mean(), *np.quantile(rate, [0.05, 0.95])))
found = np.array(found)

fig, axes = plt.subplots(figsize=(7, 4), layout="constrained")
place = np.arange(len(names))
axes.hlines(place, found[:, 1], found[:, 2], color="C0", lw=2)
axes.plot(found[:, 0], place, "o", color="C0", label="hierarchy, 90 % interval")
axes.plot(1000 * before["infections"] / before["bed_days"], place, "x", color="C3", label="crude rate")
axes.set_yticks(place, [f"{name} ({days:,.0f} bed-days)" for name, days in before["bed_days"].items()])
axes.invert_yaxis()
axes.set_xlim(0)
axes.set_xlabel("infections per 1,000 bed-days, before the plan")
fig.legend(loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %%
# What to take away
# -----------------
# - Exposure enters as ``offset(log_exposure)``, a column of its own that holds the logarithm.
# - Counts mostly vary more than Poisson's. Fit both families and compare: a wrong Poisson model does not give a wrong
#   rate ratio so much as an interval that is too narrow.
# - Replicates show what is wrong with a family, where the evidence only says that something is.
#
# More: :doc:`/formulas` on offsets and families, :doc:`/formulas_measured` on how exact each of them is.

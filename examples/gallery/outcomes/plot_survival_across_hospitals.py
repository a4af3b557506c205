"""
How long until the event, hospital by hospital?
===============================================

Eight hospitals follow patients after an operation for up to two years. Some are readmitted, the others are censored:
until the end of the follow-up, or until they moved away, there was no readmission. How long does a treatment delay
the readmission, and how do the hospitals' curves differ?
"""

# %%
# The data
# --------
# ``months`` is the time until the readmission or the last visit. ``readmitted`` is 1 where there was a readmission
# and 0 where the time is censored. The truth: a Weibull distribution of shape 1.3, times under the treatment longer
# by the factor 1.5, and hospitals whose times differ with a standard deviation of 0.4 on the log scale.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

rng = np.random.default_rng(6)
sizes = {"Aker": 15, "Bern": 20, "Cork": 30, "Delft": 45, "Essen": 60, "Faro": 90, "Ghent": 140, "Hull": 220}
own = dict(zip(sizes, rng.normal(0, 0.4, len(sizes)), strict=True))
frame = pd.DataFrame({"hospital": np.repeat(list(sizes), list(sizes.values()))})
frame["arm"] = rng.choice(["usual", "treated"], len(frame))
scale = np.exp(2.7 + np.log(1.5) * (frame["arm"] == "treated") + frame["hospital"].map(own))
event, lost = scale * rng.weibull(1.3, len(frame)), np.minimum(24, rng.exponential(60, len(frame)))
frame["months"] = np.minimum(event, lost).round(2).clip(0.01)
frame["readmitted"] = (event <= lost).astype(int)
frame.groupby("hospital")["readmitted"].agg(["size", "sum"])

# %%
# The model
# ---------
# ``Surv(months, readmitted)`` is the outcome. In the family ``"weibull"`` the linear predictor is the log of the
# scale of the times: a coefficient of 0.4 makes times longer by the factor exp(0.4). ``alpha`` is the shape.

model = fedppl.formula(
    "Surv(months, readmitted) ~ arm + (1 | hospital)", family="weibull", levels={"arm": ["usual", "treated"]}
)
fit = fedppl.fit(model, frame, by="hospital", progressbar=False, random_seed=1)
print(fit.status.value)
fit.summary(ci_prob=0.9)[["mean", "sd", "ci_low", "ci_high"]].round(2)

# %%
# The effect of the treatment, as a factor of times:

factor = np.exp(fit.idata["posterior"]["arm"].values.ravel())
low, high = np.quantile(factor, [0.05, 0.95])
print(f"times longer by the factor {factor.mean():.2f}, 90 % interval {low:.2f} to {high:.2f}")

# %%
# Survival curves by hospital
# ---------------------------
# ``fit.client`` draws a hospital's own posterior: its effect together with the shared variables. Each draw gives a
# curve, S(t) = exp(−(t / scale)\ :sup:`alpha`), and the quantiles over draws the interval. The steps are Kaplan and
# Meier's estimate from the hospital's own rows. It makes no assumption on the form and has no help from others.


def kaplan_meier(months, readmitted):
    """Ends of the steps of the product-limit estimate."""
    order = np.argsort(months, kind="stable")
    left = len(months) - np.arange(len(months))
    return np.append(0, months[order]), np.append(1, np.cumprod(1 - readmitted[order] / left))


grid = np.linspace(0, 24, 100)
fig, panels = plt.subplots(2, 4, figsize=(10, 5.2), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels.flat, sizes, strict=True):
    draws = fit.client(name, draws=250, random_seed=1)["posterior"].stack(sample=("chain", "draw"))
    base = draws["Intercept"].values + draws["hospital_effects"].values.reshape(-1, draws.sizes["sample"])[0]
    rows = frame[frame["hospital"] == name]
    for arm, color in (("usual", "C1"), ("treated", "C0")):
        eta = base + (arm == "treated") * draws["arm"].values.reshape(-1, draws.sizes["sample"])[0]
        survival = np.exp(-((grid[:, None] / np.exp(eta)) ** draws["alpha"].values))
        low, high = np.quantile(survival, [0.05, 0.95], axis=1)
        axes.fill_between(grid, low, high, color=color, alpha=0.25, lw=0)
        axes.plot(grid, survival.mean(axis=1), color=color, label=f"{arm}: posterior, 90 %")
        some = rows[rows["arm"] == arm]
        steps = kaplan_meier(some["months"].to_numpy(), some["readmitted"].to_numpy())
        axes.step(*steps, where="post", color=color, lw=0.9, ls="--", label=f"{arm}: Kaplan-Meier")
    axes.set_title(f"{name}, {len(rows)} patients", fontsize="medium")
    axes.set_ylim(0, 1.02)
    axes.set_xticks([0, 6, 12, 18, 24])
fig.supxlabel("months since the operation")
fig.supylabel("probability of no readmission yet")
fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
plt.show()

# %%
# Numbers to report
# -----------------
# ``fedppl.marginal_effects`` averages over the rows of each hospital: with ``at=12``, the probability that a patient
# is not readmitted within a year under each arm, and the difference. "all" is the mean over hospitals, weighted by
# patients.

effects = fedppl.marginal_effects(fit, "arm", at=12, ci_prob=0.9, random_seed=1)
effects.loc[["Aker", "Hull", "all"]].round(3)

# %%
# Does the Weibull form fit?
# --------------------------
# Other families make other assumptions of the same rows. ``fedppl.compare`` sets their evidences side by side: the
# probability of each family given that one of the three is true.

fits = {"weibull": fit}
for family in ("lognormal", "loglogistic"):
    other = fedppl.formula(
        "Surv(months, readmitted) ~ arm + (1 | hospital)", family=family, levels={"arm": ["usual", "treated"]}
    )
    fits[family] = fedppl.fit(other, frame, by="hospital", progressbar=False, random_seed=1)
fedppl.compare(fits)[["log_evidence", "se", "probability"]].round(3)

# %%
# What to take away
# -----------------
# - Censored rows enter by the probability that nothing has happened yet. Nobody leaves them out, and no hospital sends
#   a table of times.
# - A hospital with 15 patients has a curve with an interval that can be used, where its own Kaplan-Meier curve has few
#   steps. The price is an assumption of form, which the evidence of other families checks.
# - Report probabilities at a time rather than coefficients: they need no explanation.
#
# More: :doc:`/formulas` has five families of times, intervals and piecewise hazards; :doc:`/exactness` explains the
# evidence.

"""
Does the number of nurses matter? Comparing two models
======================================================

Wards of twelve hospitals count falls of patients. One model explains them by the hospital alone, the other one also
by the number of nurses. This example compares the two by evidence and by leave-one-out, neither of which needs a row
outside its hospital, and shows where the two criteria disagree and why.
"""

# %%
# Falls of patients
# -----------------
# A row is a ward in a quarter of a year: the number of falls, the patients' days as an offset, and nurses per ten
# patients. Counts vary more than a Poisson distribution allows, so that they are negative binomial. In the simulation
# nurses do matter, but not by much.

import logging

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

logging.getLogger("fedppl").setLevel(logging.ERROR)
pd.set_option("display.width", 110)
rng = np.random.default_rng(5)


def hospital(wards):
    """One hospital's wards."""
    days = rng.uniform(300, 1200, wards)
    nurses = rng.normal(2.5, 0.6, wards)
    mean = np.exp(-5 + rng.normal(0, 0.3) - 0.28 * (nurses - 2.5)) * days
    falls = rng.poisson(mean * rng.gamma(4, 1 / 4, wards))
    return pd.DataFrame({"falls": falls, "log_days": np.log(days), "nurses": nurses})


wards = [6, 8, 8, 10, 12, 14, 16, 18, 20, 24, 28, 36]
clinics = {f"hospital {k}": hospital(number) for k, number in enumerate(wards, 1)}

BASE = "falls ~ offset(log_days) + (1 | hospital)"
models = {
    "hospital alone": fedppl.formula(BASE, family="negativebinomial"),
    "and nurses": fedppl.formula(BASE.replace("~", "~ nurses +"), family="negativebinomial"),
}
frame = pd.concat(clinics, names=["hospital"]).reset_index("hospital")
settings = {"by": "hospital", "random_seed": 1, "progressbar": False}
fits = {name: fedppl.fit(model, frame, **settings) for name, model in models.items()}
print({name: fit.status.value for name, fit in fits.items()})
print(fits["and nurses"].summary(round_to=2).iloc[:, :4])

# %%
# By evidence
# -----------
# The evidence is the probability that a model, with its priors, gave the data before they were seen. Each hospital
# tells its log marginal likelihood at points that the server chooses, and no row. ``probability`` takes both models
# for equally likely before the data.

columns = ["log_evidence", "se", "difference", "probability"]
print(fedppl.compare(fits)[columns].round(3).to_string())

# %%
# It prefers the model with nurses. But evidence depends on the priors, however many data there are. Here is the same
# model under a prior of the coefficient with an sd of 1,000, as people choose it who want to say nothing. It says a
# lot: that one nurse more changes falls by an enormous factor.

print(fits["and nurses"].declaration.describe().loc["nurses", "prior"])
vague = fedppl.formula(
    BASE.replace("~", "~ nurses +"),
    family="negativebinomial",
    priors={"nurses": fedppl.Prior("Normal", mu=0, sigma=1000)},
)
fits["and nurses, vague"] = fedppl.fit(vague, frame, **settings)
print(fits["and nurses, vague"].summary().loc["nurses", ["mean", "sd"]].round(3).to_dict())
evidence = fedppl.compare(fits)
print(evidence[columns].round(3).to_string())

# %%
# The coefficient is the same. The evidence has fallen so far that it now prefers the model without nurses. Nothing is
# wrong with either number: a model that expects enormous effects is a poor account of a small one. But where a prior
# is wide only because nobody thought about it, the verdict means little.
#
# By leave-one-out
# ----------------
# ``elpd`` is the expected log density of a ward that was left out, given all others. Each hospital computes it for
# its own wards. For one model that is ``fedppl.loo``, which needs only seven sums of each hospital.
# ``fedppl.loo_compare`` also pairs the wards of all models, for ``dse``, and so needs the data in one process.

elpd = fedppl.loo_compare(fits, draws=500, chains=2, random_seed=1)
print(elpd.round(2).to_string())

# %%
# Leave-one-out prefers nurses under both priors, by about two standard errors, and hardly tells these apart. A
# difference ``elpd_diff`` is to be held against its own standard error ``dse``, and not against the ``se`` of a
# model, which is mostly that wards differ. The column ``bad`` counts wards for which the computation is not to be
# trusted.

names = list(fits)
places = np.arange(len(names))
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for shift, color, label, values in (
    (-0.2, "C0", "log evidence", evidence["log_evidence"]),
    (0.2, "C1", "elpd, leave-one-out", elpd["elpd"]),
):
    axes.barh(places + shift, values[names] - values["hospital alone"], 0.36, color=color, label=label)
axes.axvline(0, color="k", lw=1)
axes.set_yticks(places, names)
axes.invert_yaxis()
axes.set(xlabel="difference from the model without nurses, log units (higher is better)")
axes.legend(fontsize=8, loc="upper right")
plt.show()

# %%
# What to take away
# -----------------
# - Evidence asks which model, priors included, foretold the data. Leave-one-out asks which one, once fitted, predicts
#   another row of the same hospitals.
# - Leave-one-out hardly depends on wide priors. Evidence does: give priors a thought before comparing by it.
# - To ask about another hospital, and not another ward, leave out hospitals: ``fit.influence()["log_predictive"]``.
# - For either of them hospitals tell sums or log likelihoods, and no rows. Sites of their own tell them only where
#   their policy allows it.
#
# See also :doc:`how right it is </exactness>`, :doc:`formulas </formulas>` and :doc:`what leaves a site </privacy>`.

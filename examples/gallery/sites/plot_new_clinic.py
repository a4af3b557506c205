"""
What can a new clinic expect before its first patient, and after ten?
=====================================================================

Ten clinics have fitted a model of how a drug lowers blood pressure. Another clinic opens, which took no part in that
fit. This example predicts for it before it has any data, adds its first patients, and shows how its interval narrows.
What the new clinic needs is the fit of the others; its own rows stay where they are.
"""

# %%
# Ten clinics, and one that comes later
# -------------------------------------
# A patient gets a dose, and eight weeks later the systolic pressure has fallen by some mmHg. Clinics differ in how
# far it falls at the middle dose of 40 mg and in what 10 mg more add. The data are simulated, so that the truth is
# known. The new clinic's patients respond better at the middle dose than most clinics' do.

import logging

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

logging.getLogger("fedppl").setLevel(logging.ERROR)
pd.set_option("display.width", 110)
rng = np.random.default_rng(7)


def patients(number, level, slope):
    """One clinic's patients: dose in steps of 10 mg from 40 mg, and the fall in mmHg."""
    dose = rng.choice([-2.0, -1.0, 0.0, 1.0, 2.0, 4.0], number)
    return pd.DataFrame({"dose": dose, "fall": level + slope * dose + rng.normal(0, 8, number)})


sizes = [15, 25, 30, 40, 55, 60, 80, 90, 110, 140]
clinics = {f"clinic {k}": patients(n, rng.normal(9, 3), rng.normal(2, 0.7)) for k, n in enumerate(sizes, 1)}
TRUE_LEVEL, TRUE_SLOPE = 11.0, 1.5
rng = np.random.default_rng(3)
newcomer = patients(80, TRUE_LEVEL, TRUE_SLOPE)

model = fedppl.formula("fall ~ dose + (1 + dose | clinic)", correlated=False)
frame = pd.concat(clinics, names=["clinic"]).reset_index("clinic")
fit = fedppl.fit(model, frame, by="clinic", random_seed=1, progressbar=False)
print(fit.status.value)
print(fit.summary(round_to=2).iloc[:, :4])

# %%
# Before the first patient
# ------------------------
# A clinic of which nothing is known is a draw from the population: the shared coefficients, plus effects with the
# shared sds ``clinic_sd``. ``fit.predict(None, ...)`` draws its patients; the lines here do it from draws of the shared
# variables. Nothing of a single clinic is needed for it. Whoever has the fit, or a file of it by ``fit.save``, can do
# this.

shared = fit.idata["posterior"].stack(sample=("chain", "draw"))
effects = shared["clinic_sd"].values * rng.normal(size=shared["clinic_sd"].shape)  # (2, draws): level and slope
before = np.stack([shared["Intercept"].values, shared["dose"].values]) + effects


# %%
# After the first patients
# ------------------------
# ``fit.new_client`` combines the fit with the rows that the new clinic has, at the new clinic. Nobody else is asked
# again, and what the ten clinics have learnt does not change. For comparison a clinic may know the model, but nothing
# of the others: that is :func:`fedppl.one_shot.Separate`.


def lines(result):
    """Draws of a clinic's own level and slope, (2, draws)."""
    draws = result["posterior"].stack(sample=("chain", "draw"))
    common = np.stack([draws["Intercept"].values, draws["dose"].values])
    return common + draws["clinic_effects"].transpose("clinic_effect", "sample").values


alone = fedppl.fit(model, frame, fedppl.one_shot.Separate(), by="clinic", random_seed=1, progressbar=False)
after = {n: lines(fit.new_client(newcomer[:n], random_seed=1)) for n in (10, 20, 40, 80)}
by_itself = {n: lines(alone.new_client(newcomer[:n], random_seed=1)) for n in (10, 20, 40, 80)}


def row(draws):
    """Mean and 94 % interval of the fall at 40 mg."""
    low, high = np.quantile(draws[0], [0.03, 0.97])
    return {"mean": draws[0].mean(), "low": low, "high": high, "width": high - low}


table = pd.DataFrame({n: row(draws) for n, draws in {0: before, **after}.items()}).T.rename_axis("patients")
table["width, alone"] = pd.Series({n: row(draws)["width"] for n, draws in by_itself.items()})
print(table.round(1))
print(f"the truth is {TRUE_LEVEL}")

# %%
# The same numbers are drawn below. On the left is the new clinic's own line, its mean fall at every dose. On the
# right is the interval of one point of it, the mean fall at 40 mg. The interval is narrower than that of a clinic by
# itself as long as there are few patients. With many patients both agree, because the clinic's own rows then decide.

dose = np.linspace(-2, 4, 50)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for color, label, draws in (("C7", "before any patient", before), ("C0", "after ten patients", after[10])):
    curves = draws[0][:, None] + draws[1][:, None] * dose
    low, high = np.quantile(curves, [0.03, 0.97], axis=0)
    left.fill_between(40 + 10 * dose, low, high, color=color, alpha=0.3, lw=0)
    left.plot(40 + 10 * dose, curves.mean(axis=0), color=color, label=f"{label}, with 94 %")
left.plot(40 + 10 * dose, TRUE_LEVEL + TRUE_SLOPE * dose, "k--", lw=1, label="truth")
first = newcomer[:10]
left.plot(40 + 10 * first["dose"], first["fall"], "o", color="C0", mec="white", label="its first ten patients")
left.set(xlabel="dose, mg", ylabel="fall of systolic pressure, mmHg", title="The new clinic's own line")
left.set_ylim(top=36)
left.legend(fontsize=8, loc="upper left")

places = np.arange(len(table))
right.errorbar(
    places - 0.1,
    table["mean"],
    [table["mean"] - table["low"], table["high"] - table["mean"]],
    fmt="o",
    label="with the fit of the others",
)
others = pd.DataFrame({n: row(draws) for n, draws in by_itself.items()}).T
right.errorbar(
    places[1:] + 0.1,
    others["mean"],
    [others["mean"] - others["low"], others["high"] - others["mean"]],
    fmt="o",
    mfc="white",
    label="alone",
)
right.axhline(TRUE_LEVEL, color="k", ls="--", lw=1, label="truth")
right.set_xticks(places, [str(n) for n in table.index])
right.set(xlabel="patients of the new clinic", ylabel="mean fall at 40 mg, mmHg", title="How the interval narrows")
right.legend(fontsize=8, loc="lower right")
plt.show()

# %%
# One patient is not the clinic's mean
# ------------------------------------
# An interval for the mean says nothing of how patients differ. With ``predict=`` the new clinic gets draws for its
# next patients, with the noise between patients in them. This interval hardly narrows, however many patients there
# are.

next_patient = pd.DataFrame({"dose": [0.0]})
for n in (10, 80):
    found = fit.new_client(newcomer[:n], predict=next_patient, random_seed=1)["predictions"]["fall"]
    low, high = np.quantile(found, [0.03, 0.97])
    print(f"the next patient at 40 mg, after {n} patients: {low:.0f} to {high:.0f} mmHg")

# %%
# What to take away
# -----------------
# - Before any data a new clinic is a draw from the population. Its interval is as wide as clinics differ, and cannot
#   be narrower, however many clinics took part.
# - ``fit.new_client(rows)`` is enough afterwards. No clinic is asked again, and the fit stays as it is. To let the
#   new clinic add to what all share, fit again with ``start=fit``.
# - That a newcomer is like the others is an assumption. If it was chosen because it differs, the first interval is
#   too optimistic.
# - Nothing of the new clinic left it. What left the ten clinics for the fit stands in :doc:`what leaves a site
#   </privacy>`.
#
# See also :doc:`a model of your own, and what a fit offers </models>` and :doc:`formulas </formulas>`.

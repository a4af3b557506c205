"""
Five minutes: from a data frame to a forest plot
================================================

Ten hospitals ran the same trial of a drug against high blood pressure. What does the drug do, and how much do the
hospitals differ? Here the rows of all hospitals are in one data frame, and a column says whose each row is. The same
formula works where each hospital keeps its rows; there a server and each hospital run an app of their own.
"""

# %%
# The data
# --------
# A row is a patient: the arm, the age in years and the fall in systolic pressure in mmHg. The smallest hospital has 8
# patients, the largest 160. The rows are simulated, so that the truth is known: the drug lowers the pressure by 5 mmHg
# more than the placebo, and hospitals' levels have a standard deviation of 3 mmHg.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

rng = np.random.default_rng(7)
sizes = {
    "Aker": 8,
    "Bern": 12,
    "Cork": 16,
    "Delft": 24,
    "Essen": 32,
    "Faro": 40,
    "Ghent": 60,
    "Hull": 80,
    "Inari": 120,
    "Jena": 160,
}
level = dict(zip(sizes, rng.normal(9, 3, len(sizes)), strict=True))  # mmHg

hospital = np.repeat(list(sizes), list(sizes.values()))
frame = pd.DataFrame(
    {
        "hospital": hospital,
        "arm": rng.choice(["placebo", "drug"], len(hospital)),
        "age": rng.normal(62, 9, len(hospital)).round(),
    }
)
frame["fall"] = (
    frame["hospital"].map(level)
    + 5 * (frame["arm"] == "drug")
    - 0.1 * (frame["age"] - 62)
    + rng.normal(0, 8, len(frame))
).round(1)
frame.sample(5, random_state=1)

# %%
# The model
# ---------
# A formula says what all hospitals share and what varies. The effects of the arm and of age are common, and each
# hospital has a level of its own: ``(1 | hospital)``. ``center(age)`` takes the mean age of all rows away, so that the
# intercept is the mean fall of a patient of that age under the placebo. ``levels=`` names the reference first.

model = fedppl.formula(
    "fall ~ arm + center(age) + (1 | hospital)", family="gaussian", levels={"arm": ["placebo", "drug"]}
)

# %%
# The fit
# -------
# Each hospital turns its rows into a few numbers, a server combines them, and they repeat this until nothing changes.
# ``fit.summary()`` has the variables that all share: their means, standard deviations and 90 % intervals.

fit = fedppl.fit(model, frame, by="hospital", progressbar=False, random_seed=1)
fit.summary(ci_prob=0.9)[["mean", "sd", "ci_low", "ci_high"]].round(2)

# %%
# The status says whether the rounds have settled. Read it before anything else.

print(fit.status.value, "after", len(fit.records), "rounds")

# %%
# A question about the drug is a question about its draws. How probable is it that the drug lowers the pressure by 3
# mmHg more than the placebo, or by more?

drug = fit.idata["posterior"]["arm"].values.ravel()
print(f"P(effect > 3 mmHg) = {np.mean(drug > 3):.3f}")

# %%
# The hospitals
# -------------
# ``fedppl.plots.forest`` draws each hospital's own posterior, here of its level less the mean of all hospitals. In
# brackets stands its number of patients. The crosses are what each hospital would say by itself: the mean of its own
# patients' falls, after the common effects are taken away. In large hospitals dot and cross agree. In small ones the
# dot lies nearer to the mean of all: this is shrinkage. The intervals of large hospitals do not become narrower and
# narrower, because the mean of ten hospitals is itself uncertain.

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
fedppl.plots.forest(fit, "hospital_effects", population=0, ci_prob=0.9, random_seed=1, ax=axes)

mean = fit.summary()["mean"]
rest = (
    frame["fall"]
    - mean["Intercept"]
    - mean["arm[drug]"] * (frame["arm"] == "drug")
    - mean["center(age)"] * (frame["age"] - frame["age"].mean())
)
alone = rest.groupby(frame["hospital"]).mean()[list(sizes)]
axes.plot(alone, range(len(sizes)), "x", color="C3", label="own patients only")
axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
axes.set_xlabel("hospital's level minus the mean of all hospitals, mmHg")
plt.show()

# %%
# What to take away
# -----------------
# - Three lines are enough: a formula, ``fedppl.fit`` with ``by=``, and ``fit.summary()``.
# - The common effects use all 552 patients; each hospital's own level uses its patients and what the others share.
# - A hospital with few patients is moved towards the others, as far as its data leave it open.
#
# More: :doc:`/formulas` has everything that a formula can say, :doc:`/plots` the other pictures, and
# :doc:`/deployment` says how hospitals keep their rows on machines of their own.

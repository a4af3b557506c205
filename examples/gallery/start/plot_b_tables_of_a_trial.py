"""
From a trial's data to the tables of its paper
==============================================

Eight hospitals compared a drug with standard care after a stroke, and a patient died within 90 days or did not. A paper
needs odds ratios with their intervals, the drug's effect in each hospital, and the risk of a patient to come, who may
go to a hospital that took no part. Each is a call.
"""

# %%
# The data
# --------
# A row is a patient. The rows are simulated: the drug's odds ratio is exp(-0.6) = 0.55 on average, hospitals differ in
# their level with an sd of 0.5, and in the drug's effect with an sd of 0.4, on the scale of log odds.

import numpy as np
import pandas as pd

import fedppl

rng = np.random.default_rng(11)
sizes = {"Aker": 60, "Bern": 80, "Cork": 100, "Delft": 120, "Essen": 150, "Faro": 180, "Ghent": 220, "Hull": 260}
hospital = np.repeat(list(sizes), list(sizes.values()))
frame = pd.DataFrame(
    {
        "hospital": hospital,
        "arm": rng.choice(["control", "drug"], len(hospital)),
        "age": rng.normal(68, 9, len(hospital)).round(),
    }
)
level = frame["hospital"].map(dict(zip(sizes, rng.normal(-0.6, 0.5, len(sizes)), strict=True)))
effect = frame["hospital"].map(dict(zip(sizes, rng.normal(-0.6, 0.4, len(sizes)), strict=True)))
log_odds = level + effect * (frame["arm"] == "drug") + 0.05 * (frame["age"] - 68)
frame["died"] = (rng.random(len(frame)) < 1 / (1 + np.exp(-log_odds))).astype(int)
frame.groupby("arm")["died"].agg(["sum", "count"])

# %%
# The fit
# -------
# ``(1 + arm | hospital)`` gives each hospital a level and an effect of the drug of its own.

model = fedppl.formula(
    "died ~ center(age) + arm + (1 + arm | hospital)", family="bernoulli", levels={"arm": ["control", "drug"]}
)
fit = fedppl.fit(model, frame, by="hospital", progressbar=False, random_seed=1)
print(fit.status.value, fit.message)

# %%
# The table
# ---------
# ``exponentiate=True`` gives ratios by the family and its link, here odds ratios, and says what each row is. Sds and
# correlations of hospitals' effects stay as they are. ``to_html()``, ``to_latex()`` and ``to_docx(path)`` write the
# table for a paper, and ``.frame`` has its numbers.

table = fedppl.table(fit, exponentiate=True)
table

# %%
# The hospitals
# -------------
# ``total=True`` adds what all share and what is the hospital's own: the drug's effect there. The line is the average of
# all hospitals with its interval.

_ = fedppl.plots.forest(fit, "arm", total=True, exponentiate=True, random_seed=1)

# %%
# A patient to come
# -----------------
# ``kind="mean"`` gives the risk, with the uncertainty of all that was estimated, and not an outcome of 0 or 1. A
# hospital that took part has its id; None stands for one of which nothing is known but that it is one more like these.
# Its level and its effect are drawn from the hierarchy, so that the risk there is known less well.

patient = {"age": 75, "arm": "drug"}
risks = {
    where: fit.predict(where, patient, kind="mean", random_seed=1)["predictions"]["died_mean"]
    for where in ("Hull", "Aker", None)
}
pd.DataFrame(
    {
        where or "a new hospital": [float(risk.mean()), *risk.quantile([0.025, 0.975]).values]
        for where, risk in risks.items()
    },
    index=["risk", "from", "to"],
).T.round(2)

# %%
# What to take away
# -----------------
# - ``fedppl.table``, ``fedppl.plots.forest`` and ``fit.predict`` are a line each. ``fit.report("report.html")`` has
#   the posterior, the hospitals and how the fit went on a page; ratios and risks are not on it.
# - An odds ratio is of one hospital, and no ratio of risks: for these predict both arms, or see
#   ``fedppl.marginal_effects``.
# - A prediction for a new hospital is as wide as hospitals differ.

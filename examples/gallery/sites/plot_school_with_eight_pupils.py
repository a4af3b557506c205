"""
What do other schools tell about a school with eight pupils?
============================================================

A school with eight pupils wants to know its level, given how pupils did before. Eight rows say little. This example
compares three answers: all schools are one, every school stands alone, and a hierarchy that is fitted without a row
leaving a school.
"""

# %%
# Twelve schools
# --------------
# Each row is a pupil: the score at the end of the year, and the score of a test before it, standardised over all
# schools. Schools differ in their level. The smallest one, Hillside, has eight pupils. Scores are simulated, so that
# the true levels are known, and each school has a later year of pupils on whom predictions can be tested.

import logging

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

logging.getLogger("fedppl").setLevel(logging.ERROR)
pd.set_option("display.width", 110)
rng = np.random.default_rng(17)
SIZES = {"Hillside": 8, "Alder": 11, "Brook": 14, "Cedar": 18, "Dene": 24, "Elm": 30}
SIZES |= {"Forge": 38, "Grange": 48, "Harbour": 60, "Ivy": 75, "Kings": 95, "Lake": 120}
LEVELS = {name: level for name, level in zip(SIZES, [45.0, *rng.normal(50, 4, len(SIZES) - 1)], strict=True)}


def year(school, pupils):
    """One year of a school: earlier and later scores."""
    earlier = rng.normal(size=pupils)
    return pd.DataFrame(
        {"school": school, "earlier": earlier, "score": LEVELS[school] + 6 * earlier + rng.normal(0, 9, pupils)}
    )


frame = pd.concat([year(school, pupils) for school, pupils in SIZES.items()], ignore_index=True)
later = pd.concat([year(school, 300) for school in SIZES], ignore_index=True)

# %%
# Three answers
# -------------
# Full pooling has no term of the school: what is shared is all there is. No pooling is the hierarchical model that
# every school fits by itself; from the others it has the agreed scales of the columns alone. The hierarchy lets the
# schools learn from each other how much schools differ, ``school_sd``, and uses that for each of them.

hierarchy = fedppl.formula("score ~ earlier + (1 | school)")
settings = {"by": "school", "random_seed": 1, "progressbar": False}
fits = {
    "full pooling": fedppl.fit(fedppl.formula("score ~ earlier"), frame, **settings),
    "no pooling": fedppl.fit(hierarchy, frame, fedppl.one_shot.Separate(), **settings),
    "hierarchy": fedppl.fit(hierarchy, frame, **settings),
}
print({name: fit.status.value for name, fit in fits.items()})
print(fits["hierarchy"].summary(round_to=2).iloc[:, :4])

# %%
# A school's level is its mean score of pupils whose earlier score is average. Each answer gives draws of it.


def level(fit, school):
    """Draws of a school's level."""
    draws = fit.client(school, random_seed=1)["posterior"]
    found = draws["Intercept"]
    return (found + draws["school_effects"].squeeze() if "school_effects" in draws else found).values.ravel()


levels = {name: {school: level(fit, school) for school in SIZES} for name, fit in fits.items()}


def row(draws):
    """Mean and 94 % interval."""
    low, high = np.quantile(draws, [0.03, 0.97])
    return {"mean": draws.mean(), "low": low, "high": high, "width": high - low}


table = pd.DataFrame({name: row(found["Hillside"]) for name, found in levels.items()}).T
print(f"Hillside, whose true level is {LEVELS['Hillside']:.0f}")
print(table.round(1))

# %%
# Full pooling is sure of itself and far off: its interval is that of the average school, and the truth lies outside
# it. By itself Hillside has an interval that holds the truth and is too wide to be of much use. The hierarchy takes
# Hillside's own rows and moves them towards the others by as much as eight rows are unsure.
#
# All schools
# -----------
# The same for every school, in the order of size, with the number of pupils in brackets. The hierarchy and no pooling
# differ much for small schools and hardly for large ones. A picture like this one, without the truth, is
# ``fedppl.plots.forest(fits["hierarchy"], "school_effects", alone=fits["no pooling"])``.

figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
places = np.arange(len(SIZES))
for shift, color, name in ((-0.2, "C0", "hierarchy"), (0.2, "C1", "no pooling")):
    rows = pd.DataFrame({school: row(draws) for school, draws in levels[name].items()}).T
    axes.hlines(places + shift, rows["low"], rows["high"], color=color)
    axes.plot(rows["mean"], places + shift, "o", color=color, mec="white", label=f"{name}, mean and 94 %")
pooled = row(levels["full pooling"]["Hillside"])
axes.axvspan(pooled["low"], pooled["high"], color="k", alpha=0.12, lw=0, label="full pooling, 94 %")
axes.plot(list(LEVELS.values()), places, "kx", label="true level")
axes.set_yticks(places, [f"{school} ({pupils})" for school, pupils in SIZES.items()])
axes.invert_yaxis()
axes.set_xlabel("level of the school, points")
figure.legend(fontsize=8, loc="outside lower center", ncols=4)
plt.show()

# %%
# Which answer predicts best?
# ---------------------------
# The true levels are never known in practice. Later pupils are. The table has the root mean squared error of the
# predicted scores of later pupils, and of the levels, for the four smallest, four middle and four largest schools.

errors = []
for name, fit in fits.items():
    for school in SIZES:
        pupils = later[later["school"] == school]
        found = fit.predict(school, pupils[["earlier"]], draws=250, random_seed=1)["predictions"]["score"]
        error = found.mean(["chain", "draw"]).values - pupils["score"].to_numpy()
        group = ["four smallest", "four middle", "four largest"][list(SIZES).index(school) // 4]
        errors.append((name, group, np.mean(error**2), (levels[name][school].mean() - LEVELS[school]) ** 2))
errors = pd.DataFrame(errors, columns=["answer", "schools", "later scores", "levels"])
table = errors.groupby(["schools", "answer"], sort=False).mean().pow(0.5).unstack("schools")
print(table.round(2).to_string())

# %%
# By later scores the hierarchy is ahead in every group. By levels it is not: four schools are few, and an unusual
# school is moved away from its own rows.
#
# What to take away
# -----------------
# - The interval of a small school narrows most. For a large one it matters little whether others take part.
# - The hierarchy moves an unusual small school towards the others, and so is wrong about it in that direction. It
#   gains over all schools, not for each of them.
# - One simulated data set is an example and no proof: with other seeds single schools come out otherwise.
# - No row left a school. What left were log marginal likelihoods at points of the shared variables, and those of a
#   school with eight rows can tell much about them: :doc:`what leaves a site </privacy>`.
#
# See also :doc:`formulas </formulas>`, :doc:`pictures </plots>` and :doc:`which algorithm </algorithms>`.

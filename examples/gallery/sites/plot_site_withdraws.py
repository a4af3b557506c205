"""
What happens when a site withdraws its data?
============================================

A trial at ten hospitals has been fitted, and then one of them withdraws its data. ``fedppl.without`` takes the
hospital out of what the server has kept, without a word from it. This example compares the result with a fit that
never had the hospital, and counts what either of them costs.
"""

# %%
# Ten hospitals
# -------------
# Patients of two arms heal or do not. Hospitals differ in how many heal. The hospital that will withdraw is Odense.
# It has many patients, and the drug did less there than elsewhere, so that its leaving will be seen.

import logging
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedppl

logging.getLogger("fedppl").setLevel(logging.ERROR)
pd.set_option("display.width", 110)
rng = np.random.default_rng(11)
SIZES = {"Aarhus": 40, "Bergen": 60, "Cork": 30, "Delft": 80, "Essen": 50}
SIZES |= {"Gent": 70, "Jena": 25, "Lund": 90, "Odense": 140, "Porto": 45}


def hospital(name, patients):
    """One hospital's patients: the arm, and whether they healed."""
    drug = rng.random(patients) < 0.5
    effect = 0.1 if name == "Odense" else 0.9
    healed = rng.random(patients) < 1 / (1 + np.exp(-rng.normal(-0.4, 0.6) - effect * drug))
    return pd.DataFrame({"hospital": name, "arm": np.where(drug, "drug", "none"), "healed": healed})


frame = pd.concat([hospital(name, patients) for name, patients in SIZES.items()], ignore_index=True)
model = fedppl.formula("healed ~ arm + (1 | hospital)", family="bernoulli", levels={"arm": ["none", "drug"]})
settings = {"random_seed": 1, "progressbar": False}
fit = fedppl.fit(model, frame, fedppl.EP(tolerance=1e-3), by="hospital", **settings)
print(fit.status.value)
print(fit.summary(round_to=3).iloc[:, :4])

# %%
# What would change, before anybody leaves
# ----------------------------------------
# ``fit.influence()`` has the posterior without each hospital. Nobody is asked for it; it is computed from the factors
# that the server keeps. The column ``shift`` says by how many posterior sds a hospital moves the effect of the drug. It
# is a look ahead and no withdrawal: the fit still holds what came from Odense.

influence = fit.influence()
shift = influence["shift"].sel(rows="arm[drug]").to_series()
print(shift.round(2).rename("shift of arm[drug], sd").to_frame().T.to_string())

# %%
# Odense withdraws
# ----------------
# The server has one factor of each hospital. ``fedppl.without`` removes that of Odense and lets the others go on
# until they agree again. ``certificate=False`` leaves out a second fit, which it otherwise makes by itself to compare
# with. Here that fit is made by hand, from the rows of the other nine, so that both can be counted.

others = frame[frame["hospital"] != "Odense"]
begun = time.process_time()
left = fedppl.without(fit, "Odense", certificate=False, **settings)
seconds = {"without": time.process_time() - begun}
begun = time.process_time()
never = fedppl.fit(fit.declaration, others, fedppl.EP(tolerance=1e-3), by="hospital", **settings)
seconds["never had it"] = time.process_time() - begun
anew = fedppl.fit(model, others, fedppl.EP(tolerance=1e-3), by="hospital", **settings)

fits = {"with Odense": fit, "without": left.fit, "never had it": never, "and agreed anew": anew}
rows = {name: one.summary().loc["arm[drug]", ["mean", "sd"]] for name, one in fits.items()}
table = pd.DataFrame(rows).T
table["hospitals"] = [len(one.client_ids) for one in fits.values()]
table["rounds"] = [len(one.records) for one in fits.values()]
table["CPU seconds"] = pd.Series(seconds)
print(table.round({"mean": 3, "sd": 3, "CPU seconds": 1}).to_string(na_rep=""))

# %%
# In the table are the log odds ratio of the drug, and what each fit took. The effect is larger without Odense, and
# ``without`` has the same as the fit that never had it. It needs fewer rounds, since the other hospitals begin where
# they were. Rounds are what costs where hospitals are at the end of a network. CPU time of this one process is
# saved too.
#
# The last row is for those who look closely. Before a fit by a formula, hospitals agree on the means and sds of
# columns, and the default priors rest on them. ``without`` and the row below it keep that agreement,
# ``fit.declaration``, to which Odense once contributed. In the last row the nine have agreed anew. The difference is
# small here, as wide priors matter little. Where nothing of a site may be kept, fit the others anew from the formula,
# or give all priors by ``priors=``.
#
# The distance over all shared variables is what ``certificate=True``, the default, measures: the largest difference
# of a mean in sds, or of a log sd.

certified = fedppl.without(fit, "Odense", **settings)
print(f"distance from a fit that never had it: below {max(0.001, np.ceil(certified.distance * 1000) / 1000):.3f} sd")

grid = np.linspace(-0.2, 1.6, 200)
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
drawn = {"with Odense": ("C7", "-"), "without": ("C0", "-"), "never had it": ("C1", "--")}
for name, (color, style) in drawn.items():
    draws = fits[name].idata["posterior"]["arm"].values.ravel()
    width = 0.9 * draws.std() * len(draws) ** -0.2
    density = np.exp(-0.5 * ((grid[:, None] - draws) / width) ** 2).mean(axis=1) / (width * np.sqrt(2 * np.pi))
    axes.plot(grid, density, style, color=color, lw=2, label=name)
axes.set(xlabel="effect of the drug, log odds ratio", ylabel="posterior density", ylim=(0, None))
axes.legend(title="posterior")
plt.show()

# %%
# What a withdrawal does not undo
# -------------------------------
# What was computed with Odense's data and is stored elsewhere stays there. The result lists it, so that it can be
# deleted.

for place in left.still_held:
    print("-", place)

# %%
# What to take away
# -----------------
# - ``fedppl.without(fit, id).fit`` is the posterior of those that stay, and the withdrawn site is not asked for
#   anything.
# - It is the same as a fit that never had the site, up to the tolerance of EP, and the certificate measures that. A
#   tighter ``tolerance=`` makes it closer.
# - It needs fewer rounds than a new fit. The certificate is a new fit: where sites count requests,
#   ``certificate=False`` leaves it out.
# - What sites agreed on before the fit is kept, as the last row of the table shows.
# - It cannot recall what was published or saved. Two posteriors, one with the site and one without it, tell together
#   what the site said: keep the first one only where that is allowed.
#
# See also :doc:`how right it is </exactness>`, :doc:`sites of their own </deployment>` and :doc:`what leaves a site
# </privacy>`.

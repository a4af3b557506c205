"""
Can trials that give an estimate only stand beside trials that give their data?
===============================================================================

Ten trials compare a drug with a control. Four take part with their patients' data, which stay with them; of six there
is only what their papers tell, a log odds ratio and its standard error. One fit takes both kinds, and a forest plot
shows them side by side.
"""

# %%
# Ten trials
# ----------
#
# The data are simulated, so that what the six papers leave out can be looked at in the end. The drug's effect differs
# between trials, and so does the risk under control.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import fedppl

rng = np.random.default_rng(8)
sizes = {"Ada": 180, "Bern": 240, "Cork": 90, "Delft": 320, "Essen": 150, "Faro": 60, "Gent": 400, "Hull": 210}
sizes |= {"Ivry": 130, "Jena": 280}
everyone = {}
for trial, patients in sizes.items():
    arm = np.where(rng.random(patients) < 0.5, "control", "drug")
    logit = rng.normal(-1.1, 0.4) + rng.normal(-0.5, 0.25) * (arm == "drug")
    everyone[trial] = pd.DataFrame({"arm": arm, "died": (rng.random(patients) < 1 / (1 + np.exp(-logit))).astype(int)})
with_data = list(sizes)[:4]  # Ada to Delft; the others are papers

# %%
# What a paper tells
# ------------------
#
# The log odds ratio of a 2 x 2 table and its variance, by the textbook's formula. That is a maximum likelihood estimate
# of the trial's *own* effect. An estimate that a prior or a penalty has shrunk would not do: its prior would count a
# second time.


def published(frame):
    """Log odds ratio of death and its variance."""
    table = pd.crosstab(frame["arm"], frame["died"]).to_numpy()
    odds = np.log(table[:, 1] / table[:, 0])
    return odds[1] - odds[0], (1 / table).sum()


told = {trial: published(frame) for trial, frame in everyone.items()}
print(f"{'trial':8}{'patients':>9}{'log odds ratio':>16}{'standard error':>16}")
for trial, (estimate, variance) in told.items():
    source = "data" if trial in with_data else "paper"
    print(f"{trial:8}{sizes[trial]:9}{estimate:16.2f}{np.sqrt(variance):16.2f}  {source}")

# %%
# One declaration, two kinds of trials
# ------------------------------------
#
# What all trials share is declared once, and both builders call it: the mean effect, its spread between trials, and the
# trial's own effect. A trial with data has a risk under control of its own as well. A trial has the kind whose
# arguments are the names of what it brings.


def effect():
    """Mean and spread are shared, the trial's own effect is local."""
    mu, tau = pm.Normal("mu", 0, 1.5), pm.HalfNormal("tau", 0.5)
    return pm.Normal("theta", mu, tau)


def rows(arm, died):
    """A trial that has its patients' data."""
    with pm.Model() as model:
        arm, died = pm.Data("arm", arm), pm.Data("died", died)
        theta, baseline = effect(), pm.Normal("baseline", 0, 2.5)
        pm.Bernoulli("death", logit_p=baseline + theta * arm, observed=died)
    return model


model = fedppl.FederatedModel({"rows": rows, "paper": fedppl.summaries.estimate(effect)}, shared=["mu", "tau"])
complete = {
    trial: {"arm": (frame["arm"] == "drug").to_numpy(float), "died": frame["died"].to_numpy()}
    for trial, frame in everyone.items()
}
papers = {trial: {"estimate": estimate, "covariance": variance} for trial, (estimate, variance) in told.items()}
mixed = {trial: complete[trial] if trial in with_data else papers[trial] for trial in sizes}

fit = fedppl.fit(model, mixed, progressbar=False, random_seed=1)
print(fit.status.value, fit.message)
print(fit.summary().iloc[:, :4].round(2))

# %%
# Patients' data did not leave Ada to Delft. What did is what their data say of ``mu`` and ``tau``, as :doc:`/privacy`
# describes. Of the other six the estimate is all that there is, and the caller has it already.
#
# Forest plot
# -----------
#
# Every trial's posterior, beside what the trial says alone: the textbook's estimate with its 90 % interval. In brackets
# is the number of rows that fedppl counts for a trial; an estimate counts as what it is, one number.

figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
fedppl.plots.forest(fit, "theta", population="mu", ci_prob=0.9, random_seed=1, ax=axis)
for place, (estimate, variance) in enumerate(told.values()):
    half = 1.645 * np.sqrt(variance)
    axis.plot([estimate - half, estimate + half], [place + 0.28] * 2, color="C1", lw=0.8)
    axis.plot(estimate, place + 0.28, "o", color="C1", mfc="white", ms=4, label=None if place else "trial alone, 90 %")
axis.axvline(0, color="0.6", ls=":", lw=1)
axis.set_xlabel("log odds ratio of death, drug to control")
_ = axis.legend(loc="upper right", fontsize=8)

# %%
# What the papers add, and what they leave out
# --------------------------------------------
#
# Three more fits: the four trials with data alone; all trials with data, which only a simulation has; and all trials by
# their estimates, the usual meta-analysis.

fits = {
    "4 trials with data": fedppl.fit(
        model, {trial: complete[trial] for trial in with_data}, progressbar=False, random_seed=1
    ),
    "4 with data, 6 papers": fit,
    "10 trials with data": fedppl.fit(model, complete, progressbar=False, random_seed=1),
    "10 papers": fedppl.fit(model, papers, progressbar=False, random_seed=1),
}
print(f"{'':24}{'mean effect':>12}{'sd':>7}{'spread':>8}{'sd':>7}")
for name, found in fits.items():
    table = found.summary()
    (mu, mu_sd), (tau, tau_sd) = (table.loc[name, ["mean", "sd"]] for name in ("mu", "tau"))
    print(f"{name:24}{mu:12.3f}{mu_sd:7.3f}{tau:8.3f}{tau_sd:7.3f}")

# %%
# What to take away
# -----------------
#
# - The six papers narrow the interval of the mean effect, about as much as their patients' data would have done: with
#   this many deaths in each arm an estimate and its standard error say nearly all of it.
# - That ends where events are rare. An estimate with two deaths in an arm is not normal, and with none there is no
#   estimate: ``fedppl.summaries.two_by_two`` and ``grid`` take a table of counts or a likelihood: :doc:`/summaries`.
# - An estimate says nothing of patients. ``fit.predict`` of such a trial is refused, and so is an effect that depends
#   on a covariate which the paper did not report.
# - Whether a paper disagrees with the rest is asked by ``fedppl.conflict(fit)``: :doc:`/models`.
# - With :doc:`/formulas`, ``fedppl.summaries.Estimate`` stands in place of a trial's frame.

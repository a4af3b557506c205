"""
What does fedppl say when a fit fails, and what does it not say?
================================================================

A declaration may be refused, a fit may stop before it has arrived, data may disagree with the prior, and a posterior
may have a second mode that nobody looked for. Each is provoked here once. The messages are printed as they come, and
each fit is mended.
"""

# %%
# A helper prints what happened: the error, or the status with its message and the warning, and the summary.

import textwrap
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
from scipy.stats import norm, t

import fedppl


def attempt(builder, shared, clients, **settings):
    """Fit, and print what fedppl says."""
    model = fedppl.FederatedModel(builder, shared=shared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fedppl.ConvergenceWarning)
        try:
            fit = fedppl.fit(model, clients, progressbar=False, random_seed=1, **settings)
        except (fedppl.DeclarationError, fedppl.DataError) as error:
            print(textwrap.fill(f"{type(error).__name__}: {error}", 100))
            return None
    print(textwrap.fill(f"status: {fit.status.value}; message: {fit.message or 'none'}", 100))
    print("warnings:", ", ".join(one.category.__name__ for one in caught) or "none")
    try:
        print(fit.summary().iloc[:, :4].round(3))
    except fedppl.NotConvergedError:
        print("no summary")
    return fit


# %%
# Refused: a variable that cannot be handled
# ------------------------------------------
#
# Six clinics measure a blood value. It is low in some patients and high in others, and nobody knows in whom. The model
# is declared with an indicator for each patient.

rng = np.random.default_rng(3)
clinics = {}
for number, patients in enumerate([60, 80, 100, 70, 90, 120], start=1):
    high = rng.random(patients) < 0.4
    value = np.where(high, rng.normal(2.0, 0.6, patients), rng.normal(-0.5, 0.6, patients))
    clinics[f"clinic {number}"] = {"y": value}


def indicators(y):
    """An indicator for each patient."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        level, sd = pm.Normal("level", 0, 2, shape=2), pm.HalfNormal("sd", 1)
        is_high = pm.Bernoulli("is_high", 0.5, shape=y.shape)
        pm.Normal("value", level[is_high], sd, observed=y)
    return model


_ = attempt(indicators, ["level", "sd"], clinics)

# %%
# Nothing was computed, and nothing left a client. The message names the variable, the rule and a remedy: sum the
# indicator out, which is a mixture.


def mixture(y):
    """The indicators are summed out."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        level, sd = pm.Normal("level", 0, 2, shape=2), pm.HalfNormal("sd", 1)
        share = pm.Beta("share", 2, 2)
        pm.NormalMixture("value", pm.math.stack([share, 1 - share]), level, sd, observed=y)
    return model


_ = attempt(mixture, ["level", "sd", "share"], clinics)

# %%
# Nothing in the declaration tells which level is the first: with both exchanged, and the share turned round, the
# density is the same. The posterior has two modes. The fit searched from four points, found both, and has a summary
# of neither. A search from one point ends there without a word; it is what sites of their own
# are asked for, since every search costs them queries.

_ = attempt(mixture, ["level", "sd", "share"], clinics, algorithm=fedppl.EP(starts=1))

# %%
# So name the lower one by what it is. The posterior then has one mode.


def ordered(y):
    """The second level lies above the first."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        low, gap, sd = pm.Normal("low", 0, 2), pm.HalfNormal("gap", 3), pm.HalfNormal("sd", 1)
        share = pm.Beta("share", 2, 2)  # of patients with the low level
        pm.NormalMixture("value", pm.math.stack([share, 1 - share]), pm.math.stack([low, low + gap]), sd, observed=y)
    return model


_ = attempt(ordered, ["low", "gap", "sd", "share"], clinics)

# %%
# Stopped before it arrived
# -------------------------
#
# Rents in six towns, in euros, and the tenants' incomes. One round is not enough.

towns = {}
for number, tenants in enumerate([25, 40, 60, 30, 80, 50], start=1):
    income = rng.lognormal(10.4, 0.5, tenants)
    rent = 2000 + rng.normal(0.3, 0.05) * income + rng.normal(0, 1500) + rng.normal(0, 3000, tenants)
    towns[f"town {number}"] = {"income": income, "rent": rent}


def rents(income, rent):
    """A line for each town; priors for variables of unit scale."""
    with pm.Model(coords={"part": ["level", "slope"]}) as model:
        income, rent = pm.Data("income", income), pm.Data("rent", rent)
        mu, tau = pm.Normal("mu", 0, 1, dims="part"), pm.HalfNormal("tau", 1, dims="part")
        own, noise = pm.Normal("own", mu, tau, dims="part"), pm.HalfNormal("noise", 1)
        pm.Normal("paid", own[0] + own[1] * income, noise, observed=rent)
    return model


# Constants that everybody knows beforehand, not computed from anybody's rows.
scaled = {
    name: {"income": (own["income"] - 35_000) / 15_000, "rent": (own["rent"] - 12_000) / 6_000}
    for name, own in towns.items()
}
early = attempt(rents, ["mu", "tau"], scaled, rounds=1)

# %%
# The status is not ``converged``, a ``ConvergenceWarning`` says it a second time, and the message names the setting.
# With the default there are enough rounds.

arrived = attempt(rents, ["mu", "tau"], scaled)

# %%
# Converged, with a message: the prior and the data disagree
# ----------------------------------------------------------
#
# The same with the rows as they came, in euros. The declared priors are for variables of unit scale.

raw = attempt(rents, ["mu", "tau"], towns)

# %%
# This is the posterior of what was declared, and the declaration was wrong: a mean level of about one euro, and a
# spread between towns that has to make up for it. A fit that converged can have a message. Read it: it names
# coordinates, and asks for the units. The mended fit is the one above, of scaled rows.
#
# Two groups of data, and a part of the posterior that is missing
# ---------------------------------------------------------------
#
# Six laboratories measure one quantity. Three of them are calibrated differently, and the model, with heavy tails and
# one mean, has no place for that.

labs = {f"lab {number}": {"y": rng.normal(0 if number < 4 else 12, 1, 5)} for number in range(1, 7)}


def one_mean(y):
    """All laboratories measure the same, with outliers."""
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 20)
        pm.StudentT("value", nu=2, mu=mu, sigma=1, observed=y)
    return model


_ = attempt(one_mean, ["mu"], labs)

# %%
# The fit says that there is a second mode. A search from one point, as sites of their own are asked for by default,
# does not see it: its mean and sd are of one mode alone, and nothing says so.

single = attempt(one_mean, ["mu"], labs, algorithm=fedppl.EP(starts=1))

# %%
# One shared number, so that the posterior can be computed on a grid, with all rows in one place.

grid = np.linspace(-3, 15, 1801)
everyone = np.concatenate([own["y"] for own in labs.values()])
log_density = norm.logpdf(grid, 0, 20) + t.logpdf(everyone[:, None] - grid, 2).sum(axis=0)
density = np.exp(log_density - log_density.max())
density /= density.sum() * (grid[1] - grid[0])
q = single.summary().loc["mu"]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot(grid, density, color="black", label="posterior on a grid, all rows in one place")
axis.plot(grid, norm.pdf(grid, q["mean"], q["sd"]), color="C0", ls="--", label="the fit")
axis.plot(everyone, np.full(len(everyone), -0.04), "|", color="0.4", label="measurements")
axis.set(xlabel="mu, units of the measurement", ylabel="density")
_ = axis.legend(frameon=False, fontsize=9, loc="upper center")
print(f"share of the posterior below 6: {density[grid < 6].sum() / density.sum():.2f}")

# %%
# Points that are drawn around one mode do not see another one far away. Nor
# is ``fedppl.conflict`` sure to: with heavy tails each laboratory may be an outlier, and the p-values say little.

print(fedppl.conflict(single).to_dataframe()["p_value"].round(2).to_string())

# %%
# What shows it is every laboratory by itself. That sends nothing, and it is a good first look at any model.

one = fedppl.FederatedModel(one_mean, shared=["mu"])
alone = fedppl.fit(one, labs, fedppl.one_shot.Separate(), progressbar=False, random_seed=1)
axis = fedppl.plots.forest(alone, "mu", random_seed=1, figsize=(7, 3))[0]
_ = axis.set_xlabel("mu of each laboratory alone, units of the measurement")

# %%
# There are two groups, so that laboratories have to be allowed to differ.


def own_mean(y):
    """Laboratories differ; what they share is their mean and their spread."""
    with pm.Model() as model:
        y, mu, tau = pm.Data("y", y), pm.Normal("mu", 0, 20), pm.HalfNormal("tau", 10)
        theta = pm.Normal("theta", mu, tau)
        pm.Normal("value", theta, 1, observed=y)
    return model


_ = attempt(own_mean, ["mu", "tau"], labs)

# %%
# The mean is now known as badly as six laboratories that disagree can know it. Which of them are right no model can
# say.
#
# What to take away
# -----------------
#
# - A refusal comes before anything is computed or sent. Its last sentences are the remedy.
# - :doc:`/when_it_fails` has every status and what to do about each.
# - Read ``fit.status`` and ``fit.message``, and the message also where the fit has converged: it may be about a
#   client's units, or about a prior that its data contradict. :doc:`/models` has what a fit offers.
# - ``converged`` says that rounds have come to rest and what they found is trusted around there: :doc:`/exactness`.
#   It says of other modes that a few searches came to none. Labels that can be exchanged, signs that can be turned
#   round, and heavy tails with data in two places have several. Name what is exchangeable, and where you are in doubt,
#   or data are at sites of their own, ask for more searches: ``fedppl.EP(starts=8)``.
# - A model that is refused because of a kink, such as a lasso's, has another way of computing: :doc:`/algorithms`.

"""
What does differential privacy of counts cost?
==============================================

A hundred general practices count the cases of a disease. Each has a rate of its own, and all of them want to know the
mean rate. A fit by expectation propagation sends what a practice's counts say of the mean, and that can give the counts
away. ``fedppl.PrivateEP`` adds noise before anything leaves a practice. This page shows what that does to the width of
the posterior.
"""

# %%
# The practices
# -------------
#
# Weekly counts, between ten and thirty weeks a practice, simulated.

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
from scipy.optimize import brentq

import fedppl

SPREAD = 0.4  # sd of practices' log rates, known from a register
rng = np.random.default_rng(5)
practices = {}
for number in range(1, 101):
    rate = np.exp(rng.normal(np.log(2.0), SPREAD))
    practices[f"practice {number:03d}"] = {"cases": rng.poisson(rate, rng.integers(10, 31))}


def practice(cases):
    """Weekly counts of one practice."""
    with pm.Model() as model:
        cases = pm.Data("cases", cases)
        mu = pm.Normal("mu", 0.5, 0.4)  # shared
        log_rate = pm.Normal("log_rate", mu, SPREAD)  # this practice's own
        pm.Poisson("count", pm.math.exp(log_rate), observed=cases)
    return model


model = fedppl.FederatedModel(practice, shared=["mu"])
plain = fedppl.fit(model, practices, progressbar=False, random_seed=1)
print(plain.status.value, plain.message)
print(plain.summary().iloc[:, :4].round(3))

# %%
# A budget
# --------
#
# The guarantee is for all that one practice holds: whatever the server asks, an observer of the practice's replies can
# hardly tell its counts from any others. ε says how hardly, and a smaller one is stricter. A practice answers five
# times and then refuses. ``fedppl.privacy.epsilon`` gives the ε of that for some noise; turned round, it gives the
# noise.

RELEASES = 12


def noise_for(budget):
    """Noise multiplier for which twelve releases cost this ε, at δ = 1e-5."""
    return brentq(lambda z: fedppl.privacy.epsilon(z, RELEASES) - budget, 0.2, 500.0)


budgets = (3.0, 10.0, 30.0)
fits = {}
for budget in budgets:
    private = fedppl.PrivateEP(clip=0.4, noise_multiplier=noise_for(budget), releases=RELEASES)
    fits[budget] = fedppl.fit(model, practices, private, rounds=RELEASES, progressbar=False, random_seed=1)
    print(f"epsilon {budget:g}: {fits[budget].status.value}, {fits[budget].message}")

# %%
# Noise comes from the operating system and not from ``random_seed``, which the server could use to subtract it: **equal
# seeds do not give equal numbers here**, and every run of this page prints others. Where the noise has carried the
# shared Gaussian so far off that a practice cannot compute with it, the practice sends its old site with noise, and its
# own log says so.
#
# What left a practice
# --------------------
#
# One vector of two numbers in each round, clipped and with noise, and nothing else: no diagnostics, no skewness, and no
# log likelihood at points. Sites of their own would send all of these to a plain fit, but for the last, which only
# ``fedppl.Sums()`` asks for.

print(sorted({str(what) for what in fits[budgets[0]].idata["rounds"]["released"].values}))

# %%
# Width
# -----

sds = {"no privacy": (0.0, plain)} | {f"epsilon {b:g}": (noise_for(b), fit) for b, fit in fits.items()}
centre, narrow = plain.summary().loc["mu", ["mean", "sd"]]
known = 0.5, 0.4  # mean and sd of the prior
print(f"{'':12}{'noise multiplier':>17}{'mean of mu':>12}{'sd':>8}{'sd, times plain':>17}{'off by, in its sds':>20}")
print(f"{'prior':12}{'':17}{known[0]:12.3f}{known[1]:8.3f}{known[1] / narrow:17.1f}")
for name, (noise, fit) in sds.items():
    mu = fit.summary().loc["mu"]
    off = mu["mean"] - centre
    print(f"{name:12}{noise:17.1f}{mu['mean']:12.3f}{mu['sd']:8.3f}{mu['sd'] / narrow:17.1f}{off / mu['sd']:20.1f}")

# %%

figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
axis.axvspan(known[0] - 1.645 * known[1], known[0] + 1.645 * known[1], color="0.9", lw=0, label="prior, 90 %")
for place, (_, fit) in enumerate(sds.values()):
    draws = fit.idata["posterior"]["mu"].values.ravel()
    ends = np.quantile(draws, [0.05, 0.95])
    axis.plot(ends, [place, place], color="C0", lw=3, label=None if place else "90 % interval")
    axis.plot(draws.mean(), place, "o", color="white", mec="C0", label=None if place else "mean")
axis.axvline(np.log(2.0), color="black", ls="--", lw=1, label="truth")
axis.set_yticks(range(len(sds)), [name.replace("epsilon", "ε =") for name in sds])
axis.set(xlabel="mu, mean log rate of cases a week", ylim=(len(sds) - 0.5, -0.5))
_ = figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=9)

# %%
# What to take away
# -----------------
#
# - The stricter the budget, the wider the posterior: it holds the noise. The last column of the table says how far the
#   mean has moved from that of the fit without privacy.
# - Read the messages. A private fit calls itself converged only where the noise in the mean is less than the
#   posterior's own sd and q has come to rest. Where it has not, the width is not to be relied on either, and the mean
#   can be further off than it says.
# - Under a budget that is too strict the result is wider than the prior: what comes out is noise, and the prior is the
#   better answer. Hold them side by side, as here.
# - ``clip`` matters as much as the noise, which is its multiple: about three times √(2 m / K) for m shared numbers and
#   K clients is a good start. A prior that is very wide costs releases, and each shared variable costs more noise.
# - The guarantee is against the server itself and for all counts of a practice, which is much to ask. With few clients
#   nothing is left of the answer. With more of them the same budget costs about the same number of posterior sds, and
#   each of those is smaller.
# - Budgets add up over runs, and a site's policy can hold them all to one total: :doc:`/privacy`. What a site may
#   refuse besides is in :doc:`/security`.

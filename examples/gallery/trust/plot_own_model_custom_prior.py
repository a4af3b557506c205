"""
A PyMC model of one's own, with a custom hierarchical prior
===========================================================

Some models are no formula. Here nine hospitals measure how fast a drug leaves the blood, which is a nonlinear curve
with two parameters that vary by hospital and are correlated. The example declares one hospital in PyMC with an LKJ
prior of the correlation and half-Cauchy priors of the spreads, fits it across hospitals, and looks at the result with
ArviZ.
"""

# %%
# One hospital in PyMC
# --------------------
# After an injection of 100 mg the concentration at time t is ``100 / V exp(-CL / V t)``, with clearance CL in litres
# an hour and volume V in litres. Each patient gives one sample, at a time of its own. Hospitals have different
# patients, so that their clearance and volume differ.
#
# The function declares **one** hospital, as if there were no other. Data go into ``pm.Data`` containers that are
# named like its arguments. Nothing in it is special to fedppl.

import logging

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm

import fedppl

logging.getLogger("fedppl").setLevel(logging.ERROR)
pd.set_option("display.width", 110)


def hospital(hours, log_concentration):
    """Declare one hospital's patients."""
    with pm.Model(coords={"parameter": ["log CL", "log V"]}) as model:
        hours = pm.Data("hours", hours)
        log_concentration = pm.Data("log_concentration", log_concentration)
        # shared by all hospitals
        mu = pm.Normal("mu", [1.0, 3.0], 1.0, dims="parameter")
        factor, correlations, sds = pm.LKJCholeskyCov("factor", n=2, eta=2, sd_dist=pm.HalfCauchy.dist(0.3))
        pm.Deterministic("spread", sds, dims="parameter")
        pm.Deterministic("correlation", correlations[0, 1])
        sigma = pm.HalfNormal("sigma", 0.5)
        # of this hospital
        z = pm.Normal("z", 0, 1, dims="parameter")
        theta = pm.Deterministic("theta", mu + factor @ z, dims="parameter")
        clearance, volume = pm.math.exp(theta[0]), pm.math.exp(theta[1])
        mean = np.log(100) - theta[1] - clearance / volume * hours
        pm.Normal("sample", mean, sigma, observed=log_concentration)
    return model


# %%
# What all share is named, and everything else is local. Priors are declared where PyMC has them: those of shared
# variables are the hyperpriors, and a local variable's prior is the hierarchy. fedppl reads them from the model, so
# that any continuous distribution of PyMC will do. There are three rules. A shared prior may depend on shared
# variables alone, and not on data. It has to be proper. And where a density has a kink, as Laplace's, clients have to
# compute by draws, ``local=fedppl.local.NUTS()``.

rng = np.random.default_rng(2)
sizes = [5, 6, 8, 10, 12, 16, 20, 30, 40]
scatter = np.linalg.cholesky([[0.30**2, 0.6 * 0.30 * 0.20], [0.6 * 0.30 * 0.20, 0.20**2]])
truth = {f"hospital {k}": np.array([1.2, 3.2]) + scatter @ rng.normal(size=2) for k in range(1, 10)}


def samples(theta, patients):
    """Simulate one hospital's samples: hours after the injection, and log mg a litre."""
    hours = rng.uniform(0.5, 12, patients)
    mean = np.log(100) - theta[1] - np.exp(theta[0] - theta[1]) * hours
    return {"hours": hours, "log_concentration": mean + rng.normal(0, 0.25, patients)}


data = {name: samples(theta, patients) for (name, theta), patients in zip(truth.items(), sizes, strict=True)}
model = fedppl.FederatedModel(hospital, shared=["mu", "factor", "sigma"])
print(model.describe(data["hospital 1"]).to_string())

# %%
# The fit
# -------
# Nothing else is to be chosen. Hospitals tell the values of their log marginal likelihoods at points, and send no
# sample. ``fit.status`` says whether it arrived; the table is fedppl's own, since draws of the shared
# posterior are independent and have a perfect R̂ always.

fit = fedppl.fit(model, data, random_seed=1, progressbar=False)
print(fit.status.value, fit.message)
told = ["mu", "spread", "correlation", "sigma"]
print(fit.summary(told, round_to=2).iloc[:, :6].to_string())

# %%
# By ArviZ
# --------
# ``fit.idata`` is what ArviZ reads. Deterministics that depend on shared variables alone, as ``spread`` and
# ``correlation``, are in it.

print(az.summary(fit.idata, var_names=told, kind="stats", round_to=2).to_string())

# %%
# ``fit.client(...)`` is an ArviZ object too, of one hospital with its own curve. It is drawn where the hospital's
# data are. With its log likelihoods ``az.loo`` works, whose Pareto k tell whether single samples decide much.

small = fit.client("hospital 1", groups="log_likelihood", random_seed=1)
print(az.summary(small, var_names=["theta"], kind="stats", round_to=2).to_string())
print(f"largest Pareto k: {float(az.loo(small, pointwise=True).pareto_k.max()):.1f}")

# %%
# On the left is what the data have taught of the spread of log CL: the long tail of its half-Cauchy prior is gone,
# and zero is unlikely too. On the right is the smallest hospital, with five samples. Its own curve lies among them,
# and its interval is narrower than that of the curves of hospitals at large, which is all that is known of a hospital
# without samples.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
spread = fit.idata["posterior"]["spread"].sel(parameter="log CL").values.ravel()
grid = np.linspace(0, 1.2, 200)
left.hist(spread, bins=60, range=(0, 1.2), density=True, color="C0", alpha=0.5, label="posterior")
left.plot(grid, 2 / (np.pi * 0.3 * (1 + (grid / 0.3) ** 2)), "k--", label="prior, half-Cauchy(0.3)")
left.set(xlabel="spread of log CL over hospitals", ylabel="density", title="What the data have taught")
left.legend(fontsize=8)

hours = np.linspace(0, 12, 60)


def curves(log_clearance, log_volume):
    """Concentrations at all hours, one row a draw."""
    rate = np.exp(log_clearance - log_volume)[:, None]
    return 100 * np.exp(-log_volume)[:, None] * np.exp(-rate * hours)


shared = fit.idata["posterior"].stack(sample=("chain", "draw"))
z = rng.normal(size=(2, shared.sizes["sample"]))
first, below, second = shared["factor"].values  # the lower triangle, row by row
any_hospital = shared["mu"].values + np.stack([first * z[0], below * z[0] + second * z[1]])
own = small["posterior"]["theta"].stack(sample=("chain", "draw")).transpose("parameter", "sample").values
for theta, color, label in ((any_hospital, "C7", "hospitals at large"), (own, "C0", "hospital 1")):
    drawn = curves(*theta)
    low, high = np.quantile(drawn, [0.03, 0.97], axis=0)
    right.fill_between(hours, low, high, color=color, alpha=0.35, lw=0, label=f"{label}, 94 %")
right.plot(hours, curves(*truth["hospital 1"][:, None])[0], "k--", lw=1, label="truth of hospital 1")
right.plot(
    data["hospital 1"]["hours"],
    np.exp(data["hospital 1"]["log_concentration"]),
    "o",
    color="C0",
    mec="white",
    label="its samples",
)
right.set(xlabel="hours after the injection", ylabel="concentration, mg a litre", title="The smallest hospital")
right.legend(fontsize=8)
plt.show()

# %%
# What to take away
# -----------------
# - A model of one's own is a function that returns a ``pm.Model`` of one client, and a list of the names that are
#   shared.
# - Priors stand in that function, hyperpriors and hierarchy alike. fedppl adds none of its own.
# - ``model.describe(data)`` lists what it has read as shared, with priors, before anything is fitted.
# - Results are ArviZ objects, of what is shared and of each client. Whether the fit arrived, ``fit.status`` and
#   ``fit.summary()`` tell.
# - A prior and the labels of ``coords`` are the same at all clients and leave them as they are: put no data into
#   them.
#
# See also :doc:`a model of your own, and what a fit offers </models>`, :doc:`which algorithm </algorithms>` and
# :doc:`how right it is </exactness>`.

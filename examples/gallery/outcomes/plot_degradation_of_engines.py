"""
How far will a young engine have worn down by its next overhaul?
================================================================

The margin of an engine's exhaust gas temperature shrinks as it wears. Sixteen operators have one engine each and do not
share its readings. Six of the engines are young: of their wear little has been seen, and it has to be extrapolated. A
hierarchical model lets them use what the older engines show, without a reading that leaves its operator.
"""

# %%
# A simulated fleet
# -----------------
#
# Every engine has a level when new, a slope, and a curvature, since wear gets faster. Units are °C and thousands of
# flights. Older engines have been read until their overhaul at 1,500 flights or close to it, young ones for a tenth of
# that. The truth of later flights is kept aside.

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

import fedppl

OVERHAUL, NOISE = 1.5, 3.0
rng = np.random.default_rng(20)


def design(flights):
    """Level, slope and curvature at these thousands of flights."""
    return np.vander(np.asarray(flights, dtype=float), 3, increasing=True)


last = np.concatenate([rng.uniform(1.0, 1.5, 10), rng.uniform(0.12, 0.3, 6)])
truth, engines = {}, {}
for number, until in enumerate(last, start=1):
    name = f"{'old' if number <= 10 else 'young'} {number:02d}"
    truth[name] = rng.normal([85.0, -14.0, -8.0], [5.0, 4.0, 2.5])
    flights = np.arange(0.0, until, 0.02)
    margin = design(flights) @ truth[name] + rng.normal(0, NOISE, len(flights))
    engines[name] = {"X": design(flights), "y": margin}
young = [name for name in engines if name.startswith("young")]
print({name: len(data["y"]) for name, data in engines.items()})

# %%
# One engine's model
# ------------------
#
# This is an ordinary PyMC model. The mean of the fleet and the spread between engines are shared, the engine's own
# three coefficients and its noise are not. The data stand in ``pm.Data``, so that one compiled function serves all
# engines.


def engine(X, y):
    """Coefficients of one engine, drawn from the fleet's."""
    with pm.Model(coords={"part": ["level", "slope", "curvature"]}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        fleet = pm.Normal("fleet", [80.0, -15.0, 0.0], [20.0, 15.0, 15.0], dims="part")
        spread = pm.HalfNormal("spread", [10.0, 10.0, 5.0], dims="part")
        own = pm.Normal("own", fleet, spread, dims="part")
        noise = pm.HalfNormal("noise", 5.0)
        pm.Normal("margin", X @ own, noise, observed=y)
    return model


model = fedppl.FederatedModel(engine, shared=["fleet", "spread"])
fit = fedppl.fit(model, engines, progressbar=False, random_seed=1)
print(fit.status.value, "-", fit.message)
print(fit.summary().iloc[:, :4].round(2))

# %%
# The log warns that the column of squared flights is much smaller at the young engines, as if units differed. That is
# the point of this page: they have flown less. Where nobody knows of a reason, look at the units.
#
# What left the operators: in each round a summary of what one engine's readings say of ``fleet`` and ``spread``, a
# mean, a precision and a skewness, and at the end its log likelihood at points that the server chose. Readings did not
# leave, nor did ``own``. A summary is not nothing: :doc:`/privacy` says what can be inferred from it.
#
# Forecasts
# ---------
#
# The comparison is every engine by itself. It is ``fedppl.one_shot.Separate()`` with a declaration that puts the
# fleet's wide prior on the engine's own coefficients.


def lonely(X, y):
    """One engine that knows no other."""
    with pm.Model(coords={"part": ["level", "slope", "curvature"]}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        own = pm.Normal("own", [80.0, -15.0, 0.0], [20.0, 15.0, 15.0], dims="part")
        noise = pm.HalfNormal("noise", 5.0)
        pm.Normal("margin", X @ own, noise, observed=y)
    return model


separate = fedppl.FederatedModel(lonely, shared=["own"])
alone = fedppl.fit(separate, engines, fedppl.one_shot.Separate(), progressbar=False, random_seed=1)

grid = np.linspace(0, OVERHAUL, 61)


def forecast(found, name):
    """Mean and 90 % interval (3, n) of the curve, without the noise of a reading."""
    own = found.client(name, draws=500, chains=2, random_seed=1)["posterior"]["own"].values.reshape(-1, 3)
    curve = own @ design(grid).T
    return np.stack([curve.mean(axis=0), *np.quantile(curve, [0.05, 0.95], axis=0)])


bands = {how: {name: forecast(found, name) for name in young} for how, found in (("alone", alone), ("fleet", fit))}
figure, axes = plt.subplots(2, 3, figsize=(10, 6), sharex=True, sharey=True, layout="constrained")
for name, axis in zip(young, axes.flat, strict=True):
    for color, how in (("C1", "alone"), ("C0", "fleet")):
        mean, low, high = bands[how][name]
        axis.fill_between(grid, low, high, color=color, alpha=0.25, lw=0, label=f"{how}, 90 % interval")
        axis.plot(grid, mean, color=color)
    axis.plot(grid, design(grid) @ truth[name], color="black", ls="--", lw=1, label="truth")
    axis.plot(engines[name]["X"][:, 1], engines[name]["y"], ".", color="0.35", ms=4, label="readings")
    axis.set(title=name, ylim=(20, 110))
figure.supxlabel("thousand flights since new")
figure.supylabel("margin of exhaust gas temperature, °C")
handles, labels = axes[0, 0].get_legend_handles_labels()
_ = figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)

# %%
# At the overhaul
# ---------------
#
# Error and interval of the margin at 1,500 flights.

print(f"{'':10}{'truth':>7} | {'alone':>7}{'90 % interval':>18} | {'fleet':>7}{'90 % interval':>18}")
for name in young:
    cells = []
    for how in ("alone", "fleet"):
        mean, low, high = bands[how][name][:, -1]
        cells.append(f"{mean:7.1f}{f'{low:.1f} to {high:.1f}':>18}")
    print(f"{name:10}{(design([OVERHAUL]) @ truth[name])[0]:7.1f} | {cells[0]} | {cells[1]}")

# %%
# An engine that is not part of the fleet's fit
# ---------------------------------------------
#
# A seventeenth operator joins later, with five readings. Nobody else is asked again: its posterior comes from the
# shared variables and its own readings.

flights = np.arange(0.0, 0.1, 0.02)
newcomer = {"X": design(flights), "y": design(flights) @ [88.0, -15.0, -7.0] + rng.normal(0, NOISE, len(flights))}
joined = fit.new_client(newcomer, draws=500, chains=2, random_seed=1)["posterior"]["own"].values.reshape(-1, 3)
low, high = np.quantile(joined @ design([OVERHAUL])[0], [0.05, 0.95])
print(f"margin at 1,500 flights: {low:.1f} to {high:.1f} °C (truth {design([OVERHAUL])[0] @ [88.0, -15.0, -7.0]:.1f})")

# %%
# What to take away
# -----------------
#
# - A young engine by itself knows its level and hardly its curvature, and its interval at the overhaul is too wide to
#   plan with. The fleet knows how engines wear; the interval is narrower and still holds the truth in the table above.
# - Extrapolation is as good as the curve that was declared. An interval knows of noise and of engines that differ, and
#   not of wear that follows another law: see the coverage on real engines in :doc:`/hm1`.
# - Here every engine is compared with one fleet. Where some engines resemble each other more than the rest,
#   ``fedppl.HM1()`` estimates how: :doc:`/hm1`. The model of this page is that of :doc:`/hm2`.
# - ``fedppl.one_shot.Separate()`` sends nothing and borrows nothing; it is the comparison to make first:
#   :doc:`/algorithms`.

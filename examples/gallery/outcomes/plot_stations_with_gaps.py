"""
How warm was it while a station was silent?
===========================================

Five weather stations on a coast measure the temperature of the air, and each has hours without a value. A curve through
a station's own values knows little of a gap of half a day. The stations see the same days and the same sea breeze, in
different proportions, and can tell each other that without exchanging their measurements.
"""

# %%
# Three days at five stations
# ---------------------------
#
# The data are simulated: a daily course and a slower change of the weather that all stations share, a sea breeze that
# comes on some days and cools the shore more than the land, and noise. There is a value each hour. Every station has a
# gap of fourteen hours on one of the days; what is missing is kept aside.

import functools

import matplotlib.pyplot as plt
import numpy as np

import fedppl
from fedppl.models import fedlmc_ss

rng = np.random.default_rng(6)
DAYS, STEP, NOISE = 3.0, 1 / 24, 0.3
hours = np.arange(0, DAYS, STEP)


def weather(days):
    """Three things that stations see: the sun, the front that passes, and the sea breeze."""
    sun = np.sin(2 * np.pi * (days - 0.38))
    front = 1.5 * np.tanh(3 * (days - 2.2)) + 0.4 * np.sin(1.7 * days)
    afternoons = ((0.62, 1.0), (1.58, 0.4), (2.65, 1.2))
    breeze = sum(force * np.exp(-0.5 * ((days - at) / 0.09) ** 2) for at, force in afternoons)
    return np.stack([sun, front, breeze])


mixture = {
    "Harbour": (3.0, -1.2, -3.5),
    "Pier": (2.4, -1.0, -4.5),
    "Airfield": (5.0, -1.8, -0.6),
    "Hill": (3.8, -2.2, -0.2),
    "Village": (4.4, -1.5, -1.8),
}
gaps = {
    "Harbour": (2.3, 2.9),
    "Pier": (0.45, 1.05),
    "Airfield": (1.3, 1.9),
    "Hill": (0.9, 1.5),
    "Village": (1.75, 2.35),
}
level = {name: 18.0 + rng.normal(0, 0.8) for name in mixture}
known, missing = {}, {}
for name, parts in mixture.items():
    celsius = level[name] + np.array(parts) @ weather(hours) + rng.normal(0, NOISE, len(hours))
    silent = (hours > gaps[name][0]) & (hours < gaps[name][1])
    known[name], missing[name] = (hours[~silent], celsius[~silent]), (hours[silent], celsius[silent])

# %%
# Each station by itself, and all together
# ----------------------------------------
#
# The declaration is `models/fedlmc_ss.py`: a station's curve is a sum of latent functions that all stations share, with
# coefficients of its own, and an indicator says whether a function is needed at all. Values are brought to unit scale
# by the mean and standard deviation of all stations, for which each sends a count, a sum and a sum of squares.

count, total, squares = np.sum([(len(y), y.sum(), (y**2).sum()) for _, y in known.values()], axis=0)
centre = total / count
unit = np.sqrt(squares / count - centre**2)
stations = {name: {"X": x, "y": (y - centre) / unit} for name, (x, y) in known.items()}


def declared(latents):
    """Curves on an inducing grid of one point in three hours."""
    builder = functools.partial(
        fedlmc_ss.unit,
        inducing=np.linspace(0, DAYS, 25),
        latents=latents,
        lengthscale=0.2,
        lengthscale_spread=0.5,
        noise_sd=0.1,
        noise_spread=1.0,
    )
    return fedppl.FederatedModel(builder, fedlmc_ss.SHARED)


together = fedppl.fit(
    declared(4), stations, fedppl.curves.Ascent(kernel_rate=0.1), rounds=60, progressbar=False, random_seed=1
)
print(together.status.value, "-", together.message)
print(fedppl.curves.selection(together).to_dataframe().round(3))

# %%
# The warning says that the bound still moves after the last round. That is common with coordinate ascent, whose last
# steps are small ones of the length-scales; predictions rest earlier. All four functions that were allowed are in use:
# they hold the three things of the simulation, in other mixtures, and the stations' different levels.
#
# What left the stations: in each round sums of squares and products from which the server can compute the station's
# coefficients, and with them its fitted curve. Measurements do not leave, but a smooth version of them does, as
# :doc:`/privacy` shows. Who cannot accept that uses ``fedppl.curves.Averaging()``, which sends no statistics of
# coefficients and fits worse.
#
# Filling the gaps
# ----------------
#
# The comparison is each station with a Gaussian process of its own, and a straight line across the gap. Single fits end
# after forty rounds, some with the same warning.

single = declared(1)
alone = {
    name: fedppl.fit(
        single, {name: own}, fedppl.curves.Ascent(kernel_rate=0.1), rounds=40, progressbar=False, random_seed=1
    )
    for name, own in stations.items()
}


def celsius(fit, name, days):
    """Mean and 90 % interval (3, n) of what the station would have measured."""
    said = fedppl.curves.predict(fit, name, {"X": days}, ci_prob=0.9)
    return np.stack([centre + unit * said[part].values for part in ("mean", "ci_low", "ci_high")])


print(
    f"RMSE in the gap, °C, and share of hours inside the 90 % interval\n{'':10}{'line':>6}{'alone':>14}{'together':>14}"
)
for name, (x, y) in missing.items():
    line = np.sqrt(np.mean((np.interp(x, *known[name]) - y) ** 2))
    cells = ""
    for fit in (alone[name], together):
        mean, low, high = celsius(fit, name, x)
        cells += f"{np.sqrt(np.mean((mean - y) ** 2)):8.2f} {np.mean((low < y) & (y < high)):5.2f}"
    print(f"{name:10}{line:6.2f}{cells}")

# %%

figure, axes = plt.subplots(len(stations), 1, figsize=(9, 10), sharex=True, layout="constrained")
grid = np.linspace(0, DAYS, 217)
for axis, name in zip(axes, stations, strict=True):
    axis.axvspan(*gaps[name], color="0.93", lw=0)
    for color, what, fit in (("C1", "alone", alone[name]), ("C0", "together", together)):
        mean, low, high = celsius(fit, name, grid)
        axis.fill_between(grid, low, high, color=color, alpha=0.2, lw=0, label=f"{what}, 90 % interval")
        axis.plot(grid, mean, color=color, lw=1)
    axis.plot(*known[name], ".", color="0.4", ms=3, label="known")
    axis.plot(*missing[name], "x", color="black", ms=4, label="missing, kept aside")
    axis.set(title=name, xlim=(0, DAYS))
axes[2].set_ylabel("temperature of the air, °C")
axes[-1].set_xlabel("days")
_ = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)

# %%
# What the stations share
# -----------------------
#
# The latent functions that were selected, and how much of each a station has.

used = np.flatnonzero(fedppl.curves.selection(together)["selected"].values)
curves = fedppl.curves.latent_curves(together, {"X": grid})["mean"].values
weights = fedppl.curves.coefficients(together)["expected"].values[:, used]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(2, 1), layout="constrained")
left.plot(grid, curves[used].T)
left.set(xlabel="days", ylabel="latent function, no unit", title="shared latent functions")
left.legend([f"function {number}" for number in used], frameon=False, fontsize=8)
size = np.abs(weights).max()
shown = right.imshow(weights, cmap="RdBu_r", vmin=-size, vmax=size, aspect="auto")
right.set(title="coefficients", xlabel="latent function")
right.set_yticks(range(len(stations)), list(stations))
right.set_xticks(range(len(used)), [str(number) for number in used])
_ = figure.colorbar(shown, ax=right)

# %%
# What to take away
# -----------------
#
# - The sea breeze in the gaps of Harbour and Pier is in nothing that these stations measured. Alone they bridge it by a
#   smooth day, with a wide interval; together they have it from each other. Where the day was smooth, a station alone
#   can be as close or closer, as the table has it for the Airfield, and its interval is wider.
# - What nobody else sees cannot be filled: an hour that is missing everywhere, or a breeze that only one station has.
#   Intervals of a variational posterior can be too narrow for that; on real stations they are: :doc:`/fedlmc_ss`.
# - Measurements stay, and a server learns the fitted curves all the same: :doc:`/privacy`.
# - The declaration, and what a new station does that never took part, is in :doc:`/curves`.

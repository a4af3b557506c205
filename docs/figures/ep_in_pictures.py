"""Draw the pictures of docs/ep_in_pictures.md, and write its numbers into it.

Two wards, one shared log-odds φ. Everything is computed on a grid of φ by NumPy alone, so that every line is what it
says; fedppl fits the same model, and the page compares the two.

    python docs/figures/ep_in_pictures.py
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[2]))

import fedppl

HERE = Path(__file__).parent
PAGE = HERE.parent / "ep_in_pictures.md"
WARDS = {"north": (8, 8), "south": (3, 4)}  # healed, patients
PRIOR_SD, OWN_SD = 3.0, 0.5
ROUNDS, MANY = 3, 30
STAGE = 512  # points of the first stage of `Sums()`, at least

GRID = np.linspace(-12.0, 18.0, 6001)
STEP = GRID[1] - GRID[0]
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(80)

COLORS = {
    "prior": "#7f7f7f",
    "factor": "#d55e00",
    "site": "#e69f00",
    "cavity": "#56b4e9",
    "tilted": "#009e73",
    "global": "#0072b2",
    "exact": "#000000",
}


class Normal(NamedTuple):
    """Kernel exp(linear φ − precision φ² / 2); a site's precision may be 0 or less."""

    linear: float
    precision: float

    @property
    def mean(self) -> float:
        """Where the kernel is largest."""
        return self.linear / self.precision

    @property
    def sd(self) -> float:
        """Of a kernel with a positive precision."""
        return float(self.precision**-0.5)


class Step(NamedTuple):
    """One client in one round."""

    site: Normal  # before
    cavity: Normal
    tilted: np.ndarray
    matched: Normal  # the Gaussian with the tilted distribution's moments
    proposed: Normal  # the site that it asks for


def times(a: Normal, b: Normal, sign: float = 1.0) -> Normal:
    """Product of two kernels, or their quotient."""
    return Normal(a.linear + sign * b.linear, a.precision + sign * b.precision)


def kernel(one: Normal) -> np.ndarray:
    """Values on the grid, the largest one being 1."""
    log = one.linear * GRID - 0.5 * one.precision * GRID**2
    return np.exp(log - log.max())


def density(values: np.ndarray) -> np.ndarray:
    """Divide by the integral."""
    return values / (values.sum() * STEP)


def moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and sd of a density on the grid."""
    mean = float((GRID * values).sum() * STEP)
    return mean, float(np.sqrt((((GRID - mean) ** 2) * values).sum() * STEP))


def factor(healed: int, patients: int) -> np.ndarray:
    """f(φ) = ∫ N(θ | φ, OWN_SD²) Binomial(healed | patients, logit⁻¹ θ) dθ up to a constant, by Gauss and Hermite."""
    theta = GRID[:, None] + OWN_SD * NODES
    log = -healed * np.logaddexp(0, -theta) - (patients - healed) * np.logaddexp(0, theta)
    values = np.exp(log) @ NODE_WEIGHTS
    return np.asarray(values / values.max())


def match(values: np.ndarray) -> Normal:
    """The Gaussian with the same mean and sd."""
    mean, sd = moments(values)
    return Normal(mean / sd**2, sd**-2.0)


def propagate(count: int) -> tuple[Normal, dict[str, np.ndarray], list[tuple[Normal, dict[str, Step]]], Normal]:
    """Prior, factors, each of `count` rounds' q and steps, and the q after the last one."""
    prior = Normal(0.0, PRIOR_SD**-2.0)
    factors = {name: factor(*counts) for name, counts in WARDS.items()}
    sites = dict.fromkeys(WARDS, Normal(0.0, 0.0))
    rounds = []
    for _ in range(count):
        q = prior
        for site in sites.values():
            q = times(q, site)
        steps = {}
        for name in WARDS:
            cavity = times(q, sites[name], -1.0)
            tilted = density(factors[name] * kernel(cavity))
            matched = match(tilted)
            steps[name] = Step(sites[name], cavity, tilted, matched, times(matched, cavity, -1.0))
        rounds.append((q, steps))
        sites = {name: step.proposed for name, step in steps.items()}
    last = prior
    for site in sites.values():
        last = times(last, site)
    return prior, factors, rounds, last


def ward(healed: Any, patients: Any) -> pm.Model:
    """The same model for fedppl."""
    with pm.Model() as model:
        healed, patients = pm.Data("healed", healed), pm.Data("patients", patients)
        phi = pm.Normal("phi", 0, PRIOR_SD)
        pm.Binomial("y", n=patients, logit_p=phi + OWN_SD * pm.Normal("theta", 0, 1), observed=healed)
    return model


def by_fedppl() -> tuple[list[fedppl.Fit], dict[str, Any]]:
    """Fits by EP, by EP with more points, and by sums; and what north was told and said first in each kind of round."""
    model = fedppl.FederatedModel(ward, shared=["phi"])
    data = {name: {"healed": np.array([h]), "patients": np.array([n])} for name, (h, n) in WARDS.items()}
    first: dict[str, Any] = {}

    def watched(algorithm: Any, kind_of: Callable[[Any], str]) -> Any:
        def update_client(client: Any, personal: Any, message: Any, rng: Any) -> Any:
            update = algorithm.update_client(client, personal, message, rng)
            if client.client_id == "north":
                first.setdefault(kind_of(message), (dict(message), dict(update.reply)))
            return update

        return algorithm._replace(update_client=update_client, batch=None)

    fits = [
        fedppl.fit(model, data, one, random_seed=1, progressbar=False)
        for one in (
            watched(fedppl.EP(), lambda told: "EP, warm start" if "point" in told else "EP, refinement"),
            fedppl.EP(local=fedppl.local.NestedLaplace(points=1024)),
            watched(fedppl.Sums(), lambda told: "sums, a stage" if len(told["points"]) >= STAGE else "sums, before"),
        )
    ]
    return fits, first


def axes_of(axes: Any, low: float = -5.0, high: float = 9.0) -> None:
    """No scale for heights: each line is scaled so that shapes can be compared."""
    axes.set_xlim(low, high)
    axes.set_ylim(0, None)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def line(axes: Any, values: np.ndarray, name: str, label: str, **more: Any) -> None:
    """One curve over the grid, in the color of what it is."""
    axes.plot(GRID, values, color=COLORS[name], label=label, **{"linewidth": 2.2, **more})


def save(figure: Any, name: str) -> None:
    """Write one picture."""
    figure.savefig(HERE / f"{name}.png", dpi=100, metadata={"Software": None})
    plt.close(figure)


def draw_pieces(prior: Normal, factors: dict[str, np.ndarray], q: Normal, step: Step) -> None:
    """One client's part of a round, in three panels."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    line(panels[0], density(kernel(q)), "global", "global q", linewidth=1.6)
    line(panels[0], density(kernel(step.cavity)), "cavity", "cavity: q without north's site")
    panels[0].set_title("1. take your site out of q", fontsize=11)
    top = density(kernel(step.cavity)).max()
    line(panels[1], density(kernel(step.cavity)), "cavity", "cavity")
    line(panels[1], factors["north"] * top, "factor", "north's factor (scaled)")
    line(panels[1], step.tilted, "tilted", "tilted: cavity × factor")
    panels[1].set_title("2. put your factor in its place", fontsize=11)
    line(panels[2], step.tilted, "tilted", "tilted")
    line(
        panels[2], density(kernel(step.matched)), "exact", "Gaussian of the same moments", linestyle="--", linewidth=1.6
    )
    site = kernel(step.proposed)
    line(panels[2], site * step.tilted.max(), "site", "new site (scaled)")
    panels[2].set_title("3. match moments, divide by the cavity", fontsize=11)
    for axes in panels:
        axes_of(axes)
        axes.set_ylim(0, 1.55 * axes.get_ylim()[1])
        axes.set_xlabel("φ, log-odds of healing")
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    save(figure, "ep_pieces")


def draw_rounds(
    prior: Normal, factors: dict[str, np.ndarray], rounds: list[Any], last: Normal, exact: np.ndarray
) -> None:
    """Rounds from top to bottom; clients, then q before and after."""
    figure, panels = plt.subplots(len(rounds), 3, figsize=(11, 8.2), layout="constrained", sharex=True)
    after = [q for q, _ in rounds[1:]] + [last]
    for row, ((q, steps), then) in enumerate(zip(rounds, after, strict=True)):
        for axes, (name, step) in zip(panels[row], steps.items(), strict=False):
            top = step.tilted.max()
            line(axes, factors[name] * 0.9 * top, "factor", "factor (scaled)", linewidth=1.6)
            if step.site.precision > 0:
                line(axes, kernel(step.site) * 0.9 * top, "site", "site before (scaled)", linewidth=1.6)
            line(axes, density(kernel(step.cavity)), "cavity", "cavity")
            line(axes, step.tilted, "tilted", "tilted")
            axes.set_title(f"round {row + 1}: {name}", fontsize=11)
        axes = panels[row, 2]
        line(axes, density(kernel(q)), "global", "q before", linestyle=":", linewidth=1.8)
        line(axes, density(kernel(then)), "global", "q after")
        line(axes, exact, "exact", "exact posterior", linestyle="--", linewidth=1.4)
        axes.set_title(f"round {row + 1}: global approximation", fontsize=11)
        for axes in panels[row]:
            axes_of(axes)
            axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    found = dict(
        pair[::-1]
        for axes in (panels[1, 0], panels[1, 2])
        for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    )
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=7, frameon=False, fontsize=9.5)
    for axes in panels[-1]:
        axes.set_xlabel("φ, log-odds of healing")
    save(figure, "ep_rounds")


def draw_exact(q: Normal, exact: np.ndarray, by_sums: fedppl.Fit) -> None:
    """The exact posterior, q, and draws by sums; and the ratio of the two densities."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    draws = by_sums.idata["posterior"]["phi"].to_numpy().ravel()
    left.hist(draws, bins=np.arange(-5, 10, 0.25), density=True, color="#cccccc", label="draws of Sums()")
    line(left, density(kernel(q)), "global", "q, Gaussian")
    line(left, exact, "exact", "exact, by quadrature", linestyle="--", linewidth=1.6)
    axes_of(left, -3.5, 6.0)
    left.legend(loc="upper left", frameon=False, fontsize=9)
    left.set_ylim(0, 1.3 * left.get_ylim()[1])
    left.set_title("what the Gaussian leaves out", fontsize=11)
    ratio = exact / density(kernel(q))
    seen = np.abs(GRID - q.mean) < 3.6 * q.sd
    right.plot(GRID[seen], ratio[seen], color=COLORS["tilted"], linewidth=2.2)
    right.axhline(1, color=COLORS["prior"], linewidth=1)
    for many in (-2, 2):
        right.axvline(q.mean + many * q.sd, color=COLORS["global"], linestyle=":", linewidth=1.4)
    right.set_yscale("log")
    right.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    right.minorticks_off()
    right.set_ylim(0.08, 6)
    right.set_xlim(-3.5, 6.0)
    right.spines[["top", "right"]].set_visible(False)
    right.set_title("posterior density over q's (dotted: q's mean ± 2 sd)", fontsize=11)
    for axes in (left, right):
        axes.set_xlabel("φ, log-odds of healing")
    save(figure, "ep_exact")


def tail(values: np.ndarray) -> tuple[float, float]:
    """Quantiles 3 % and 97 % of a density on the grid."""
    total = np.cumsum(values) * STEP
    return float(np.interp(0.03, total, GRID)), float(np.interp(0.97, total, GRID))


def table_of_rounds(rounds: list[Any], last: Normal, exact: np.ndarray) -> str:
    """Moments of q and of the sites, a line a round."""
    lines = ["| after round | q: mean, sd | north's site: mean, sd | south's site: mean, sd |", "|---|---|---|---|"]
    lines.append(f"| 0 | {rounds[0][0].mean:.3f}, {rounds[0][0].sd:.3f} | none yet | none yet |")
    after = [q for q, _ in rounds[1:]] + [last]
    for number, (q, (_, steps)) in enumerate(zip(after, rounds, strict=True), 1):
        sites = " | ".join(f"{step.proposed.mean:.3f}, {step.proposed.sd:.3f}" for step in steps.values())
        lines.append(f"| {number} | {q.mean:.3f}, {q.sd:.3f} | {sites} |")
    mean, sd = moments(exact)
    fixed = propagate(MANY)[-1]
    lines.append(f"| {MANY} | {fixed.mean:.3f}, {fixed.sd:.3f} | | |")
    return "\n".join([*lines, f"| exact posterior | {mean:.3f}, {sd:.3f} | | |"])


def table_of_answers(fits: list[fedppl.Fit], exact: np.ndarray) -> str:
    """Mean, sd and outer quantiles by each way."""
    q, finer = (Normal(float(one.posterior.linear[0]), float(one.posterior.precision[0, 0])) for one in fits[:2])
    table = fits[2].summary(ci_prob=0.94).loc["phi"]
    rows = {
        f"this script, {MANY} rounds": propagate(MANY)[-1],
        "`EP()`": q,
        "the same with `local=NestedLaplace(points=1024)`": finer,
        "`Sums()`": tuple(table[name] for name in ("mean", "sd", "ci_low", "ci_high")),
        "exact, by quadrature": (*moments(exact), *tail(exact)),
    }
    lines = ["| | mean | sd | 3 % | 97 % |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        if isinstance(row, Normal):
            row = (*moments(density(kernel(row))), *tail(density(kernel(row))))
        lines.append(f"| {name} | " + " | ".join(f"{one:.3f}" for one in row) + " |")
    return "\n".join(lines)


def messages(seen: dict[str, Any]) -> str:
    """What north was told and said, as printed."""
    lines = ["```text"]
    for kind in ("EP, warm start", "EP, refinement", "sums, a stage"):
        told, said = seen[kind]
        lines.append(f"{kind}")
        for who, message in (("to north", told), ("from north", said)):
            for name, value in message.items():
                flat = np.ravel(value)
                shown = ", ".join(f"{one:.4g}" for one in flat[:4]) + (
                    f", ... ({flat.size} numbers)" if flat.size > 4 else ""
                )
                lines.append(f"  {who:10s}  {name:18s} {shown}")
    return "\n".join([*lines, "```"])


def put(text: str, name: str, part: str) -> str:
    """Replace what stands between two markers."""
    pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
    found, count = re.subn(pattern, lambda marks: marks[1] + part + marks[2], text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{PAGE.name} has the markers of {name!r} {count} times; it has to have them once.")
    return found


def digest() -> str:
    """SHA-256 of this script, of its text."""
    return hashlib.sha256(Path(__file__).read_text(encoding="utf-8").encode()).hexdigest()


def main() -> None:
    """Draw, write the numbers, and note what drew them."""
    matplotlib.use("Agg")
    prior, factors, rounds, last = propagate(ROUNDS)
    exact = density(kernel(prior) * factors["north"] * factors["south"])
    fits, seen = by_fedppl()
    draw_pieces(prior, factors, rounds[1][0], rounds[1][1]["north"])
    draw_rounds(prior, factors, rounds, last, exact)
    draw_exact(propagate(MANY)[-1], exact, fits[2])
    text = PAGE.read_text(encoding="utf-8")
    text = put(text, "rounds", table_of_rounds(rounds, last, exact))
    text = put(text, "answers", table_of_answers(fits, exact))
    PAGE.write_text(put(text, "messages", messages(seen)), encoding="utf-8")
    (HERE / "ep_in_pictures.sha256").write_text(digest() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

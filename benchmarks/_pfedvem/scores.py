"""What is told of fits: numbers of each, differences, and the bars."""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import pandas as pd


def ends_of(options: argparse.Namespace) -> list[int]:
    """Rounds after which PM is evaluated."""
    between = range(options.every, options.rounds, options.every) if options.every else ()
    return [*between, options.rounds]


def is_scored(number: int, options: argparse.Namespace) -> bool:
    """Whether the global model is scored in this round."""
    return number % options.score_every == 0 or number > options.rounds - 10


def figures(found: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """One fit in numbers, per cent."""
    row: dict[str, float] = {}
    last = found["PM"].get(str(options.rounds))
    if last is not None:
        sizes = found["sizes"]
        order = sorted(sizes, key=sizes.__getitem__)
        row["PM"] = float(np.mean(list(last.values())))
        row["smallest 10 %"] = float(np.mean([last[k] for k in order[: math.ceil(len(order) / 10)]]))
        quarters = np.array_split(np.array([last[k] for k in order]), 4)
        row |= {f"quarter {i}": float(np.mean(part)) for i, part in enumerate(quarters, 1)}
    curve, averaged = (
        [v for _, v in sorted((int(k), v) for k, v in found.get(n, {}).items())] for n in ("GM", "GM averaged")
    )
    if curve:
        row |= {"GM last": curve[-1], "GM last 10": float(np.mean(curve[-10:]))}
        if averaged:
            row["averaged"] = float(np.mean(averaged[-10:]))
        wanted = [str(n) for n in range(1, options.rounds + 1) if is_scored(n, options)]
        if set(wanted) <= set(found["GM"]):  # a kept fit may have been scored in fewer rounds
            row["GM best (on test)"] = max(found["GM"][n] for n in wanted)
    row["CPU s"] = found["seconds"]
    if "cluster" in found:
        chosen = [value for last in found["cluster"].values() for value in last]
        row["clients in the larger cluster"] = float(np.max(np.unique(chosen, return_counts=True)[1]))
    if "failed" in found:  # replies of all rounds
        row["failed"] = found["failed"]
    return row


def paired(seeds: pd.DataFrame) -> list[str]:
    """Differences of pFedVEM to the other personal methods, over seeds."""
    lines = []
    for column in ("PM", "smallest 10 %"):
        wide = seeds.pivot(index="seed", columns="method", values=column).dropna(axis=1)
        if "pFedVEM" in wide:
            for name in wide.columns.drop("pFedVEM"):
                apart = wide["pFedVEM"] - wide[name]
                sem = apart.std() / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
                lines.append(f"{column}: pFedVEM - {name} {apart.mean():+.2f} ± {sem:.2f} (standard error, paired)")
    return lines


def bars(table: pd.DataFrame, seeds: pd.DataFrame, options: argparse.Namespace) -> list[tuple[str, bool]]:
    """What pFedVEM must reach on Fashion-MNIST with 50 clients, as far as the methods that ran can tell."""
    asked = (options.dataset, options.clients, options.cuts) == ("fmnist", 50, "same") and options.rounds >= 100
    asked = asked and not options.validation and not options.settings and options.total is None
    if not asked or "pFedVEM" not in table.index:
        return []
    row, found = table.loc["pFedVEM"], []
    found.append((f"PM {row['PM']:.2f}, at least 91.5", row["PM"] >= 91.5))
    if "FedPer" in table.index:
        apart = row["PM"] - table.loc["FedPer", "PM"]
        found.append((f"PM {apart:+.2f} against FedPer, at least -0.3", apart >= -0.3))
    found.append((f"GM, mean of the last 10 rounds, {row['GM last 10']:.2f}, at least 75", row["GM last 10"] >= 75))
    if "FedAvg" in table.index:
        other = table.loc["FedAvg", "GM last 10"]
        found.append((f"GM last 10 {row['GM last 10']:.2f}, above FedAvg's {other:.2f}", row["GM last 10"] > other))
    for name in ("pFedVEM, ledger", "pFedVEM, steadied"):
        if name in table.index:
            value = table.loc[name, "GM last 10"]
            found.append((f"stretch: GM last 10 of {name} {value:.2f}, above 83.9", value > 83.9))
    return [(text, bool(met)) for text, met in found]

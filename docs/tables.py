"""Write the tables of docs/scale.md from the lines that benchmarks have left in benchmarks/results.

python docs/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
PAGE = HERE / "scale.md"
_OUTCOMES = {"binary": "binary", "gaussian": "Gaussian"}


def runs(benchmark: str) -> list[dict[str, Any]]:
    """All kept runs of a benchmark, in the order of their files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{benchmark}-*.json"))]


def _when(run: dict[str, Any]) -> str:
    return f"`{run['command']}`, {run['date']}, commit {run['commit']}, {run['cores']} cores"


def _beside(one: dict[str, Any]) -> str:
    said = []
    for peer, name in (("nutpie", "nutpie"), ("glmer", "glmer")):
        if peer not in one:
            continue
        theirs, against = one[peer], one[f"against_{peer}"]
        text = f"{name} {theirs['cpu_s']:.1f} CPU-s"
        if "compile_cpu_s" in theirs:
            text += f" and {theirs['compile_cpu_s']:.1f} of compiling"
        low, high = against["r"]
        text += f": z {against['z']:.3f}, r {low:.3f} to {high:.3f}"
        if "groups" in against:
            of = against["groups"]
            text += f"; groups z {of['z_rms']:.3f} (root mean square), r {of['r'][0]:.2f} to {of['r'][-1]:.2f}"
        said.append(text)
    return ". ".join(said)


def scale() -> str:
    """A table for each run of benchmarks/scale.py."""
    parts = []
    for run in runs("scale"):
        lines = [
            _when(run),
            "",
            "| groups | fit, CPU-s (first, second) | all groups' means and sds, CPU-s | memory | status | beside it |",
            "|---|---|---|---|---|---|",
        ]
        for count, one in run["result"]["sizes"].items():
            ours = one["fedppl"]
            second = f"{ours['warm']['cpu_s']:.1f}" if "warm" in ours else "-"
            lines.append(
                f"| {int(count):,} | {ours['first']['cpu_s']:.1f}, {second} | {ours['clients']['cpu_s']:.1f} | "
                f"{ours['peak_gb']:.1f} GB | {ours['status']} | {_beside(one)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def duel() -> str:
    """A table for each run of benchmarks/duel.py."""
    parts = []
    for run in runs("duel"):
        lines = [_when(run), "", "| groups | outcome | package | CPU-s | memory | tau |", "|---|---|---|---|---|---|"]
        for count, outcomes in run["result"]["sizes"].items():
            for outcome, ways in outcomes.items():
                for way, one in ways.items():
                    where = f"| {int(count):,} | {_OUTCOMES[outcome]} | {way}"
                    if "failed" in one:
                        lines.append(f"{where} | failed | | |")
                        continue
                    cpu = f"{one['cpu_s']:.2f}"
                    cpu += f" (first {one['first_cpu_s']:.1f})" if "first_cpu_s" in one else ""
                    sd = f" (sd {one['sd']['tau']:.4f})" if "sd" in one else ""
                    lines.append(f"{where} | {cpu} | {one['peak_gb']:.1f} GB | {one['mean']['tau']:.4f}{sd} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def written(page: str) -> str:
    """The page with its tables as the kept lines have them."""
    for name, made in {"scale": scale(), "duel": duel()}.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
        part = made
        page, count = re.subn(pattern, lambda marks, part=part: marks[1] + part + marks[2], page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE.name} has the markers of {name!r} {count} times; it has to have them once.")
    return page


def main() -> None:
    """Write the page."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

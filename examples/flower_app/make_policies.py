"""Write a policy for every clinic: what its owner allows, whoever runs the server.

python make_policies.py "$WORK/policies"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from make_data import CLINICS

POLICY = """\
# What the owner of {name}'s data allows. What is not here keeps the default of fedppl.Policy: sums over three sites or
# more, under masks, of 250 patients together, ...
requests = 120           # most that are ever answered; the README has several runs, and one takes about ten
# approval = "runs.txt"  # a file with the names of the runs that somebody has approved, beside this one
"""


def main(argv: list[str] | None = None) -> None:
    """Write one file a clinic."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in CLINICS:
        (folder / f"{name}.toml").write_text(POLICY.format(name=name))
        print(folder / f"{name}.toml")


if __name__ == "__main__":
    main()

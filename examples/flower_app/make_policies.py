"""Write a policy for every clinic: what its owner allows, whoever runs the server.

python make_policies.py "$WORK/policies"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from make_data import CLINICS

POLICY = """\
# What the owner of {name}'s data allows. What is not here keeps the default of fedppl.Policy, which is stricter: these
# clinics have few patients, whose effects are not shared, and they trust the server with ten runs.
sums = "optional"         # EP needs single replies; by default a policy wants sums under masks
rows = 20                 # smallest number of patients
parameters_per_row = 0.25 # most shared coordinates per patient; this model shares 6
requests = 120            # most requests that are ever answered
distance = 10.0           # how far from the prior a point may lie, in prior sds
# epsilon = 2.0           # a total privacy budget: then only PrivateEP is answered
# approval = "runs.txt"   # a file with the names of the runs that somebody has approved, beside this one
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

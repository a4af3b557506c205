"""The same declaration with the embedded engine, all clinics in this process: for trying things out.

python local.py "$WORK/data"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from clinics.declaration import ALGORITHM, MODEL, load_csv

import fedppl


def main(argv: list[str] | None = None) -> None:
    """Fit, and print what the server of the deployment prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    options = parser.parse_args(argv)
    clinics = {path.stem: load_csv(path) for path in sorted(options.data.glob("*.csv"))}
    engine = fedppl.InProcess(secure=True, policy=fedppl.Policy())
    fit = fedppl.fit(MODEL, clinics, ALGORITHM, engine=engine, random_seed=1, progressbar=False)
    print(f"{fit.status.value} after {len(fit.records)} rounds {fit.message}")
    print(fit.summary(["mu", "tau"], round_to=3).to_string())
    q = fit.posterior
    print(json.dumps({"status": fit.status.value, "linear": q.linear.tolist(), "precision": q.precision.tolist()}))


if __name__ == "__main__":
    main()

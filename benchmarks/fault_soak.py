"""What is left of a run when messages are lost, doubled and spoilt and clients are wiped.

EP on the hierarchical regression of tests/support/problems.py (Example 4.1 of FedLin, three shared coordinates),
answered through an engine that injects faults: each request and each reply is lost with probability 0.3, a reply is
doubled (the copy answers the next request too) or altered (NaN, wrong shapes and names, absurd sizes, ...) with 0.05
each, and a client loses its state, its model and its reply with 0.03. The largest entry of q − prior − Σ sites over
all rounds says whether the ledger held; the last q is set against a run without faults.

    python benchmarks/fault_soak.py --rounds 1000
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from tests.support import problems
from tests.support.faults import SOAK, soak


def main() -> None:
    """Soak once, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rows", type=int, default=25, help="rows of the first client; each next one has 3 more")
    parser.add_argument("--points", type=int, default=64, help="points of the nested Laplace approximation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # one line per fault is what is wanted elsewhere
    problem = problems.noise(options.clients, rows=options.rows)
    found = soak(problem, fedppl.local.NestedLaplace(points=options.points), options.rounds, seed=options.seed)
    print(f"{'fault':15s}{'rate':>7s}{'times':>8s}")
    for fault, rate in SOAK._asdict().items():
        if rate:
            print(f"{fault:15s}{rate:7.2f}{found.counts[fault]:8d}")
    print(f"replies used: {found.used} of {found.exchanges} in {found.rounds} rounds, {found.seconds:.1f} s")
    print(f"largest |q - prior - sum of sites|: {found.ledger_gap:.1e}")
    print(f"from the run without faults: mean {found.mean_gap:.1e} sd, log sd {found.sd_gap:.1e}")
    figures = found._asdict() | {"counts": dict(found.counts), "clients": options.clients}
    print(json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()

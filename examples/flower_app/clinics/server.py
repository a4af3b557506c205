"""The server's app: it sees sums over the clinics, and writes the shared posterior to a file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
from flwr.app import Context

import fedppl
from clinics.declaration import ALGORITHM, MODEL, PREDICTORS

logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
logging.getLogger("fedppl").setLevel(logging.INFO)


def report(fit: fedppl.Fit, context: Context) -> None:
    """Print the shared posterior, and keep it where the run config says."""
    print(f"{fit.status.value} after {len(fit.records)} rounds {fit.message}")
    print(fit.summary(["mu", "tau"], round_to=3).to_string())
    q = fit.posterior
    figures = {
        "status": fit.status.value,
        "rounds": len(fit.records),
        "clients": list(fit.client_ids),
        "failures": [dict(record.failures) for record in fit.records],
        "seconds": [round(record.seconds, 2) for record in fit.records],
        "linear": q.linear.tolist(),
        "precision": q.precision.tolist(),
    }
    if folder := context.run_config["results"]:
        Path(str(folder)).mkdir(parents=True, exist_ok=True)
        fit.idata.to_netcdf(str(Path(str(folder)) / "shared.nc"), engine="h5netcdf")
        (Path(str(folder)) / "fit.json").write_text(json.dumps(figures))


# Made up, in the form of a clinic's data: from them the server knows the model by itself and believes no site about it.
EXAMPLE = {"X": np.ones((4, len(PREDICTORS))), "y": np.arange(4.0)}

app = fedppl.Flower.server_app(
    MODEL, ALGORITHM, clients=3, example_data=EXAMPLE, secure=True, random_seed=1, on_fit=report
)

"""A clinic's app. Node config: data (path of its CSV file), policy (what it allows), folder (its log and posterior)."""

from __future__ import annotations

import logging

import fedppl
from clinics.declaration import ALGORITHM, MODEL, load_csv
from clinics.place import place

logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
logging.getLogger("fedppl").setLevel(logging.INFO)

app = fedppl.Flower.client_app(
    MODEL,
    ALGORITHM,
    load_data=lambda config: load_csv(place(config)["data"]),
    client_id=lambda config: str(place(config).get("client-id", "")),  # at a site the name that its key has
    folder=lambda config: place(config)["folder"],
    policy=lambda config: place(config).get("policy"),  # without one, the default, which wants sums under masks
)

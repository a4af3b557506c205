"""A clinic's app. Node config: data (path of its CSV file), policy (what it allows), folder.

The folder holds all that is the clinic's own: identity and roster, site.sqlite, its posterior.
"""

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
    folder=lambda config: place(config)["folder"],
    policy=lambda config: place(config)["policy"],
    secure=lambda config: place(config)["folder"],  # identity, whose name is the client's id, and roster
)

"""What Flower starts at a site, anew for every message: a warm worker answers, which imports `five_sites` once."""

from __future__ import annotations

import fedppl

app = fedppl.Flower.warm_app(
    "five_sites:site", folder=lambda config: config["folder"], idle=lambda config: float(config["warm"])
)

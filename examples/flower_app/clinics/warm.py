"""What Flower starts at a clinic: a warm worker answers where the node config has warm=SECONDS, else `clinics.site`.

Nothing that takes long to import may stand here: Flower starts this anew for every message.
"""

from __future__ import annotations

import logging

import fedppl
from clinics.place import place

logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
logging.getLogger("fedppl").setLevel(logging.INFO)

app = fedppl.Flower.warm_app(
    "clinics.site:app",
    folder=lambda config: place(config)["folder"],
    idle=lambda config: float(config.get("warm", 0)),  # seconds that the worker waits; 0 is none
)

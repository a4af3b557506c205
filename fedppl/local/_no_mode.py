"""What to say where a client's local variables have no mode: read off where the search for it ended."""

from __future__ import annotations

import numpy as np

from fedppl.contracts import ClientView
from fedppl.numerics.pairs import inner_mode_at, site_batch
from fedppl.types import Array

# Beyond this a log density has no digits left for the differences that a search goes by.
_BEYOND = 1e12
# A scale that the search left this much smaller, e^-4 = .02 times where it began, is on its way to zero.
_SHRUNK = -4.0


def no_mode(client: ClientView, phi: Array) -> str:
    """Why the inner search found no mode at φ (m,), with a remedy; names variables and no numbers of the client's."""
    _, theta = inner_mode_at(client.kernel, phi, client.initial, client.packed)
    value = site_batch(client.kernel, np.concatenate([phi, theta])[None], client.packed)[0]
    moved = np.where(["_log__" in label for label in client.local_labels], theta - client.initial, 0.0)
    if not np.isfinite(value):
        why = (
            "the log density there is not a number. Look for outcomes outside of what their distribution allows, and "
            "for parameters that can leave their domain"
        )
    elif not value > -_BEYOND:
        why = (
            "the log density there is implausibly large. The data are on another scale than the priors: rescale the "
            "outcome, or widen the priors"
        )
    elif np.min(moved, initial=0.0) < _SHRUNK:
        name = client.local_labels[int(np.argmin(moved))].replace("_log__", "")
        why = (
            f"{name} goes to 0, as where outcomes are constant or fit exactly, or where a scale has a single value. "
            f"Check this client's outcomes, or declare a prior that keeps {name} from 0, such as pm.InverseGamma"
        )
    else:
        why = (
            "the local posterior may be flat there, or have its peak at a kink, as |θ| and pm.Laplace have one. Give θ "
            "a proper prior and a smooth density, or use EP(local=fedppl.NUTS())"
        )
    return f"the inner search found no mode of θ at φ = {np.array2string(phi, precision=3)}: {why}"

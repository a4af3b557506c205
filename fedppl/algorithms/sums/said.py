"""What is said of a posterior that weighing does not tell, and what helps."""

from __future__ import annotations

BY_NUTS = "fedppl.EP(local=fedppl.NUTS(draws=4000))"


def nowhere() -> str:
    """Where the posterior is was not found by weighing."""
    return (
        "about the mode too few points count to tell means and sds: tails are heavy, or few points have a log density "
        "at all clients. Declare the model so that it has a smooth density everywhere and priors with lighter tails, "
        f"use fedppl.EP(), or {BY_NUTS}"
    )


def unreached(share: float, most: float) -> str:
    """A client has no value at a share of the points."""
    return (
        f"means and sds may be wrong: at {share:.1%} of the points (at most {most:.0%}) a client has no log density, "
        "or its integral over the client's own variables was not found. Declare the model so that it has a smooth "
        f"density everywhere, with no bound of an outcome's support among the shared variables; or use {BY_NUTS}"
    )

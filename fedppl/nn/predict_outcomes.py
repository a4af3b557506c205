r"""Predicted outcomes of a network whose likelihood is computed as it is declared.

.. math:: E[y] = E_f\, E[y \mid f], \qquad f \sim N(f(x), \Sigma(x))
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedppl.nn.declared import Declared
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DataError

_EACH = 10  # draws of an outcome for each of outputs


def require_as_many(others: Mapping[str, Array], rows: int) -> None:
    """Refuse what the likelihood reads beside the network where it has another number of rows."""
    wrong = {name: len(value) for name, value in others.items() if value.ndim and len(value) != rows}
    if wrong:
        raise DataError(f"new inputs have {rows} rows, and {wrong}; give as many rows of each.")


def outcomes_at(
    unit: NetworkUnit,
    others: Mapping[str, Array],
    outputs: Array,
    covariance: Array,
    draws: int,
    ci_prob: float,
    rng: np.random.Generator,
) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """Means, sds and intervals of outcomes, or probabilities of classes, with dims of each.

    Parameters
    ----------
    unit
        The client.
    others
        What the likelihood reads of the new rows beside outputs, by name.
    outputs, covariance
        Of the network with unknowns of the likelihood, (n, C + e) and (n, C + e, C + e).
    draws
        Of outputs; one alone where they are known.
    ci_prob
        Of the intervals.
    rng
        Draws.

    Raises
    ------
    DataError
        Where outcomes cannot be drawn.
    """
    likelihood = unit.likelihood
    assert isinstance(likelihood, Declared)
    functions, count = likelihood.drawn(), likelihood.outputs
    variance = np.diagonal(covariance, axis1=1, axis2=2)[:, :count].copy()
    is_known = not np.any(covariance)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
    means, drawn = [], []
    for _ in range(1 if is_known else draws):
        at = outputs + np.einsum("ncd,nd->nc", root, rng.normal(size=outputs.shape))
        try:
            if functions.mean is not None:
                means.append(functions.mean(at, others))
            if likelihood.kind != "categorical":
                drawn += [functions.draw(at, others, rng) for _ in range(_EACH * (draws if is_known else 1))]
        except Exception as error:
            raise DataError(
                f"outcomes ({likelihood.kind}) cannot be drawn at the new inputs ({type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0]}); look at the size of inputs and at what the likelihood "
                "reads beside them, and give pm.CustomDist a random=."
            ) from error
    found = {"output_mean": outputs[:, :count], "output_variance": variance}
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(found, ("row", "output"))
    if likelihood.kind == "categorical":
        return {"probability": np.mean(means, axis=0), **found}, {"probability": ("row", "class"), **dims}
    ends = np.quantile(drawn, [0.5 - ci_prob / 2, 0.5 + ci_prob / 2], axis=0)
    own = ("row", *(f"outcome_{axis}" for axis in range(1, ends[0].ndim)))
    told = {"ci_low": ends[0], "ci_high": ends[1]}
    if functions.has_moments:
        told = {"mean": np.mean(means or drawn, axis=0), "sd": np.std(drawn, axis=0), **told}
    dims |= dict.fromkeys(told, own)
    if likelihood.kind == "bernoulli":  # as of two classes
        told["probability"] = np.stack([1.0 - told["mean"], told["mean"]], axis=-1)
        told["sd"] = np.sqrt(told["mean"] * (1.0 - told["mean"]))
        dims["probability"] = (*own, "class")
    return {**told, **found}, dims

"""A client's own network when the rounds are over: fine-tuned, with a subnetwork's posterior, and its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import xarray as xr
from scipy.special import ndtr, softmax
from scipy.stats import norm

from fedppl.contracts import Point
from fedppl.contracts.printed import CI_PROB
from fedppl.model.client import ClientModel
from fedppl.nn.functional import host, reason
from fedppl.nn.likelihood import Categorical, Declared, Normal
from fedppl.nn.subnet import output_covariance
from fedppl.nn.unit import NetworkUnit, outputs
from fedppl.nn.view import NetworkResult, Own, network_of
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.fit import Fit
from fedppl.results.predicting import new_inputs
from fedppl.settings import a_fit, between, one_of, some_of, whole
from fedppl.types import Array, DataError, DeclarationError, LocalFailure, Rng

_ROWS = 4096  # predicted at once, with covariances of their outputs and draws in memory


def personalise(fit: Fit, client: str | Mapping[str, Any], *, random_seed: int | None = None) -> Own:
    """A client's own network: fine-tuned, and with the posterior of a subnetwork, as the algorithm has them.

    Parameters
    ----------
    fit
        A fit of networks, by ``fedppl.nn.FedSI()``, ``fedppl.nn.FedAvg()`` or others that share weights of them.
    client
        A client's id; or data of a new client, which uses the shared weights of the fit alone.
    random_seed
        Seed of the order of the rows; by default the fit's.

    Returns
    -------
    Own
        Weights and, with FedSI, the subnetwork's posterior. Give it to `predict`; it saves the work of a second call.

    Raises
    ------
    DeclarationError, DataError
        For a client that is not known or not here, a fit by another algorithm, or data that do not fit the model.
    LocalFailure
        Where fine-tuning diverges.

    Examples
    --------
    >>> import functools, fedppl, numpy as np, torch
    >>> from fedppl.models import fedsi
    >>> builder = functools.partial(fedsi.classifier, net=torch.nn.Linear(2, 2))
    >>> clients = {name: {"X": np.eye(2), "y": np.array([0, 1])} for name in "ab"}
    >>> model = fedppl.FederatedModel(builder, shared=["weight", "bias"])
    >>> fit = fedppl.fit(model, clients, fedppl.nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    >>> fedppl.nn.personalise(fit, "a").weights.shape
    (6,)

    Notes
    -----
    *When this fails.* With few rows, fine-tuning overfits: compare with the global model on rows that were held out. A
    new client's own layers start where those of all clients do. By an algorithm without a posterior of weights
    ``subnetwork`` is None, and predictions take the weights for known.
    """
    a_fit(fit)
    seed = _seed(fit, random_seed)
    if client is None or isinstance(client, str):
        if client not in fit.clients:
            raise DeclarationError(
                f"client {client!r} is not here, but {some_of(fit.clients)}; pass data, or take fedppl.nn.network(fit)."
            )
        model, name, personal = fit.clients[client], client, fit.personal.get(client)
    else:
        name, personal = "new client", None
        model = fit.declaration.enrol({name: client}, kernel=False)[name]
        if model.layout.fingerprint != fit.layout.fingerprint:
            raise DeclarationError("the new client shares other variables than the fit; give it the same columns.")
    family = fit.algorithm.result.family
    if not isinstance(family, NetworkResult):
        raise DeclarationError(f"the fit is of {fit.algorithm.name}, which fits no networks; see fedppl.nn.FedSI.")
    message = fit.algorithm.result.final_message(fit.state, name)
    try:
        return family.personalise(model, personal, message, stream((seed, 2, *name.encode())))
    except LocalFailure as error:
        raise LocalFailure(f"client {name!r} gets no network of its own: {error}.") from error


def network(fit: Fit) -> torch.nn.Module:
    """The global model: a copy of the declared network that holds the shared weights of a fit.

    Parameters
    ----------
    fit
        A fit of a network in this process.

    Returns
    -------
    torch.nn.Module
        In torch's default type. Local weights are those that all clients start from.

    Raises
    ------
    DeclarationError
        For what is no fit, a fit that has no shared point of a network, or one whose clients are elsewhere.

    Examples
    --------
    >>> import functools, fedppl, numpy as np, torch
    >>> from fedppl.models import fedsi
    >>> builder = functools.partial(fedsi.classifier, net=torch.nn.Linear(2, 2))
    >>> clients = {name: {"X": np.eye(2), "y": np.array([0, 1])} for name in "ab"}
    >>> model = fedppl.FederatedModel(builder, shared=["weight", "bias"])
    >>> fit = fedppl.fit(model, clients, fedppl.nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    >>> fedppl.nn.network(fit)
    Linear(in_features=2, out_features=2, bias=True)

    Notes
    -----
    *When this fails.* Where layers are local, those of the copy are untrained, and its outputs are no client's: use
    `personalise`. It is a point, without the weights' uncertainty.
    """
    a_fit(fit)
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Point) or not isinstance(fit.algorithm.result.family, NetworkResult):
        raise DeclarationError(
            f"the fit is of {fit.algorithm.name}, which has no one network of all clients; see fedppl.nn.personalise."
        )
    if not fit.clients:
        raise DeclarationError(
            "no client of this fit is here; load it with clients=..., or put fit.estimate into your network."
        )
    unit = next(iter(fit.clients.values())).view(network_of)
    return unit.loaded(unit.weights(shared.estimate(fit.state)))


def predict(
    fit: Fit,
    client: str | Mapping[str, Any] | Own,
    inputs: Mapping[str, Any] | pd.DataFrame,
    *,
    link: str = "scaled",
    draws: int = 100,
    ci_prob: float = CI_PROB,
    random_seed: int | None = None,
) -> xr.Dataset:
    r"""Predict a client's outcomes at new inputs by its own, linearised network.

    .. math:: \mathrm{softmax}(\kappa f(x)), \qquad \kappa = (1 + \tfrac{\pi}{8} \bar s^2(x))^{-1/2}, \qquad
              \Sigma(x) = J_S(x)\, \hat H_S^{-1} J_S(x)^\top

    s̄² is the mean variance of f_c − f_c' over pairs of classes. Like the probabilities it does not change when all
    outputs move together; the most probable class stays the same; with two classes it is MacKay's formula.

    Parameters
    ----------
    fit, client
        As in `personalise`, or what that returned.
    inputs
        New inputs by name, for example ``{"X": X_new}``, or a data frame with columns of these names, with what else
        the likelihood reads, an exposure for example.
    link
        "scaled", the formula above; "by class", κ_c = (1 + π/8 Σ_cc)^(-1/2) for each class, eq. 9's κ in a softmax,
        which may change the most probable class; "monte carlo", the mean of softmax over draws of the linearised
        outputs; "probit", eq. 9 of FedSI as printed, normalised, which saturates; "map", the weights' point alone.
    draws
        Number of draws of outputs for "monte carlo", and for likelihoods that are neither classes by logits nor normal
        with a known sd; `link` says nothing of these, but for "map".
    ci_prob
        Probability of the intervals, where there are some.
    random_seed
        Seed of draws and of fine-tuning; by default the fit's.

    Returns
    -------
    xarray.Dataset
        With classes, ``probability`` (row, output), ``logit`` and ``logit_variance``; with a normal likelihood of
        known sd ``mean``, ``sd``, ``ci_low`` and ``ci_high`` of outcomes (row, output). With any other the same of
        outcomes that are drawn, or ``probability`` (row, class) of a categorical one, and ``output_mean``
        and ``output_variance`` (row, output). A Bernoulli outcome has ``probability`` beside its ``mean``; a Cauchy's
        has no mean and no sd.

    Raises
    ------
    DeclarationError, LocalFailure
        As in `personalise`; for settings out of range, or a model that holds its inputs as constants.
    DataError
        For inputs of other names or another shape, or at which the network or its variance is not finite.

    Examples
    --------
    >>> import functools, fedppl, numpy as np, torch
    >>> from fedppl.models import fedsi
    >>> builder = functools.partial(fedsi.classifier, net=torch.nn.Linear(2, 2))
    >>> clients = {name: {"X": np.eye(2), "y": np.array([0, 1])} for name in "ab"}
    >>> model = fedppl.FederatedModel(builder, shared=["weight", "bias"])
    >>> fit = fedppl.fit(model, clients, fedppl.nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    >>> fedppl.nn.predict(fit, "a", {"X": np.eye(2)})["probability"].dims
    ('row', 'output')

    Notes
    -----
    *When this fails.* With a posterior as wide as the prior, κ pulls all classes together. The linearised network is
    not the network: far from the data its variance grows with the square of the inputs.
    """
    a_fit(fit)
    seed = _seed(fit, random_seed)
    one_of("link", link, LINKS)
    ci_prob, draws = between("ci_prob", ci_prob, 0, 1), whole("draws", draws)
    own = client if isinstance(client, Own) else personalise(fit, client, random_seed=random_seed)
    unit = own.client.view(network_of)
    likelihood, blocks = unit.likelihood, []
    if isinstance(inputs, pd.DataFrame):
        inputs = new_inputs(fit.declaration, cast(ClientModel, own.client), inputs)
    (X, others), rng = unit.inputs(inputs), stream((seed, 3))
    if wrong := {name: len(value) for name, value in others.items() if value.ndim and len(value) != len(X)}:
        raise DataError(f"new inputs have {len(X)} rows, and {wrong}; give as many rows of each.")
    for start in range(0, max(len(X), 1), _ROWS):
        rows = slice(start, start + _ROWS)
        logits, covariance = _moments(unit, own, X[rows], start, link)
        if isinstance(likelihood, Declared):
            read = {name: value[rows] if value.ndim else value for name, value in others.items()}
            values, dims = _outcomes_at(likelihood, read, logits, covariance, draws, ci_prob, rng)
        else:
            values = _closed(likelihood, logits, covariance, link, draws, ci_prob, rng)
            dims = dict.fromkeys(values, ("row", "output"))
        blocks.append(values)
    values = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    told = {"client": own.client.client_id}
    if isinstance(likelihood, Declared):
        return idata.dataset(values, dims, {}, told)
    return idata.dataset(values, dims, {"output": np.arange(logits.shape[1])}, told | {"link": link})


def _moments(unit: NetworkUnit, own: Own, X: Array, first: int, link: str) -> tuple[Array, Array]:
    """Means (n, C) and covariances (n, C, C) of the outputs at some of the rows; `first` is the number of the first."""
    try:
        logits = host(outputs(unit, own.weights, X))
    except (IndexError, RuntimeError) as error:
        raise DataError(
            f"the network fails at new inputs of shape {X.shape} ({reason(error)}); keep codes within an Embedding."
        ) from error
    _require_finite(logits, "the network's output", first)
    covariance = np.zeros((*logits.shape, logits.shape[1]))
    if own.subnetwork is not None and link != "map":
        covariance = output_covariance(unit, own.subnetwork, X)
    _require_finite(covariance, "the output's variance", first)
    return logits, covariance


def _closed(
    likelihood: Categorical | Normal, logits: Array, covariance: Array, link: str, draws: int, ci_prob: float, rng: Rng
) -> dict[str, Array]:
    variance = np.diagonal(covariance, axis1=1, axis2=2).copy()  # a view would keep all covariances in memory
    if isinstance(likelihood, Normal):
        sd = np.sqrt(variance + likelihood.sd**2)
        half = norm.ppf(0.5 + ci_prob / 2) * sd
        return {"mean": logits, "sd": sd, "ci_low": logits - half, "ci_high": logits + half}
    chances = probabilities(logits, covariance, link=link, draws=draws, rng=rng)
    return {"probability": chances, "logit": logits, "logit_variance": variance}


def _seed(fit: Fit, random_seed: Any) -> int:
    return fit.seed if random_seed is None else whole("random_seed", random_seed, 0, "None takes the fit's")


def _require_finite(values: Array, what: str, first: int) -> None:
    if not np.all(np.isfinite(values)):
        row = first + int(np.argwhere(~np.isfinite(values))[0, 0])
        raise DataError(f"{what} is not finite at row {row} of the new inputs; look at their size.")


LINKS = ("scaled", "by class", "monte carlo", "probit", "map")


def probabilities(
    logits: Array, covariance: Array, *, link: str = "scaled", draws: int = 100, rng: Rng | None = None
) -> Array:
    """Class probabilities (n, C) of normal outputs with means (n, C) and covariances (n, C, C): `fedppl.nn.predict`."""
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    if link == "scaled":
        classes = logits.shape[1]
        apart = 2 * (variance.sum(axis=1) - covariance.sum(axis=(1, 2)) / classes) / max(classes - 1, 1)
        kappa = 1.0 / np.sqrt(1.0 + np.pi / 8 * np.maximum(apart, 0.0))  # rounding may give less than 0
        return np.asarray(softmax(kappa[:, None] * logits, axis=1))
    kappa = 1.0 / np.sqrt(1.0 + np.pi / 8 * variance)
    if link == "probit":
        chance = ndtr(kappa * logits)
        return np.asarray(chance / chance.sum(axis=1, keepdims=True))
    if link != "monte carlo":
        return np.asarray(softmax(kappa * logits, axis=1))
    rng = np.random.default_rng() if rng is None else rng
    total = np.zeros_like(logits)
    for at in _drawn(logits, covariance, draws, rng):
        total += softmax(at, axis=1)
    return np.asarray(total / draws)


def _drawn(outputs: Array, covariance: Array, draws: int, rng: Rng) -> Iterator[Array]:
    """Normal draws (n, C) of outputs with these means and covariances."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
    for _ in range(draws):
        yield outputs + np.einsum("ncd,nd->nc", root, rng.normal(size=outputs.shape))


_EACH = 10  # draws of an outcome for each draw of outputs


def _outcomes_at(
    likelihood: Declared,
    others: Mapping[str, Array],
    outputs: Array,
    covariance: Array,
    draws: int,
    ci_prob: float,
    rng: Rng,
) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """Means, sds and intervals of outcomes, or probabilities of classes, with dims of each.

    Outputs are with unknowns, (n, C + e), and their covariance (n, C + e, C + e); where it is 0, one draw is enough.
    """
    functions, count = likelihood.drawn(), likelihood.outputs
    variance = np.diagonal(covariance, axis1=1, axis2=2)[:, :count].copy()
    is_known = not np.any(covariance)
    means, drawn = [], []
    for at in _drawn(outputs, covariance, 1 if is_known else draws, rng):
        try:
            if functions.mean is not None:
                means.append(functions.mean(at, others))
            if likelihood.kind != "categorical":
                drawn += [functions.draw(at, others, rng) for _ in range(_EACH * (draws if is_known else 1))]
        except Exception as error:
            what = f"outcomes ({likelihood.kind}) cannot be drawn at the new inputs ({reason(error)})"
            raise DataError(f"{what}; scale inputs, or give pm.CustomDist a random=.") from error
    moments = {"output_mean": outputs[:, :count], "output_variance": variance}
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(moments, ("row", "output"))
    if likelihood.kind == "categorical":
        return {"probability": np.mean(means, axis=0), **moments}, {"probability": ("row", "class"), **dims}
    ends = np.quantile(drawn, [0.5 - ci_prob / 2, 0.5 + ci_prob / 2], axis=0)
    outcome_dims = ("row", *(f"outcome_{axis}" for axis in range(1, ends[0].ndim)))
    summary = {"ci_low": ends[0], "ci_high": ends[1]}
    if functions.has_moments:
        summary = {"mean": np.mean(means or drawn, axis=0), "sd": np.std(drawn, axis=0), **summary}
    dims |= dict.fromkeys(summary, outcome_dims)
    if likelihood.kind == "bernoulli":  # as of two classes
        summary["probability"] = np.stack([1.0 - summary["mean"], summary["mean"]], axis=-1)
        summary["sd"] = np.sqrt(summary["mean"] * (1.0 - summary["mean"]))
        dims["probability"] = (*outcome_dims, "class")
    return {**summary, **moments}, dims

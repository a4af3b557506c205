"""Draws of a pooled model by nutpie, as many as a reference needs, and how good they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import xarray as xr

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.local.nuts import by_nutpie
from fedppl.numerics.pairs import NO_DATA
from fedppl.types import Array

Transform = Callable[[Any], Any]
_ACCEPT = (0.9, 0.98, 0.995)  # the next where the one before diverges


def reference(
    model: pm.Model,
    names: Sequence[str] | None,
    draws: int,
    seed: int,
    *,
    ess: int,
    ess_of_squares: int,
    most: int,
    tune: int = 2000,
    divergences: int = 0,
    sd_error: float = np.inf,
    transforms: Mapping[str, Transform] | None = None,
) -> tuple[Any, dict[str, float]]:
    """Draws of four chains; once more with as many as that takes, at most `most` a chain, if they are too few.

    With smaller steps where more than so many draws diverge.
    Effective sample sizes are the smallest of these variables and of their squares; without names, of all that do not
    begin with "site". `sd_error` is the largest standard error of an sd, as a share of it. Those that have a transform
    are transformed before, draws (S, ...) to (S, p): of a scale whose logarithm is compared, the logarithm has to be
    known.
    """
    for accept in _ACCEPT:
        posterior, quality = _sampled(model, names, draws, tune, seed, accept, transforms or {})
        short = max(ess / max(quality["ess"], 1), ess_of_squares / max(quality["ess_of_squares"], 1))
        short = max(short, (quality["sd_error"] / sd_error) ** 2)
        diverged = quality["divergences"] > divergences
        if short > 1 and draws < most and (not diverged or accept == _ACCEPT[-1]):
            more = min(most, int(1.3 * draws * short))
            posterior, quality = _sampled(model, names, more, tune, seed, accept, transforms or {})
        if quality["divergences"] <= divergences:
            break
    return posterior, quality


def of_clients(views: Sequence[Any], about: Gaussian, draws: int, seed: int) -> tuple[Array, float]:
    """Draws (S, m) of what clients share, by nutpie over it and all clients' own variables, and the smallest ESS.

    From clients' compiled densities, in units of a Gaussian about the posterior: nothing is integrated out.
    """
    prior, m = views[0].prior, len(about.linear)
    mean, root = gaussian.affine(about)
    ends = m + np.cumsum([view.local_size for view in views])
    kernel = None if prior.is_gaussian else prior.kernel()

    def density(x: Array) -> tuple[float, Array]:
        phi, slopes = np.ascontiguousarray(mean + root @ x[:m]), np.zeros(len(x))
        pull = prior.gaussian.precision @ phi
        value, shared = phi @ (prior.gaussian.linear - 0.5 * pull), prior.gaussian.linear - pull
        if kernel is not None:
            value, shared = (part for part in np.split(kernel(phi, *NO_DATA), [1]))
        for view, end in zip(views, ends, strict=True):
            own = slice(end - view.local_size, end)
            value_there, *there = np.split(view.kernel(np.concatenate([phi, x[own]]), *view.packed), [1, 1 + m])
            value, shared, slopes[own] = value + value_there, shared + there[0], there[1]
        slopes[:m] = root.T @ shared[:m]
        return float(np.squeeze(value)), slopes

    found = by_nutpie(density, np.zeros(int(ends[-1])), draws, 1000, 4, 0.95, np.random.default_rng(seed))[0][..., :m]
    ess = min(float(az.ess(part[..., j])) for part in (found, found**2) for j in range(m))
    return mean + found.reshape(-1, m) @ root.T, ess


def found_again(sample: Callable[[], tuple[Any, dict[str, float]]], path: Path) -> tuple[Any, dict[str, float]]:
    """Draws from a file, which has them from an earlier run of the same models and settings; else sampled, and kept."""
    if not path.exists():
        posterior, quality = sample()
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {str(name): np.asarray(posterior[name].values) for name in posterior.data_vars}
        np.savez(path, **values, quality=json.dumps(quality))
    with np.load(path) as file:
        values = {name: file[name] for name in file.files if name != "quality"}
        quality = json.loads(str(file["quality"]))
    dims = {name: ["chain", "draw", *(f"{name} {i}" for i in range(v.ndim - 2))] for name, v in values.items()}
    return xr.Dataset({name: (dims[name], value) for name, value in values.items()}), quality


def _transformed(values: Any, transform: Transform | None) -> Any:
    if transform is None:
        return values
    chains, draws = values.shape[:2]
    found = np.asarray(transform(np.asarray(values, dtype=float).reshape(chains * draws, -1)))
    return xr.DataArray(found.reshape(chains, draws, -1), dims=["chain", "draw", f"{values.name} coordinates"])


def _sampled(
    model: pm.Model,
    names: Sequence[str] | None,
    draws: int,
    tune: int,
    seed: int,
    accept: float,
    transforms: Mapping[str, Transform],
) -> tuple[Any, dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pm.sample(
            draws,
            tune=tune,
            chains=4,
            cores=1,
            nuts_sampler="nutpie",
            random_seed=seed,
            progressbar=False,
            model=model,
            target_accept=accept,
        )
    posterior = found["posterior"]
    if names is None:
        every = [str(name) for name in posterior.data_vars]
        names = [name for name in every if not name.startswith("site") and "corr" not in name]
    of = xr.Dataset({name: _transformed(posterior[name], transforms.get(name)) for name in names})
    dims = ("chain", "draw")
    squares = (of - of.mean(dims)) ** 2
    # Effective sizes are of ranks, and say nothing of an sd that few far draws have.
    kurtosis = (squares**2).mean(dims) / squares.mean(dims) ** 2
    spread_of_sd = 0.5 * np.sqrt((kurtosis - 1.0) / az.ess(squares, method="mean"))
    sd_error = max(float(x.max()) for x in spread_of_sd.values())
    spread = [min(float(x.min()) for x in az.ess(part).values()) for part in (of, squares)]
    rhat = max(float(x.max()) for x in az.rhat(of).values())
    return posterior, {
        "ess": round(spread[0]),
        "ess_of_squares": round(spread[1]),
        "sd_error": round(sd_error, 4),
        "r_hat": round(rhat, 4),
        "divergences": int(found["sample_stats"]["diverging"].sum()),
    }

"""Who says what the model is: comparing what sites say of it, and what a strict majority of them says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.flower.decode import brief
from fedppl.flower.hello import Hello, Terms
from fedppl.types import Layout, Message

SERVER = "the server"

# Sites compute with libraries of their own, and sums are rounded in another order.
_ROUNDING = 1e-6


def other_terms(ours: Terms, theirs: Terms) -> str | None:
    """What two sides do not run alike, or None."""
    at = _at(ours.client_id)
    if theirs.version != ours.version:
        return f"it runs fedppl {brief(theirs.version)}, {at} runs {ours.version}; install one version everywhere"
    if other := _changed(ours.settings, theirs.settings):
        return f"its algorithm has {other}"
    if ours.variables is None or theirs.variables is None:
        return None
    names, others = ([v.name for v in one.variables or ()] for one in (ours, theirs))
    if names != others:
        return f"it shares {_few(others)}, {at} shares {_few(names)}"
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        for field in a._fields:
            mine, other_value = getattr(a, field), getattr(b, field)
            if mine != other_value:
                return f"its shared variable {b.name!r} has {field} {other_value}, at {at} it has {mine}"
    return None


def difference(ours: Hello, theirs: Hello) -> str | None:
    """What two sides do not agree on, or None."""
    at = _at(ours.client_id)
    if found := other_terms(ours.terms, theirs.terms):
        return found
    if ours.layout.fingerprint != theirs.layout.fingerprint:
        return (
            f"its shared prior is another than at {at} ({_other_prior(ours.layout, theirs.layout)}): constants of the "
            "prior must be the same everywhere, and not depend on data"
        )
    return _other_labels(ours, theirs, at)


def _at(client_id: str) -> str:
    return client_id if client_id == SERVER else repr(client_id)


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    told = [f"{brief(name)} {brief(theirs.get(name))} instead of {brief(ours.get(name))}" for name in names[:5]]
    return "; ".join(told)


def _few(values: Sequence[Any]) -> str:
    return f"{list(values[:8])}" + (f" and {len(values) - 8} others" if len(values) > 8 else "")


def _other_prior(ours: Layout, theirs: Layout) -> str:
    """The coordinate in which two priors of one shape differ most."""
    if ours.prior_is_gaussian != theirs.prior_is_gaussian:
        return "one of them is Gaussian"
    (mean, sd), (others, other_sd) = (
        (gaussian.mean(one.prior), gaussian.standard_deviations(one.prior)) for one in (ours, theirs)
    )
    apart = np.abs(others - mean) / sd + np.abs(np.log(other_sd / sd))
    if not apart.max() > 1e-6:
        return "in correlations, or in its density about one mean and covariance"
    k = int(np.argmax(apart))
    return f"{ours.labels[k]} has mean {others[k]:.4g} and sd {other_sd[k]:.4g}, there {mean[k]:.4g} and {sd[k]:.4g}"


def _shared_dims(layout: Layout) -> list[str]:
    return sorted({dim for variable in layout.variables for dim in variable.dims or () if dim})


def _other_labels(ours: Hello, theirs: Hello, at: str) -> str | None:
    """Where the columns of a shared variable have other labels, or another order; what is left out says nothing."""
    for dim in _shared_dims(ours.layout):
        if dim not in ours.coords or dim not in theirs.coords:
            continue
        mine, other = list(ours.coords[dim]), list(theirs.coords[dim])
        if mine != other:
            shorter = min(len(mine), len(other))
            k = next((i for i in range(shorter) if mine[i] != other[i]), shorter)
            found, there = (repr(brief(values[k])) if k < len(values) else "none" for values in (other, mine))
            return (
                f"its dim {dim!r} has label {found} in place {k}, at {at} it is {there} ({len(other)} labels, there "
                f"{len(mine)}): give the columns of the data one order, and coords one order, everywhere"
            )
    return None


def _said(hello: Hello) -> tuple[str, str]:
    """What has to be equal: the model, and which coordinate of it is which."""
    dims = _shared_dims(hello.layout)
    return hello.layout.fingerprint, json.dumps([hello.coords.get(dim) for dim in dims])


def reference(told: Sequence[Hello], expected: int) -> Hello | None:
    """One of those that say what a strict majority of the `expected` clients says, or None.

    A client that says two things, by two nodes that claim its id, counts for neither.
    """
    by_client: dict[str, set[tuple[str, str]]] = {}
    for hello in told:
        by_client.setdefault(hello.client_id, set()).add(_said(hello))
    votes = Counter(next(iter(said)) for said in by_client.values() if len(said) == 1)
    for said, count in votes.most_common(1):
        if 2 * count > expected:
            return min((hello for hello in told if _said(hello) == said), key=lambda hello: hello.client_id)
    return None


def disagreement(told: Sequence[Hello]) -> dict[str, str]:
    """What each site says otherwise than the most of them, or than the first where two say two things; by client."""
    if not told:
        return {}
    votes = Counter(_said(hello) for hello in told)
    ranked = sorted(told, key=lambda hello: (-votes[_said(hello)], hello.client_id))
    first = ranked[0]
    # Where all say another thing, the first stands for nothing more than the others.
    tied = [hello for hello in ranked if _said(hello) != _said(first)]
    found = {hello.client_id: difference(first, hello) or _unlabelled(first) for hello in tied}
    if tied and votes[_said(tied[0])] == votes[_said(first)]:
        found |= {
            hello.client_id: difference(tied[0], hello) or _unlabelled(tied[0])
            for hello in ranked
            if _said(hello) == _said(first)
        }
    return found


def _unlabelled(hello: Hello) -> str:
    return (
        f"only one of it and {hello.client_id!r} tells the labels of its shared dims; give coords that do not depend "
        "on data"
    )


def reading(hellos: Mapping[str, Hello]) -> tuple[dict[str, tuple[str, ...] | None], dict[str, list[Any]]]:
    """Dims of variables and labels of dims, those that a strict majority of the clients tells."""
    dims = _majority([hello.dims for hello in hellos.values()])
    coords = _majority([hello.coords for hello in hellos.values()])
    whole = {name: of for name, of in dims.items() if of is None or None not in of}
    return whole, {dim: list(values) for dim, values in coords.items()}


def _majority(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    votes: Counter[tuple[str, str]] = Counter()
    values: dict[tuple[str, str], Any] = {}
    for one in told:
        for name, value in one.items():
            key = name, json.dumps(value)
            votes[key] += 1
            values[key] = value
    return {name: values[name, said] for (name, said), count in votes.items() if 2 * count > len(told)}


def why_no_draws(
    values: Message,
    count: int,
    shared: Iterable[str],
    dims: Mapping[str, tuple[str, ...] | None],
    coords: Mapping[str, Sequence[Any]],
) -> str | None:
    """Why a site's reading of `count` draws cannot be used, or None if it can."""
    missing = [name for name in shared if name not in values]
    if missing:
        return f"its draws lack {missing[:5]}"
    lengths = {dim: len(labels) for dim, labels in coords.items()}
    taken = {"chain", "draw", *lengths, *(dim for along in dims.values() for dim in along or ())}
    for name, value in values.items():
        if name in taken:
            return f"its draws have the name {name!r}, which is that of a dim"
        if value.shape[:1] != (count,):
            return f"its draws of {name!r} have shape {value.shape}, expected ({count}, ...)"
        along = dims.get(name)
        if along is not None and len(along) != value.ndim - 1:
            return f"its draws of {name!r} have shape {value.shape}, and dims {along}"
        for dim, length in zip(along or (), value.shape[1:], strict=False):
            if lengths.setdefault(dim, length) != length:
                return f"its draws of {name!r} have shape {value.shape}, but dim {dim!r} has length {lengths[dim]}"
    return None


def agreed(answers: Mapping[str, Message], asked: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Draws that a strict majority of the `asked` sites read alike, to rounding, and who read which otherwise."""
    found: dict[str, Any] = {}
    others: dict[str, list[str]] = {}
    for name in sorted({name for values in answers.values() for name in values}):
        there = {client_id: values[name] for client_id, values in answers.items() if name in values}
        for value in there.values():
            alike = [client_id for client_id, other in there.items() if _close(value, other)]
            if 2 * len(alike) > asked:
                found[name] = value
                break
        else:
            alike = []
        if differ := sorted(set(there) - set(alike)):
            others[name] = differ
    return found, others


def _close(a: Any, b: Any) -> bool:
    """Equal to rounding. Symmetric: an implausible value must not set the scale by which it is compared."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    if a.dtype.kind != "f":
        return bool(np.array_equal(a, b))
    with np.errstate(all="ignore"):
        scale = np.nan_to_num(np.minimum(np.std(a), np.std(b)), nan=0.0, posinf=0.0) if a.size else 0.0
        apart = np.abs(a - b) <= _ROUNDING * (np.minimum(np.abs(a), np.abs(b)) + scale)
        return bool(np.all(apart | (a == b) | (np.isnan(a) & np.isnan(b))))

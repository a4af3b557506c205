"""What a client does in a round: one client, or many at once in a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fedppl.contracts.client import ClientView
from fedppl.settings import chosen, shown, some_of
from fedppl.types import DeclarationError, Message, Rng

P = TypeVar("P")


class ClientUpdate(NamedTuple, Generic[P]):
    """What a client keeps, sends and says after a round; `personal` None leaves what it kept.

    `info` is numbers by name, and may have a text under ``reason``, where something could not be computed and the reply
    is of use all the same.
    """

    personal: P | None
    reply: Message
    info: Mapping[str, float | str] = {}


ClientFn = Callable[[ClientView, P | None, Message, Rng], ClientUpdate[P]]  # a client's part of a round
# A client's part of a round that asks it for no reply: what is kept, and diagnostics.
UnreportedFn = Callable[[ClientView, P | None, Message, Rng], tuple[P | None, Mapping[str, float]]]


class Part(NamedTuple, Generic[P]):
    """One client's part of a round: what a `ClientFn` is called with."""

    client: ClientView
    personal: P | None
    message: Message
    rng: Rng


class Summed(NamedTuple):
    """Replies of clients, added where they were made."""

    total: Message  # every array summed over the clients, in a fixed order
    clients: int  # how many are in it
    failures: Mapping[str, str] = {}  # who is not, and why
    infos: Mapping[str, Mapping[str, float]] = {}  # diagnostics by client, where there are any
    reasons: Mapping[str, str] = {}  # what clients could not compute that are in it all the same
    sizes: Mapping[str, int] | None = None  # bytes that each sent; None where clients were not looked at one by one


# Updates of clients that `Batch.groups` put together. None where a client has to be asked alone, as one whose numbers
# are not finite: asked alone, it says why it fails.
BatchFn = Callable[[Sequence[Part[P]]], Sequence[ClientUpdate[P] | None]]


class Batch(NamedTuple, Generic[P]):
    """How clients in one process are computed together: results are those of one after another, up to rounding.

    Attributes
    ----------
    update_client, unreported
        The algorithm's own functions that this stands for. Where an algorithm has others in their place, as one that is
        wrapped, the batch is not used.
    groups
        ``groups(clients)``: places of clients that go together, as many as memory allows; no client in two of them. One
        that is in none is asked alone. It looks at models alone, so that groups do not depend on the number of threads.
    together, unreported_together
        ``together(parts)``, for a group of which each client replies, or none does. Of the latter `reply` is empty.
        What is raised costs the batch and no more: each client is then asked alone.
    stacks, summed
        Of algorithms that send all clients one message and read sums alone: ``stacks(clients)`` lays all of them side
        by side, once for an engine, and ``summed(stack, message, workers)`` is the sum of a stack's replies, in
        threads; a reply that is not to be used is a failure, with its reason.
    """

    update_client: ClientFn[P]
    unreported: UnreportedFn[P] | None
    groups: Callable[[Sequence[ClientView]], Sequence[Sequence[int]]]
    together: BatchFn[P]
    unreported_together: BatchFn[P] | None = None
    stacks: Callable[[Mapping[str, ClientView]], Sequence[Any]] | None = None
    summed: Callable[[Any, Message, int], Summed] | None = None


# Numbers of variables by the names under which they are printed: ``arm[drug]`` ----------------------------------------

CI_PROB = 0.95  # of intervals, everywhere


def interval(ci_prob: float) -> tuple[float, float]:
    """Tails of the equal-tailed interval.

    >>> interval(0.5)
    (0.25, 0.75)
    """
    return (1 - ci_prob) / 2, (1 + ci_prob) / 2


def labels_of(values: Any) -> list[str]:
    """Every number of an array of draws, or of estimates, as it is printed: name[coordinates]."""
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    labels = [[str(label) for label in values[dim].values] for dim in dims]
    return [
        f"{values.name}[{', '.join(labels[axis][i] for axis, i in enumerate(place))}]" if place else str(values.name)
        for place in np.ndindex(*(values.sizes[dim] for dim in dims))
    ]


def variable_of(entry: str, known: Collection[str]) -> str:
    """The variable that an entry is of, whose own name may have brackets; what stands before the first, of none.

    >>> variable_of("dose [mg][2]", ["dose [mg]"]), variable_of("arm[drug]", ["dose [mg]"])
    ('dose [mg]', 'arm')
    """
    fitting = [name for name in known if entry == name or entry.startswith(f"{name}[")]
    return max(fitting, key=len) if fitting else entry.partition("[")[0]


def entries_of(group: Any, var_names: Any, what: str, default: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Places in the flat array of what was asked for, by variable: all of one, or those that are named as printed.

    Without names it is all of the variables in `default`, or of all.
    """
    known = [str(name) for name in group.data_vars]
    if var_names is None:
        return {name: list(range(len(labels_of(group[name])))) for name in (known if default is None else default)}
    given = [var_names] if isinstance(var_names, str) else var_names
    listed = list(given) if isinstance(given, Sequence) and all(isinstance(one, str) for one in given) else None
    if listed is None or not any("[" in one for one in listed if one not in known):
        return {name: list(range(len(labels_of(group[name])))) for name in chosen("var_names", var_names, known, what)}
    found: dict[str, list[int]] = {}
    for one in listed:
        name = variable_of(one, known)
        if name not in known:
            chosen("var_names", one, known, what)
        labels = {_spaceless(label): place for place, label in enumerate(labels_of(group[name]))}
        places = list(labels.values()) if one == name else [labels[key] for key in [_spaceless(one)] if key in labels]
        if not places:
            raise DeclarationError(
                f"var_names={shown(var_names)}: {one!r} is none of {what}; those of {name!r} are "
                f"{some_of(labels_of(group[name]))}."
            )
        if set(places) & set(found.get(name, [])):
            raise DeclarationError(f"var_names={shown(var_names)} has {one!r} twice; name each once.")
        found.setdefault(name, []).extend(places)
    return found


def behind_of(declaration: Any) -> frozenset[str]:
    """Variables that others show in a form that can be read, and that are shown where they are asked for alone."""
    return frozenset(getattr(declaration.builder, "behind", ()))


def shown_by_default(declaration: Any, group: Mapping[Any, Any]) -> list[str]:
    """Names of variables, without those behind others."""
    return [str(name) for name in group if str(name) not in behind_of(declaration)]


def _spaceless(label: str) -> str:
    return "".join(label.split())

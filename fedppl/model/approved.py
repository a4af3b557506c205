"""The digest by which the owner of a site approves a declaration: of all that its density computes, not of a layout."""

from __future__ import annotations

import hashlib
from typing import Any

from fedppl.model import graph as _graph
from fedppl.model.graph_key import graph_key

_WRITTEN = ("fedppl.formulas.declare", "Formula")


def declaration_digest(client: Any) -> str:
    """Digest of the declaration of a client's model; empty where an operation's text does not say what it computes.

    Of a builder: the graphs of its densities, with every constant in them. Data in containers do not count, nor how
    many rows they have; data that a builder makes constants of do. Of a formula: what was written, since columns and
    priors follow from that and from what sites agree on under `Policy.agreement`.
    """
    declared, template = client.declared, client.template
    kind = type(declared.builder)
    if (kind.__module__, kind.__qualname__) == _WRITTEN:
        told = [sorted(declared.builder.written.items())]
    else:
        shared, _ = template.variables
        prior = _graph.prior_graph(template.parts, shared)
        graphs = [graph_key([one.x, *one.inputs], [one.logp]) for one in (template.graph, prior)]
        if None in graphs:
            return ""
        named = [(tuple(variable), rv.name) for variable, rv in zip(shared, template.parts.shared, strict=True)]
        told = [declared.kind, named, [v.name for v in template.parts.data], graphs]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]

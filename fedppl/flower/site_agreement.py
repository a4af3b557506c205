"""At a site: what it tells so that clients agree on a formula, and the agreement that it keeps. Knows no Flower."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm
from fedppl.data import frames
from fedppl.engine import policy
from fedppl.engine.guard import REFUSED, Guard, admit_agreement, admit_telling, let_tell, note, refuse_agreement
from fedppl.flower.decode import Malformed, whole_number
from fedppl.flower.wire import digest, pack_agreement, pack_told, unpack_agreement
from fedppl.formulas import exchange
from fedppl.formulas.agreement import OTHER, Agreement, Told, raised
from fedppl.formulas.declare import Formula
from fedppl.formulas.exchange import answered, asked, contradiction, rows_of
from fedppl.formulas.formula import is_formula, remembering
from fedppl.model.declaration import FederatedModel
from fedppl.storage.signed import Memory, pack, unpack
from fedppl.types import Array, DeclarationError

logger = logging.getLogger(__name__)

_MOST = 2**31  # rows that a server may want


def waits(model: FederatedModel) -> bool:
    """Whether a site's declaration is by a formula that clients have not agreed on yet."""
    return is_formula(model) and _built(model).design is None


def declared(model: FederatedModel, memory: Memory, own: str) -> tuple[FederatedModel, str]:
    """The declaration with what the site keeps of an agreement, and the digest of that."""
    if not waits(model):
        return model, ""
    kept = _recalled(memory, _name(own, "agreement"))
    if not kept:
        return model, ""
    try:
        agreement = unpack_agreement(kept, asked(_built(model)).names)
    except Malformed:  # of another formula, of other columns
        return model, ""
    return remembering(model, agreement), digest(agreement)


def columns(model: FederatedModel, loaded: Any, arrays: Any) -> Mapping[str, Any]:
    """What of a client's data tells one row from another: a formula's columns as they are, else the builder's arrays.

    Nothing of an estimate, which has no rows.
    """
    if not is_formula(model):
        return arrays if isinstance(arrays, Mapping) else {}
    if not (isinstance(loaded, Mapping) or frames.is_frame(loaded)):
        return {}
    held = frames.raw(loaded, None, "this site")
    found = {name: np.asarray(held[name]) for name in _built(model).columns if name in held}
    return {name: one.astype(str) if one.dtype.hasobject else one for name, one in found.items()}


def without_rare(model: FederatedModel, loaded: Any, rules: policy.Policy, own: str) -> Any:
    """A site's rows without those of levels that clients did not agree on, where they are too few to be told of."""
    fewest = policy.fewest(rules, 1)
    if not is_formula(model) or model.agreement is None or fewest <= 1:
        return loaded
    if not (isinstance(loaded, Mapping) or frames.is_frame(loaded)):
        return loaded
    rows, gone = exchange.without_rare(model.agreement, frames.raw(loaded, None, "this site"), fewest)
    if not gone:
        return loaded
    logger.warning("client %s leaves out %d rows of levels that clients did not agree on", own, gone)
    return rows


def tell(
    model: FederatedModel,
    algorithm: AnyAlgorithm,
    data: Any,
    own: str,
    texts: Mapping[str, str],
    memory: Memory,
    guard: Guard | None,
) -> dict[str, str]:
    """Answer what the server asks so that clients agree; of a column once, and then the same again.

    `data` loads the rows; `own` is the site's id, which may be empty. What was told is kept in `memory`. Without a
    `guard` there are no rules.
    """
    run = named(model)
    try:
        if not waits(model):
            raise Malformed("this site declares no formula that clients have to agree on")
        wanted = whole_number(texts, "min_count")
        if not 0 < wanted < _MOST:
            raise Malformed(f"'min_count' is {wanted}")
    except Malformed as error:
        if guard is not None:
            note(guard, run, own, refused=f"malformed: {error}"[:200])
        return {"refused": REFUSED}
    fewest = float(wanted) if guard is None else policy.fewest(guard.policy, wanted)
    built = _built(model)
    try:
        rows = rows_of(built, data(), "this site")
    except DeclarationError as error:  # names columns of the declaration, which the server has too
        logger.error("%s", error)
        return {"refused": str(error)}
    if guard is not None and len(next(iter(rows.values()))) < guard.policy.rows:
        fewest = np.inf  # it will take no part, which tells the same
    found = _told(built, rows, algorithm, own, run, fewest, memory, guard)
    return {"refused": REFUSED} if found is None else {"told": pack_told(found)}


def _told(
    built: Formula,
    rows: Mapping[str, Array],
    algorithm: AnyAlgorithm,
    own: str,
    run: str,
    fewest: float,
    memory: Memory,
    guard: Guard | None,
) -> dict[str, Told] | None:
    what, where = asked(built), _name(own, "told")
    if guard is None or fewest == np.inf:
        if guard is not None:
            note(guard, run, own, told="nothing of the rows")
        return answered(built, rows, fewest)
    kept = _recalled(memory, where)
    own_fewest = policy.fewest(guard.policy, 1)  # whoever asks first decides nothing of what is kept
    keys = {name: f"{name}, {_told_as(built, name)}" for name in what.names}
    fresh = [name for name in what.names if keys[name] not in kept]
    if fresh:
        new = {name: one for name, one in answered(built, rows, own_fewest).items() if name in fresh}
        pack_told(new)  # levels that cannot be written cost nothing
        numbers = {name: np.array([one.rows, one.total, one.squares, one.withheld]) for name, one in new.items()}
        levels = {f"{name}[{level}]": np.array(n) for name, one in new.items() for level, n in one.levels.items()}
        if not admit_telling(guard, run, own, {name: 4 + len(one.levels) for name, one in new.items()}):
            return None
        if not let_tell(guard, algorithm, run, own, {**numbers, **levels}):
            return None
        texts = {keys[name]: json.dumps([own_fewest, *one], allow_nan=False) for name, one in new.items()}
        kept = {**kept, **texts}
        memory.keep(where, pack(kept, where))
    else:
        note(guard, run, own, told="what was told before")
    return {name: _again(json.loads(kept[keys[name]]), own_fewest, fewest) for name in what.names}


def _told_as(built: Formula, name: str) -> str:
    """How a column is told: what was told of it in another way is another answer."""
    what, response = asked(built), built.terms.response
    if name in what.levels:
        return "levels"
    if name in what.unscaled:
        return "without sums"
    return "middle of intervals" if response.kind == "interval" and name == response.columns[0] else "as it is"


def _again(kept: list[Any], own_fewest: float, fewest: float) -> Told:
    """What was kept, as far as the policy lets it be told now: of a stricter one than then, no sums."""
    then, told = kept[0], Told(*kept[1:])
    if then < own_fewest and not told.text:
        told = told._replace(total=0.0, squares=0.0, withheld=True)
    return raised(told, fewest)


def accept(
    model: FederatedModel, data: Any, own: str, texts: Mapping[str, str], memory: Memory, guard: Guard | None
) -> None:
    """Keep what clients agreed on, as the server sent it; DeclarationError where this site has no part in it.

    Parameters are those of `tell`. A site that asks for nothing is left alone, and one that has it already.
    """
    if not waits(model) or "agreement" not in texts:
        return
    where, refused = (
        _name(own, "agreement"),
        DeclarationError("this site takes no part with what clients agreed on; the reason is in the site's own log"),
    )
    try:
        agreement = unpack_agreement(texts, asked(_built(model)).names)
    except Malformed as error:
        logger.error("what clients agreed on cannot be read: %s", error)
        raise refused from None
    found = digest(agreement)
    if declared(model, memory, own)[1] == found:
        return
    if guard is not None and not admit_agreement(guard, found, own):
        raise refused
    looking = guard is None or guard.policy.epsilon is None
    rules = None if guard is None else guard.policy
    if why := _why_not(model, agreement, data, own, rules) if looking else _odd_levels(_built(model), agreement):
        logger.error("what clients agreed on is not used: %s", why)
        if guard is not None:
            refuse_agreement(guard, found, own, why)
        raise refused
    memory.keep(where, pack({"agreement": pack_agreement(agreement)}, where))


def _odd_levels(built: Formula, agreement: Agreement) -> str | None:
    """Levels that a declaration did not name and that have no "other": under a total of epsilon no row may decide."""
    for name, column in agreement.columns.items():
        closed = column.levels == tuple(built.levels.get(name, ())) or (agreement.others and OTHER in column.levels)
        if column.levels and not closed:
            return f"levels of {name!r} are neither those of levels= nor closed by 'other', and rows are not looked at"
    return None


def _why_not(
    model: FederatedModel, agreement: Agreement, data: Any, own: str, rules: policy.Policy | None
) -> str | None:
    """What speaks against an agreement at this site, for its own log."""
    try:
        ready = remembering(model, agreement)
        loaded = data() if rules is None else without_rare(ready, data(), rules, own)
        rows = rows_of(_built(model), loaded, "this site")
        read = ready.read(own, rows)
        return contradiction(_built(ready), rows, read)
    except ValueError as error:  # of data that do not go with it, or a formula that cannot be evaluated with it
        return str(error)


def named(model: FederatedModel) -> str:
    """How the log and an approval call what a site tells for its formula."""
    text = model.builder.__name__ if is_formula(model) else ""
    return f"columns {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _built(model: FederatedModel) -> Formula:
    built: Formula = model.builder  # type: ignore[assignment]
    return built


def _name(own: str, kind: str) -> str:
    return f"{own or 'site'}.{kind}"


def _recalled(memory: Memory, name: str) -> dict[str, str]:
    """What was kept under a name, empty where nothing was; DeclarationError where it cannot be read."""
    raw = memory.recall(name)
    return {} if raw is None else dict(unpack(raw, repr(name), name))

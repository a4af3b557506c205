"""A site's part in an agreement on a formula: its summary of columns, and the agreement it stores. Knows no Flower."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl.data import frames
from fedppl.engine import policy, secure
from fedppl.engine.guard import REFUSED, Guard, admit_agreement, admit_cohort, may_tell, note, refuse_agreement
from fedppl.formulas import exchange
from fedppl.formulas.agreement import OTHER, Agreement, Told, raised
from fedppl.formulas.declare import Formula
from fedppl.formulas.exchange import answered, asked, contradiction, rows_of
from fedppl.formulas.formula import is_formula, remembering
from fedppl.model.declaration import FederatedModel
from fedppl.sites import masks
from fedppl.sites.decode import Malformed, Parcel, whole_number
from fedppl.sites.wire import digest, pack_agreement, pack_told, unpack_agreement
from fedppl.storage.signed import Memory, keep, pack, recalled
from fedppl.types import Array, DeclarationError

logger = logging.getLogger(__name__)

_MOST = 2**31  # rows, of a server's `min_count`


def waits(model: FederatedModel) -> bool:
    """Whether a site's declaration is by a formula that clients have not agreed on yet."""
    return is_formula(model) and _built(model).design is None


def declared(model: FederatedModel, memory: Memory, site_id: str) -> tuple[FederatedModel, str]:
    """The declaration with the agreement that the site has stored, and the agreement's digest, "" without one."""
    if not waits(model):
        return model, ""
    kept = recalled(memory, _name(site_id, "agreement"))
    if not kept:
        return model, ""
    try:
        agreement = unpack_agreement(kept, asked(_built(model)).names)
    except Malformed:  # the agreement is on another formula
        return model, ""
    return remembering(model, agreement), digest(agreement)


def columns(model: FederatedModel, loaded: Any, data: Any) -> Mapping[str, Any]:
    """The data that tell rows apart: a formula's columns as loaded, else the builder's arrays; empty for a summary."""
    if not is_formula(model):
        return data if isinstance(data, Mapping) else {}
    return _columns_of(model, loaded)


def _columns_of(model: FederatedModel, loaded: Any) -> dict[str, Any]:
    """The formula's columns as loaded."""
    if not _is_table(loaded):
        return {}
    table = frames.of_formula(loaded, "this site")
    names = [name for name in _built(model).columns if name in table.names]
    arrays = frames.raw(table, names, "this site") if names else {}
    return {name: column.astype(str) if column.dtype.hasobject else column for name, column in arrays.items()}


def without_rare(model: FederatedModel, loaded: Any, rules: policy.Policy, site_id: str) -> Any:
    """The rows, without those of levels outside the agreement where these are too few to be told of."""
    fewest = policy.fewest(rules, 1)
    if not is_formula(model) or model.agreement is None or fewest <= 1 or not _is_table(loaded):
        return loaded
    built = _built(model)
    wanted = built.columns if built.terms.client is None else (*built.columns, built.terms.client)
    rows, left_out = exchange.without_rare(model.agreement, frames.raw(loaded, wanted, "this site"), fewest)
    if not left_out:
        return loaded
    text = "client %s leaves out %d rows of levels that clients did not agree on"
    logger.warning(text, site_id, left_out, extra={"client": site_id})
    return rows


def _is_table(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) or frames.is_frame(loaded)


def tell(
    model: FederatedModel, data: Any, site_id: str, texts: Mapping[str, str], memory: Memory, guard: Guard | None
) -> dict[str, str]:
    """Summarise the formula's columns for the server; each column once, and the same summary ever after."""
    about = {"event": "agreement", "run": named(model), "client": site_id}
    try:
        if not waits(model):
            raise Malformed("this site declares no formula that clients have to agree on")
        min_count = whole_number(texts, "min_count")
        if not 0 < min_count < _MOST:
            raise Malformed(f"'min_count' is {min_count}")
    except Malformed as error:
        if guard is not None:
            note(guard, f"malformed: {error}"[:200], **about)
        return {"refused": REFUSED}
    built = _built(model)
    try:
        rows = rows_of(built, data(), "this site")
    except DeclarationError as error:  # its text names columns of the declaration, which the server has too
        logger.error("%s", error, extra={"run": about["run"], "client": site_id})
        return {"refused": str(error)}
    if guard is None:
        return {"told": pack_told(answered(built, rows, float(min_count)))}
    fewest = policy.fewest(guard.policy, min_count)
    if fewest == np.inf or len(next(iter(rows.values()))) < guard.policy.rows:
        # With fewer rows it will take no part, and this tells no more than that.
        note(guard, None, **about, told="nothing of the rows")
        return {"told": pack_told(answered(built, rows, np.inf))}
    # Not the server's number: who asks first must not decide what is stored.
    summary, site_fewest, file = asked(built), policy.fewest(guard.policy, 1), _name(site_id, "told")
    keys = {name: f"{name}, {_told_as(built, name)}" for name in summary.names}
    kept: dict[str, str] = dict(recalled(memory, file) or {})
    if fresh := [name for name in summary.names if keys[name] not in kept]:
        new = {name: column for name, column in answered(built, rows, site_fewest).items() if name in fresh}
        if not _may_tell(guard, site_id, named(model), new):
            return {"refused": REFUSED}
        kept |= {keys[name]: json.dumps([site_fewest, *column], allow_nan=False) for name, column in new.items()}
        keep(memory, file, kept)
    else:
        note(guard, None, **about, told="what was told before")
    again = {name: _again(json.loads(kept[keys[name]]), site_fewest, fewest) for name in summary.names}
    return {"told": pack_told(again)}


def _may_tell(guard: Guard, site_id: str, run: str, columns: Mapping[str, Told]) -> bool:
    """Count and log summaries of columns that were not told before; False where a rule refuses them."""
    pack_told(columns)  # levels that cannot be written are refused before they are counted
    released: dict[str, Array] = {}
    for name, column in columns.items():
        released[name] = np.array([column.rows, column.total, column.squares, column.withheld])
        released |= {f"{name}[{level}]": np.array(count) for level, count in column.levels.items()}
    sizes = {name: 4 + len(column.levels) for name, column in columns.items()}
    return may_tell(guard, run, site_id, sizes, released)


def _told_as(built: Formula, name: str) -> str:
    """How a column is summarised; a summary of another kind is another answer."""
    question, response = asked(built), built.terms.response
    if name in question.levels:
        return "levels"
    if name in question.unscaled:
        return "without sums"
    return "middle of intervals" if response.kind == "interval" and name == response.columns[0] else "as it is"


def _again(kept: list[Any], site_fewest: float, fewest: float) -> Told:
    """A stored summary, as far as the policy allows it now; no sums where it has become stricter."""
    fewest_then, column = kept[0], Told(*kept[1:])
    if fewest_then < site_fewest and not column.text:
        column = column._replace(total=0.0, squares=0.0, withheld=True)
    return raised(column, fewest)


# In a sum under masks -------------------------------------------------------------------------------------------------


class Here(NamedTuple):
    """A site whose summary of columns leaves in a sum alone."""

    site_id: str
    files: Path  # of its identity and roster
    folder: Path
    memory: Memory
    guard: Guard
    versions: Callable[[Mapping[str, Any]], tuple[str | None, dict[str, bytes]]]  # a rule on changed data, and files


def add(model: FederatedModel, data: Callable[[], Any], texts: Mapping[str, str], here: Here) -> Parcel:
    """Greet for a sum of summaries, or, where the server names the cohort, answer with this one under its masks.

    The key of the greeting follows from the summary. So the same summary is the same words whenever it is asked for,
    and another one, of rows that have changed, is of another cohort and another question.
    """
    about = {"event": "agreement", "run": named(model), "client": here.site_id}
    refused: Parcel = {}, {"refused": REFUSED}
    if not waits(model) or "run" not in texts:
        clear = "a summary of columns would leave in the clear; the server has to agree with secure=True"
        note(here.guard, f"sums: {clear}", **about)
        return refused
    try:
        loaded = data()
        columns = _in_sum(model, loaded, texts, here.guard.policy)
    except DeclarationError as error:  # its text names columns of the declaration, which the server has too
        logger.error("%s", error, extra={"run": about["run"], "client": about["client"]})
        note(here.guard, f"sums: {error}"[:200], **about)
        return {}, {"refused": str(error)}
    counts, sums = exchange.flat(_built(model), columns)
    words = np.concatenate([np.array(counts, dtype=np.int64).view(np.uint64), secure.wide(sums)])
    if "cohort" not in texts:
        fewest = {"fewest": str(int(policy.fewest(here.guard.policy, 1)))}
        return {}, fewest | masks.greet(here.files, here.folder, texts, words)
    try:
        cohort = masks.unpack_cohort(texts)
        at = masks.place(here.files, here.folder, named(model), cohort, words)
    except (DeclarationError, Malformed) as error:
        note(here.guard, f"sums: {error}"[:200], **about)
        return refused
    if not _admitted(model, loaded, columns, at, here):
        return refused
    return {masks.WORDS: secure.masked(at.member, words, 1, masks.COLUMNS).view(np.int64)}, {}


def _in_sum(model: FederatedModel, loaded: Any, texts: Mapping[str, str], rules: policy.Policy) -> dict[str, Told]:
    """The site's summary; the text of a DeclarationError may leave the site."""
    if texts["run"] != named(model):
        raise DeclarationError("this site has another formula, or other levels=; give one declaration everywhere.")
    if policy.fewest(rules, 1) == np.inf:
        remedy = "pass the model of fedppl.agree on made-up tables with all levels, here and at the sites"
        raise DeclarationError(f"its policy has epsilon= or agreement=inf, so that nothing of rows is told; {remedy}.")
    return exchange.in_sum(_built(model), rows_of(_built(model), loaded, "this site"))


def _admitted(model: FederatedModel, loaded: Any, columns: Mapping[str, Told], at: masks.Place, here: Here) -> bool:
    """Count and log a summary in the sum of a cohort, once; False where a rule refuses it."""
    run, file = of_cohort(named(model), at.digest), _name(here.site_id, "added")
    if not admit_cohort(here.guard, run, at.names, at.digest):
        return False
    if recalled(here.memory, file) == {"run": run}:
        note(here.guard, None, event="agreement", run=run, client=here.site_id, told="what was told before")
        return True
    changed, versions = here.versions(_columns_of(model, loaded))
    if changed:
        note(here.guard, changed, event="agreement", run=run, client=here.site_id)
    if changed or not _may_tell(here.guard, here.site_id, run, columns):
        return False
    for name, raw in {**versions, file: pack({"run": run}, file)}.items():
        here.memory.keep(name, raw)
    return True


def of_cohort(run: str, digest: str) -> str:
    """The name of a question to a cohort, by the digest of its greetings, in logs and in approvals."""
    return f"{run} of {digest[:16]}"


# What comes of it -----------------------------------------------------------------------------------------------------


def accept(
    model: FederatedModel, data: Any, site_id: str, texts: Mapping[str, str], memory: Memory, guard: Guard | None
) -> None:
    """Check and store the agreement that the server sent; DeclarationError where it contradicts this site's rows."""
    if not waits(model) or "agreement" not in texts:
        return
    built, rules = _built(model), None if guard is None else guard.policy
    refused = DeclarationError("this site takes no part with that agreement; the reason is in the site's own log")
    try:
        agreement = unpack_agreement(texts, asked(built).names)
    except Malformed as error:
        logger.error("what clients agreed on cannot be read: %s", error, extra={"client": site_id})
        raise refused from None
    key = digest(agreement)
    if declared(model, memory, site_id)[1] == key:
        return
    if guard is not None and not admit_agreement(guard, key, site_id):
        raise refused
    if rules is not None and rules.epsilon is not None:
        why = _odd_levels(built, agreement)
    else:
        why = _why_not(model, agreement, data, site_id, rules)
    if why:
        logger.error("what clients agreed on is not used: %s", why, extra={"client": site_id})
        if guard is not None:
            refuse_agreement(guard, key, site_id, why)
        raise refused
    file = _name(site_id, "agreement")
    keep(memory, file, {"agreement": pack_agreement(agreement)})


def _odd_levels(built: Formula, agreement: Agreement) -> str | None:
    """The rule that levels break which are neither declared nor closed by "other": under epsilon no row may decide."""
    for name, column in agreement.columns.items():
        closed = column.levels == tuple(built.levels.get(name, ())) or (agreement.others and OTHER in column.levels)
        if column.levels and not closed:
            return f"levels of {name!r} are neither those of levels= nor closed by 'other', and rows are not looked at"
    return None


def _why_not(
    model: FederatedModel, agreement: Agreement, data: Any, site_id: str, rules: policy.Policy | None
) -> str | None:
    """Why an agreement contradicts this site's rows, for its own log; or None."""
    try:
        ready = remembering(model, agreement)
        loaded = data() if rules is None else without_rare(ready, data(), rules, site_id)
        rows = rows_of(_built(model), loaded, "this site")
        arrays = ready.read(site_id, rows)
        return contradiction(_built(ready), rows, arrays)
    except ValueError as error:  # the data or the formula cannot be used with it
        return str(error)


def named(model: FederatedModel) -> str:
    """The name of the question for a summary of a formula's columns, in the log and in approvals."""
    text = repr((model.builder.__name__, dict(_built(model).levels))) if is_formula(model) else ""
    return f"columns {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _built(model: FederatedModel) -> Formula:
    return model.builder  # type: ignore[return-value]


def _name(site_id: str, kind: str) -> str:
    return f"{site_id or 'site'}.{kind}"

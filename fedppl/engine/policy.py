"""The policy of a data owner: `Policy`, its file, and its rules as pure functions of a request."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian, privacy, settings
from fedppl.contracts import AnyAlgorithm, Asked
from fedppl.storage.codec import plain
from fedppl.types import Array, DeclarationError, Layout, Message

__all__ = ["Policy", "read"]  # of a namespace that users have

# Least precision of a cavity in a direction, in units of the prior's. An honest cavity may have none, as with two
# clients of which one is not log-concave. A slope of log f of `distance` per prior sd holds such cavities inside.
_VAGUEST = 1.0
_LOWER = "; a policy with another limit allows it, see docs/privacy.md"
_AS_TOML = "; TOML has true, false and inf, texts in quotes and lists in brackets"

SUMMED = ("loo", "calibration")  # conclusions that are sums over rows, and so over sites
CONCLUSIONS = (*SUMMED, "conflict")
_SUMS = ("required", "optional")
FEWEST_SITES = 3  # of a cohort: of two each would know the other's part

# Points of sums that are allowed where a policy names no number; a fit by sums asks at 1,300 to 9,000. It bounds no
# information. Of 250 rows together a search finds 12 from 4,096 points, and a guess 9; but a search that never fails
# would find 121, and from 20,000 all, since sums are as exact as float64 (benchmarks/reconstruction.py --cohort).
POINTS_OF_SUMS = 20_000
# Requests that are allowed where a policy names no number: of single replies by what they determine of 250 rows
# (docs/attacks_measured.md); of sums, of which points bound what leaves, some five fits, each of 7 to 30 requests.
REQUESTS, REQUESTS_OF_SUMS = 20, 100
_WHOLE = (  # limits that are whole numbers, with their least values; those from 1 on may be inf
    ("rows", 0, "0 allows any number"),
    ("events", 0, "0 allows any number"),
    ("points", 0, "0 allows no log densities at points, and where it is left out the usual number is allowed"),
    ("fewest_sites", FEWEST_SITES, "of two sites each would know the other's part"),
    ("cohorts", 1, "inf allows any number"),
    ("few_rows", 0, "0 does not look at it"),
    ("requests", 1, "inf allows any number, and where it is left out the usual number is allowed"),
    ("agreement", 1, "inf tells nothing of the rows"),
    ("changed_rows", 1, "inf allows the same data alone"),
)


class Release(NamedTuple):
    """A reply that is about to leave a site, for `Policy.approval` to decide on."""

    run: str
    round: int
    client: str
    arrays: Message
    info: Mapping[str, float]
    reason: str


class Holdings(NamedTuple):
    """The counts that the rules on data use, of a client or of a cohort."""

    rows: int  # of the observed variable that has the fewest
    events: int | None  # outcomes of the rarest kind; None where outcomes are not of kinds
    sites: int = 1


@dataclass(frozen=True)
class Policy:
    r"""What a site allows, whoever runs the server.

    By default nothing of a site leaves alone: its replies are added to those of at least two others under masks, and
    rows are counted over all sites of the cohort. Where single replies may leave (``sums="optional"``) rules on data
    are decided when the site introduces itself, and the server learns one bit: whether the site takes part. All other
    rules but `few_rows` and a function for `approval` depend on this request and earlier ones, not on data. Every
    refusal has the same text. A refusal by `few_rows` tells a bit, and counts as a request. Limits count over all runs.

    Parameters
    ----------
    sums
        "required": replies leave in sums over a cohort alone, under masks (`Flower.client_app(secure=)`), and neither
        counts nor summaries of this site leave otherwise. "optional" allows single replies too, as `fedppl.EP` needs
        them.
    fewest_sites
        Fewest sites of a cohort, this one counted; at least 3.
    cohorts
        Most different sets of sites in whose sums this site takes part, over all runs. Two sums over sets that differ
        by a site tell that site's part: so 2, by which a run goes on without a site that stays away, gives that away.
    rows
        Smallest number of rows, the length of the shortest observed variable; over the whole cohort where replies are
        summed under masks. So are `parameters_per_row` and `events`.
    parameters_per_row
        Most shared coordinates per row.
    events
        Fewest outcomes of either kind where observed variables are 0 or 1; of successes and failures of binomial ones;
        of each category that occurs; events of a formula's ``Surv(time, event)``. Outcomes that enter by
        ``pm.Potential`` are data like others, and not counted.
    declarations
        Digests of allowed declarations, as `ClientModel.declaration` and the site's log have them; None allows the one
        that the site's app declares. A digest covers all that the densities compute, constants included; of a formula
        its text.
    allowed_queries
        Digests of allowed queries, as ``fedppl.sources.sql(...).digest`` and the site's log have them; None allows any,
        and rows that no source of `fedppl.sources` reads. For sites alone: in one process rows are given.
    requests
        Most requests that are answered, over all runs. None allows 100 for sums under masks (a fit takes 7 to 30), and
        20 for single replies.
    distance
        Largest distance of a point from the prior's mean, per coordinate, in prior sds. Points beyond it are left out
        where the algorithm allows that; other requests with such points are refused.
    cavity
        Largest generalised eigenvalue of the precisions of a cavity and of q.
    points
        Most points, over all runs, at which log densities leave, as for `fedppl.Sums`: from many of them, values far
        from the posterior can be solved for rows (``docs/privacy.md``). 0 allows none. None allows 20,000 points of
        sums under masks, and none of single replies. That is no proof: a search found no more of 250 rows than a guess
        did, but the sums tell more than was found. Points beyond `distance` are left
        out and not counted.
    conclusions
        Summaries that leave when a run is over that the site answered in: "loo", sums of the rows' leave-one-out log
        densities for `fedppl.loo`; "calibration", sums over rows by tenths of the predicted probability of outcomes
        that are 0 or 1, or counts of these, for `fedppl.reliability`; and "conflict", the site's p-value and statistic
        for `fedppl.conflict`. They count as one more request, and q must lie where a request may ask. Under masks sums
        leave alone, where all sites of the cohort name them. Not together with `epsilon`.
    few_rows, few_rows_share
        No direction of the shared coordinates may have this share of its slopes or curvatures from this few rows, at
        the points of a request and at the prior's mean: the reply would reveal these rows. 0 switches the rule off.
        Where replies leave in sums it is a share of the sum: a level of one row here and of thirty elsewhere passes.
    joint
        Whether a density may have terms that are not of single rows: every ``pm.Potential`` that reads data or local
        variables, and outcomes with a joint density, such as one ``pm.MvNormal`` over all rows. It is not known on how
        few rows these depend.
    agreement
        Fewest rows that a client tells of before a run by a formula, when clients agree on levels and scales: in all,
        of a level, of a value; of fewer, not even that there are some. Rows of levels outside the agreement are left
        out where they are fewer. Rows are counted in multiples of it. The server may want more, not less. The
        first summary of a column is sent again, whatever the rows now are, until its file is deleted; a new summary,
        and each other agreement that the site is sent, counts as a request. ``inf``, or `epsilon`, tells only which
        columns are texts. Where sites agree in sums under masks the largest of their policies' counts, of the rows of
        all: the server leaves rarer levels out of the agreement, and wants four times as many for a mean and an sd.
    changed_rows
        Fewest rows by which data may differ from those of an earlier answer, unless they are the same: answers about
        data that differ by a row reveal that row. 1 allows any difference; under an `epsilon` the rule is off.
    epsilon
        None, or the total ε over all runs: then only algorithms with a known ε are answered, `distance` and `cavity`
        are off, and the release that would exceed the total is refused.
    delta
        δ of that total.
    approval
        None; or a function of a `Release` that returns True where it may leave; or the path of a text file with a line
        for every run that may be answered: its name, as the audit log has it, and after a space and a ``#``
        what the log keeps of who approved it.

    Raises
    ------
    DeclarationError
        For values out of range.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.Policy(rows=300).distance
    10.0

    Notes
    -----
    ``math.inf`` (``inf`` in a file) switches a limit off, 0 a smallest number.

    *When this fails.* Whoever writes the declaration chooses the design. No rule finds weights of rows by which one
    number that leaves tells all outcomes, such as ``1 + 2**-k`` for row k of twenty: allow only declarations that
    somebody at the site has read, by `declarations`, or set `epsilon`. A secure sum does not keep this back either.

    Of a design that nobody chose to attack with: if all coefficients are shared, replies are functions of the rows, and
    a server that stays inside every limit can learn enough to solve for some of them. Covariates of few values are the
    worst case: a few replies tell how many rows have each combination. Of continuous ones
    ``docs/attacks_measured.md`` has the rows that were found. Only `epsilon` bounds the information for all data; a
    model with local coefficients reveals less. The policy restricts the server's requests, not the code that runs at
    the site.
    """

    sums: str = "required"
    fewest_sites: int = FEWEST_SITES
    cohorts: float = 1
    rows: int = 250
    parameters_per_row: float = 0.05
    events: int = 5
    declarations: tuple[str, ...] | None = None
    allowed_queries: tuple[str, ...] | None = None
    requests: float | None = None
    distance: float = 10.0
    cavity: float = 2.0
    points: int | None = None
    conclusions: tuple[str, ...] = ()
    few_rows: int = 3
    few_rows_share: float = 0.97
    joint: bool = False
    agreement: float = 10
    changed_rows: float = 10
    epsilon: float | None = None
    delta: float = 1e-5
    approval: Callable[[Release], bool] | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        settings.one_of("sums", self.sums, _SUMS)
        for name, least, hint in _WHOLE:
            value = getattr(self, name)
            if not (value is None and name in ("points", "requests")) and (least == 0 or value != np.inf):
                settings.whole(name, value, least, hint)
        settings.between("few_rows_share", self.few_rows_share, 0, 1, "(]")
        settings.flag("joint", self.joint)
        for name in ("parameters_per_row", "distance", "cavity"):
            if getattr(self, name) != np.inf:
                settings.positive(name, getattr(self, name), "inf switches the rule off")
        if self.epsilon is not None:
            settings.positive("epsilon", self.epsilon, "leave it out to allow algorithms without known ε")
        settings.between("delta", self.delta, 0, 1, hint="take it well below 1 / number of clients")
        for name in ("declarations", "allowed_queries"):
            if (digests := getattr(self, name)) is None:
                continue
            if not isinstance(digests, list | tuple) or not digests or not all(isinstance(d, str) for d in digests):
                raise DeclarationError(f"{name}={settings.shown(digests)} must be a list of digests, or None.")
            object.__setattr__(self, name, tuple(digests))
        conclusions = self.conclusions
        if not isinstance(conclusions, list | tuple) or not all(name in CONCLUSIONS for name in conclusions):
            raise DeclarationError(f"conclusions={settings.shown(conclusions)} must be a list of {CONCLUSIONS}.")
        if conclusions and self.epsilon is not None:
            raise DeclarationError(f"conclusions={conclusions} have no known ε, as epsilon= wants; leave one out.")
        object.__setattr__(self, "conclusions", tuple(dict.fromkeys(conclusions)))
        approval = self.approval
        if approval is not None and not callable(approval) and not isinstance(approval, str | os.PathLike):
            raise DeclarationError(f"approval={settings.shown(approval)} must be a function, a file's path or None.")


NO_RULES = Policy(
    sums="optional",
    cohorts=np.inf,
    rows=0,
    parameters_per_row=np.inf,
    events=0,
    requests=np.inf,
    distance=np.inf,
    cavity=np.inf,
    points=sys.maxsize,
    few_rows=0,
    joint=True,
    agreement=1,
    changed_rows=1,
)
"""Answers every request: for simulated data, and for data that need no protection."""


def read(path: str | os.PathLike[str]) -> Policy:
    r"""Read a policy from a TOML file, whose keys are the keywords of `Policy`; missing keys have their defaults.

    Parameters
    ----------
    path
        The file. The path of an approval file in it is taken from its folder.

    Returns
    -------
    Policy

    Raises
    ------
    DeclarationError
        If the file cannot be read, is no TOML, or has a key or a value that a policy cannot have.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "policy.toml"
    ...     _ = path.write_text("rows = 300\nrequests = 10\n")
    ...     policy = read(path)
    >>> policy.rows, policy.requests, policy.distance
    (300, 10, 10.0)

    Notes
    -----
    *When this fails.* A missing key has the default of this version, which need not be what the site wants: write out
    every limit that matters. Later changes of the file have no effect until it is read again.
    """
    if not isinstance(path, str | os.PathLike):
        raise DeclarationError(f"path={settings.shown(path)} must be the path of a TOML file with a policy.")
    shown = repr(os.fspath(path))
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # an editor may put a mark in front
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"policy {shown} is no TOML: {error}; correct that line{_AS_TOML}.") from error
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        why = getattr(error, "strerror", None) or error
        raise DeclarationError(f"policy {shown} cannot be read: {why}; correct the path.") from error
    names = [field.name for field in fields(Policy)]
    if unknown := sorted(set(values) - set(names)):
        raise DeclarationError(f"policy {shown} has the key {unknown[0]!r}; a policy has {', '.join(names)}.")
    if isinstance(values.get("approval"), str):
        values["approval"] = str(Path(path).parent / values["approval"])
    try:
        return Policy(**values)
    except DeclarationError as error:
        message = str(error).replace("True or False", "true or false, as TOML has them")
        raise DeclarationError(f"policy {shown}: {message}") from None


def told(policy: Policy) -> str:
    """The rules that are not those of `Policy()`, for a site's own log.

    >>> told(Policy(rows=300, distance=np.inf))
    'rows = 300, distance = inf; else the default'
    """
    given = [(field.name, getattr(policy, field.name)) for field in fields(Policy)]
    others = [(name, value) for name, value in given if value != getattr(Policy(), name)]
    words = [f"{name} = {'a function' if callable(value) else value}" for name, value in others]
    return "; ".join([*([", ".join(words)] if words else []), "else the default"])


def resolved(policy: Policy, *, masked: bool) -> Policy:
    """The policy with the numbers that it allows of replies that leave singly, or in sums under masks.

    >>> resolved(Policy(), masked=False).points, resolved(Policy(), masked=True).points
    (0, 20000)
    """
    points, requests = (POINTS_OF_SUMS, REQUESTS_OF_SUMS) if masked else (0, REQUESTS)
    usual: dict[str, Any] = {"points": points, "requests": requests}
    return replace(policy, **{name: number for name, number in usual.items() if getattr(policy, name) is None})


def refuse_cohort(policy: Policy, sites: int, sets: int) -> str | None:
    """The rule that a cohort of so many sites breaks, the one of so many different sets of sites, or None.

    >>> refuse_cohort(Policy(fewest_sites=5), 4, 1)
    'fewest_sites: 4, at least 5 wanted; wait until more sites take part'
    """
    if sites < policy.fewest_sites:
        return f"fewest_sites: {sites}, at least {policy.fewest_sites} wanted; wait until more sites take part"
    if sets > policy.cohorts:
        return f"cohorts: {sets} different sets of sites, at most {policy.cohorts:g} wanted; run with an earlier set"
    return None


def refuse_data(policy: Policy, shared: int, holdings: Holdings) -> str | None:
    """The rule that the data of a client, or of a cohort, break, with figures for its own log, or None.

    >>> refuse_data(Policy(), 2, Holdings(rows=12, events=None))
    'rows: 12, at least 250 wanted; a policy with another limit allows it, see docs/privacy.md'
    """
    rows, events, most = holdings.rows, holdings.events, policy.parameters_per_row
    of = "" if holdings.sites == 1 else f" at {holdings.sites} sites"
    if rows < policy.rows:
        return f"rows: {rows}{of}, at least {policy.rows} wanted{_LOWER}"
    if shared > most * rows:
        share = f"{shared} shared coordinates for {rows} rows{of}"
        return f"parameters_per_row: {share}, at most {most:g} a row wanted{_LOWER}"
    if events is not None and events < policy.events:
        return f"events: {events} of the rarer outcome{of}, at least {policy.events} wanted{_LOWER}"
    return None


def refuse_declaration(policy: Policy, digest: Callable[[], str]) -> str | None:
    """The rule that a declaration breaks, for the site's own log, since its digest may depend on data; or None."""
    if policy.declarations is None:
        return None
    if not (fingerprint := digest()):
        return "declarations: the model has an operation whose text does not say what it computes, so it has no digest"
    if fingerprint in policy.declarations:
        return None
    return f"declarations: {fingerprint} is not listed; add it to allow this model"


def refuse_query(policy: Policy, digest: str) -> str | None:
    """The rule that the query by which a site reads its rows breaks, or None; `digest` is "" where there is no query.

    >>> refuse_query(Policy(allowed_queries=["9e1c"]), "b07a")
    'allowed_queries: b07a is not listed; read the query, and add its digest to allow it'
    """
    if policy.allowed_queries is None or digest in policy.allowed_queries:
        return None
    if not digest:
        return "allowed_queries: load_data= is no query; pass a source, such as fedppl.sources.sql(url, query)"
    return f"allowed_queries: {digest} is not listed; read the query, and add its digest to allow it"


def refuse_algorithm(policy: Policy, algorithm: AnyAlgorithm) -> str | None:
    """The rule that an algorithm breaks, whatever the data; or None."""
    if policy.epsilon is not None:
        if algorithm.disclosure.noise_multiplier is None:
            return f"epsilon: this site wants a known ε, and {algorithm.name} has none; use fedppl.PrivateEP"
        return None
    if algorithm.disclosure.asks is None and min(policy.distance, policy.cavity) < np.inf:
        remedy = "set both to inf in the policy of this site to run it all the same"
        return f"distance, cavity: {algorithm.name} does not say where its requests ask; {remedy}"
    return None


def refuse_sharing(algorithm: AnyAlgorithm, members: int | None) -> str | None:
    """Why replies that share noise must not leave, or None; `members` are added under masks, None in the clear."""
    wanted = algorithm.disclosure.shared_by
    if wanted <= (members or 1):
        return None
    what = "replies would be seen singly" if members is None else f"the cohort has {members}"
    return f"{algorithm.name} shares its noise among shared_by={wanted} clients whose replies are masked, and {what}"


def refuse_request(policy: Policy, layout: Layout, asked: Asked) -> str | None:
    """The rule that a request breaks by its points, with figures, or None."""
    points = np.vstack([asked.points, *(gaussian.mean(q) for q, _ in asked.targets if gaussian.is_proper(q))])
    numbers = [points, asked.spare, *(part for pair in asked.targets for g in pair for part in g)]
    if not all(np.all(np.isfinite(part)) for part in numbers) or points.shape[1:] != (layout.size,):
        return "numbers: not all finite, or not of the layout's size"
    if not all(gaussian.is_proper(q) for q, _ in asked.targets):
        return "numbers: q is not positive definite"
    if policy.epsilon is not None:
        return None
    places = np.vstack([points, *(reached(layout, cavity) for _, cavity in asked.targets)])
    if not np.all(inside(policy, layout, places)):
        return f"distance: {_distances(layout, places).max():.3g} prior sds, at most {policy.distance:g} wanted"
    if len(asked.spare) and not np.any(inside(policy, layout, asked.spare)):
        least = _distances(layout, asked.spare).min()
        return f"distance: {least:.3g} prior sds at the nearest point, at most {policy.distance:g} wanted"
    for q, cavity in asked.targets:
        _, root = gaussian.affine(q)
        sharpest = float(np.linalg.eigvalsh(root.T @ cavity.precision @ root)[-1])
        if sharpest > policy.cavity:
            return f"cavity: {sharpest:.3g} times as sharp as q in a direction, at most {policy.cavity:g} wanted"
    return None


def refuse_values(policy: Policy, points: int) -> str | None:
    """The rule that log densities at this many points break, over all runs, or None."""
    rule = f"points: log densities at {points} points over all runs, at most {policy.points or 0} wanted"
    return rule if points > (policy.points or 0) else None


def inside(policy: Policy, layout: Layout, points: Array) -> Array:
    """Which points (S, m) lie within `distance` of the prior's mean, (S,) bool."""
    if policy.epsilon is not None or policy.distance == np.inf:
        return np.ones(len(points), dtype=bool)
    return np.asarray(_distances(layout, points) <= policy.distance)


def _distances(layout: Layout, points: Array) -> Array:
    """Largest distance of a coordinate from the prior's mean, in prior sds, (S,)."""
    away = np.abs(points - gaussian.mean(layout.prior)) / gaussian.standard_deviations(layout.prior)
    return np.asarray(np.max(away, axis=1, initial=0.0))


def reached(layout: Layout, cavity: gaussian.Gaussian) -> Array:
    """The point that a cavity, which may be improper, leads to, (m,): its mean with the prior's precision or more."""
    mean, root = gaussian.affine(layout.prior)
    values, axes = np.linalg.eigh(root.T @ cavity.precision @ root)
    pull = root.T @ (cavity.linear - cavity.precision @ mean)
    return np.asarray(mean + root @ (axes @ ((axes.T @ pull) / np.maximum(np.abs(values), _VAGUEST))))


def fewest(policy: Policy, wanted: int) -> float:
    """Fewest rows that a client tells of for an agreement, where the server wants at least `wanted`.

    >>> fewest(Policy(agreement=10), 20), fewest(Policy(agreement=10), 5), fewest(Policy(epsilon=1.0), 5)
    (20.0, 10.0, inf)
    """
    return float(np.inf if policy.epsilon is not None else max(policy.agreement, wanted))


def refuse_release(policy: Policy, noise_multiplier: float | None, spent: float, unknown: int) -> str | None:
    """The rule that one more release breaks, or None; `spent` is Σ 1 / z² of earlier ones, `unknown` has no ε."""
    if policy.epsilon is None:  # else a privacy filter: the sum is compared, whatever the earlier settings were
        return None
    if noise_multiplier is None or unknown:
        return f"epsilon: of {unknown} earlier replies no ε is known" if unknown else "epsilon: none is known"
    mu = 2.0 * np.sqrt(spent + noise_multiplier**-2)
    if privacy.delta_at(policy.epsilon, mu) > policy.delta:
        epsilon = privacy.epsilon_at(policy.delta, mu)
        return f"epsilon: {epsilon:.4g} with this release, at most {policy.epsilon:g} wanted at δ = {policy.delta:g}"
    return None


# By how many rows a client's data differ from those of earlier answers, by keyed digests of their cells ---------------
# Two answers at one point, about data that differ by a row, differ by the contribution of that row.

Cells = NDArray[np.uint64]
Version = Mapping[str, Cells]
"""Digests of each column's cells, in the order of rows; of an array with more axes a cell is all of a row."""

_LABEL = b"fedppl: cells of data"
_DIGEST = 8  # bytes
_STEP = np.uint64(0x9E3779B97F4A7C15)


def version_of(columns: Mapping[str, Any], key: bytes) -> dict[str, Cells]:
    """Digests of all cells. The key prevents comparison with guessed values."""
    cell_key = hmac.digest(key, _LABEL, "sha256")
    cells = {}
    for name in sorted(columns):
        array = plain(np.atleast_1d(np.asarray(columns[name])))
        rows = array.reshape(len(array), -1)
        # Texts by their value, whatever the width of the array; numbers by their bytes.
        text = array.dtype.kind in "OUS"
        raw = [repr(row.tolist()).encode(errors="surrogatepass") if text else row.tobytes() for row in rows]
        digests = {cell: hashlib.blake2b(cell, digest_size=_DIGEST, key=cell_key).digest() for cell in set(raw)}
        cells[name] = np.frombuffer(b"".join(digests[cell] for cell in raw), dtype="<u8")
    return cells


def changed_rows(before: Version, after: Version, fewest: float) -> int:
    """Number of rows by which two versions differ, if it is positive and less than `fewest`; else 0.

    An edited row counts once. Where a site standardises a column by its own mean, all rows differ as a whole: so
    columns are compared one by one too, if most values are distinct, or if values were only added or only removed.

    Examples
    --------
    >>> rows = {"age": np.arange(40.0)}
    >>> now = version_of({"age": np.append(rows["age"], 71.0)}, b"key")
    >>> changed_rows(version_of(rows, b"key"), now, 10), changed_rows(version_of(rows, b"key"), now, 1)
    (1, 0)
    """
    tables: dict[tuple[int, int], list[str]] = {}
    for name in after:
        if name in before:
            tables.setdefault((len(after[name]), len(before[name])), []).append(name)
    for sizes, together in sorted(tables.items(), reverse=True):
        counts = [max(_apart(*(_rows([version[name] for name in together]) for version in (before, after))))]
        if counts == [0]:
            continue
        for name in together:
            added, removed = _apart(before[name], after[name])
            # In a column of few values two cohorts have similar counts by chance, but seldom all counts grow.
            grown = sizes[0] != sizes[1] and min(added, removed) == 0
            distinct = min(len(np.unique(cells)) / max(len(cells), 1) for cells in (before[name], after[name]))
            if grown or distinct > 0.5:
                counts.append(max(added, removed))
        # Only the longest table that changed: shorter ones are of groups, or computed from rows.
        return min((count for count in counts if 0 < count < fewest), default=0)
    return 0


def refuse_version(earlier: Sequence[Version], present: Version, fewest: float) -> str | None:
    """The rule that data break which differ by few rows from those of an earlier answer, or None."""
    for number, before in enumerate(earlier, start=1):
        if count := changed_rows(before, present, fewest):
            since = f"since version {number} of {len(earlier)} that was answered about, at least {fewest:g} wanted"
            return f"changed_rows: {count} {since}, or none; wait for more, or give the site those data again"
    return None


def _rows(cells: Sequence[Cells]) -> Cells:
    """One number a row. Digests are random already, so that only the order of columns has to be mixed in."""
    total = np.zeros(len(cells[0]), dtype=np.uint64)
    for column in cells:
        total = (total ^ (total >> np.uint64(29))) * _STEP + column
    return total


def _apart(before: Cells, after: Cells) -> tuple[int, int]:
    """Numbers of rows added and of rows removed."""
    _, places = np.unique(np.concatenate([before, after]), return_inverse=True)
    size = int(places.max(initial=-1)) + 1
    difference = np.bincount(places[len(before) :], minlength=size) - np.bincount(places[: len(before)], minlength=size)
    return int(difference[difference > 0].sum()), int(-difference[difference < 0].sum())

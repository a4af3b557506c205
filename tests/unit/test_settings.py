"""Rules of keywords: what each function lets through, and that every keyword of every builder has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedppl
from fedppl import DeclarationError, covariance, settings
from tests.cases import CASES

# What keywords without a default may be: what the rows of the table have, and what is in no row.
NEEDED = {name: value for case in CASES.values() for name, value in case.settings.items()} | {"rank": 1}
NOTHING = inspect.Parameter.empty
# The rules of PrivateEP's keywords are tested beside it.
BUILDERS = [
    build
    for where in (fedppl, fedppl.local, fedppl.averaging, fedppl.one_shot, fedppl.curves, covariance)
    for name in where.__all__
    if inspect.isfunction(build := getattr(where, name)) and name not in ("PrivateEP", "grid", "holdout", "hypotheses")
    if name[0].isupper() or where is covariance
]
KEYWORDS = [
    pytest.param(build, keyword, id=f"{build.__name__} {keyword.name}")
    for build in BUILDERS
    for keyword in inspect.signature(build).parameters.values()
]


def needed(build: Callable[..., Any]) -> dict[str, Any]:
    keywords = inspect.signature(build).parameters.values()
    return {keyword.name: NEEDED[keyword.name] for keyword in keywords if keyword.default is NOTHING}


@pytest.mark.parametrize(("build", "keyword"), KEYWORDS)
def test_every_keyword_refuses_what_can_be_no_setting(build: Callable[..., Any], keyword: inspect.Parameter) -> None:
    for value in (object(), "nonsense", float("nan"), -1):
        with pytest.raises(DeclarationError, match=keyword.name):
            build(**{**needed(build), keyword.name: value})


@pytest.mark.parametrize(("build", "keyword"), KEYWORDS)
def test_a_number_may_be_numpys_and_may_not_be_a_truth_value(
    build: Callable[..., Any], keyword: inspect.Parameter
) -> None:
    default = NEEDED.get(keyword.name) if keyword.default is NOTHING else keyword.default
    if isinstance(default, bool) or not isinstance(default, int | float):
        return
    scalar = np.int64(default) if isinstance(default, int) else np.float64(default)
    built, again = build(**needed(build)), build(**{**needed(build), keyword.name: scalar})
    assert getattr(built, "settings", None) == getattr(again, "settings", None)  # or a run would not be resumed
    with pytest.raises(DeclarationError, match=f"{keyword.name}=True"):
        build(**{**needed(build), keyword.name: True})


@pytest.mark.parametrize(
    ("rule", "value", "found"),
    [
        (lambda v: settings.between("x", v, 0, 1), 0.5, 0.5),
        (lambda v: settings.between("x", v, 0, 1), 0, None),
        (lambda v: settings.between("x", v, 0, 1), 1, None),
        (lambda v: settings.between("x", v, 0, 1, "[]"), 0, 0.0),
        (lambda v: settings.between("x", v, 0, 1, "[]"), np.float32(1), 1.0),
        (lambda v: settings.between("x", v, 0, np.inf, "[]"), np.inf, None),
        (lambda v: settings.positive("x", v), 10**400, None),
        (lambda v: settings.positive("x", v), "1", None),
        (lambda v: settings.whole("x", v), 1, 1),
        (lambda v: settings.whole("x", v, 0), 0, 0),
        (lambda v: settings.whole("x", v), 1.0, None),
        (lambda v: settings.whole("x", v), 0, None),
        (lambda v: settings.one_of("x", v, ("a", "b")), "a", "a"),
        (lambda v: settings.one_of("x", v, ("a", "b")), "ab", None),
        (lambda v: settings.one_of("x", v, ("a", "b")), np.array(["a", "b"]), None),
        (lambda v: settings.flag("x", v), np.True_, True),
        (lambda v: settings.flag("x", v), 1, None),
    ],
)
def test_rules(rule: Callable[[Any], Any], value: Any, found: Any) -> None:
    if found is None:
        with pytest.raises(DeclarationError, match="^x="):
            rule(value)
    else:
        assert rule(value) == found and type(rule(value)) is type(found)


LOCAL = [build for build in BUILDERS if "local" in inspect.signature(build).parameters]


@pytest.mark.parametrize("build", LOCAL)
@pytest.mark.parametrize(
    ("local", "remedy"),
    [
        (fedppl.local.NUTS, r"call it: fedppl\.local\.NUTS\(\)"),
        ("nuts", r"pass fedppl\.local\.NUTS\(\)"),
        ("nested_laplace", r"pass fedppl\.local\.NestedLaplace\(\)"),
        (3, r"pass one, such as fedppl\.local\.NestedLaplace\(\)"),
    ],
)
def test_a_local_inference_that_is_not_built(build: Callable[..., Any], local: Any, remedy: str) -> None:
    assert len(LOCAL) >= 6
    with pytest.raises(DeclarationError, match=f"local=.*{remedy}"):
        build(local=local)


@pytest.mark.parametrize("build", BUILDERS)
def test_what_is_built_is_shown_in_a_line_without_addresses(build: Callable[..., Any]) -> None:
    if build is not fedppl.InProcess:
        text = repr(build(**needed(build)))
        assert len(text) < 400 and " at 0x" not in text and "\n" not in text
    assert "structure='diagonal'" in repr(fedppl.EP(structure="diagonal"))

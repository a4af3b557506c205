"""Formulas of the site: what TeX reads is what the browser shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("docutils", minversion="0.22")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mathml() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mathml", ROOT / "docs" / "mathml.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\tfrac12 Q_k", r"\tfrac{1}{2} Q_k"),
        (r"\frac1{nK} \sum_k x", r"\frac{1}{nK} \sum_k x"),
        (r"\frac{a}2 x", r"\frac{a}{2} x"),
        (r"\tfrac\lambda2 x", r"\tfrac{\lambda}{2} x"),
        (r"\frac1{n} \frac12", r"\frac{1}{n} \frac{1}{2}"),
        (r"x^12", r"x^{1}2"),
        (r"\mathrm E_q", r"{\mathrm{E}}_q"),
        (r"\Big(\sum_k x\Big)", r"\Bigl(\sum_k x\Bigr)"),
        (r"1, \dots, S", r"1, \ldots, S"),
    ],
)
def test_one_token_without_braces_is_one_token(mathml: ModuleType, written: str, meant: str) -> None:
    assert mathml.convert(written, as_block=False) == mathml.convert(meant, as_block=False)


def test_an_index_of_what_has_an_accent_is_beside_it(mathml: ModuleType) -> None:
    tags = [
        re.sub("{.*}", "", one.tag)
        for one in ElementTree.fromstring(mathml.convert(r"\tilde p_k", as_block=True)).iter()
    ]
    assert tags == ["math", "msub", "mover", "mi", "mo", "mi"]


def test_every_formula_of_the_pages_can_be_converted(mathml: ModuleType) -> None:
    found = 0
    for page in ROOT.glob("docs/*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for formula in re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL):
            found += mathml.convert(formula, as_block=True).startswith("<math")
    assert found > 4

"""What differs between a site's declaration and the server's, by name."""

from __future__ import annotations

from typing import Any

from fedppl.model.checks import fingerprint
from fedppl.sites import decode as _decode
from fedppl.sites.wire import other_model, other_terms, shapes_of_hello
from fedppl.types import Layout
from tests.support import malformed

SETTINGS = {"damping": "1.0"}


def difference(settings: Any = None, labels: tuple[str, ...] = ("dose", "age"), **prior: Any) -> str | None:
    arrays, texts = malformed.hello(
        "b", settings or SETTINGS, layout=malformed.layout(**prior), reader=malformed.reader(labels)
    )
    ours = malformed.terms(SETTINGS)
    return other_terms(ours, texts) or other_model(ours, _decode.arrays(arrays, shapes_of_hello(ours.layout)), texts)


def test_what_differs_is_named() -> None:
    assert difference() is None
    assert "mu[0] has mean 100 and sd 0.01, there 0 and 10" in str(difference(mean=100.0, sd=0.01))
    turned = str(difference(labels=("age", "dose")))
    assert "its dim 'predictor' has label 'age' in place 0, at the server it is 'dose'" in turned
    assert "'b' in place 1, at the server it is 'age'" in str(difference(labels=("dose", "b")))
    assert "shared variable 'mu' has dims None" in str(difference(dims=False))
    assert "its algorithm has damping 0.5 instead of 1.0" in str(difference({"damping": "0.5"}))


def test_priors_of_one_mean_and_covariance_are_told_apart() -> None:
    ours, prior = malformed.terms(SETTINGS), malformed.layout().prior
    moved = malformed.layout()
    density = tuple(value + 1.0 for value in moved.density)
    told = fingerprint(moved.variables, prior, True, density)
    arrays, texts = malformed.hello("b", SETTINGS, layout=Layout(moved.variables, prior, True, told, density))
    found = other_model(ours, _decode.arrays(arrays, shapes_of_hello(ours.layout)), texts)
    assert "correlations, or in its density" in str(found)

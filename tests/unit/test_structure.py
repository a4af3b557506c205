"""Structures of precisions: partitions, moment matching inside a family, packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from fedppl import gaussian as ga
from fedppl import structure as sr
from fedppl.gaussian import Gaussian
from fedppl.structure import Structure
from tests.support.matrices import matrix, spd

Array = NDArray[np.float64]
few = settings(max_examples=20, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1)


def test_structures() -> None:
    """The factories, their packed sizes and neutral elements."""
    assert sr.full(3) == Structure(3, ((0, 1, 2),))
    assert sr.diagonal(3) == Structure(3, None)
    assert sr.full(1) == Structure(1, ((0,),))
    assert sr.block(4, [[3, 1], np.array([0, 2])]) == Structure(4, ((3, 1), (0, 2)))  # type: ignore[list-item]
    structures = [sr.full(4), sr.diagonal(4), sr.block(4, [(0, 2, 3), (1,)])]
    assert [sr.packed_size(s) for s in structures] == [10, 4, 7]
    assert [sr.zeros(s).precision.shape for s in structures] == [(4, 4), (4,), (4, 4)]
    for structure in structures:
        neutral = sr.zeros(structure)
        assert neutral.linear.shape == (4,)
        assert not neutral.linear.any() and not neutral.precision.any()


@pytest.mark.parametrize(
    ("size", "blocks", "message"),
    [
        (3, [(0, 1)], r"missing \[2\], duplicate \[\]"),
        (3, [(0, 1), (1, 2)], r"missing \[\], duplicate \[1\]"),
        (3, [(0, 1, 2, 3)], r"out of range \[3\]"),
        (2, [(0, -1)], r"missing \[1\], duplicate \[\], out of range \[-1\]"),
        (2, [(0, 1), ()], "no empty block"),
        (0, [], "size is 0"),
    ],
)
def test_blocks_must_partition(size: int, blocks: list[tuple[int, ...]], message: str) -> None:
    """Errors name what is missing, duplicated or foreign."""
    with pytest.raises(ValueError, match=message):
        sr.block(size, blocks)


STRUCTURES = [sr.full(4), sr.diagonal(4), sr.block(4, [(2, 0), (1, 3)]), sr.block(4, [(1,), (0, 3, 2)])]


@given(seeds, st.sampled_from(STRUCTURES))
@few
def test_project_against_direct_marginal_inverses(seed: int, structure: Structure) -> None:
    """Each block of the result inverts that block of Σ; μ is kept; entries between blocks are exact zeros."""
    rng = np.random.default_rng(seed)
    centre, sigma = rng.normal(size=4), spd(rng, 4)
    result = sr.project(centre, sigma, structure)
    expected = np.zeros((4, 4))
    for indices in structure.blocks or [(0,), (1,), (2,), (3,)]:
        pairs = np.ix_(indices, indices)
        expected[pairs] = np.linalg.inv(sigma[pairs])
    assert result.precision.ndim == (1 if structure.blocks is None else 2)
    assert_allclose(matrix(result), expected, rtol=1e-9, atol=1e-12)
    assert_array_equal(matrix(result)[expected == 0], 0.0)
    assert_allclose(result.linear, expected @ centre, rtol=1e-9, atol=1e-11)
    assert_allclose(ga.mean(result), centre, rtol=1e-9, atol=1e-11)


def test_project_minimises_the_divergence() -> None:
    """Moving the projection in any direction of its family raises KL(p ‖ q)."""
    rng = np.random.default_rng(18)
    p = Gaussian(rng.normal(size=4), spd(rng, 4))
    structure = sr.block(4, [(2, 0), (1, 3)])
    best = sr.project(ga.mean(p), ga.covariance(p), structure)
    for _ in range(20):
        push = sr.unpack_precision(rng.normal(size=sr.packed_size(structure)), structure)
        moved = Gaussian(best.linear + 0.01 * rng.normal(size=4), best.precision + 0.01 * push)
        assert ga.kl(p, moved) > ga.kl(p, best)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_project_takes_variances(structure: Structure) -> None:
    """Variances (m,) mean the diagonal covariance."""
    centre, variances = np.arange(4.0), np.array([1.0, 2.0, 4.0, 8.0])
    expected = sr.project(centre, np.diag(variances), structure)
    for got, wanted in zip(sr.project(centre, variances, structure), expected, strict=True):
        assert_array_equal(got, wanted)


def test_project_refuses() -> None:
    """A block that is not positive definite is named; the rest of Σ need not be; shapes are checked."""
    singular = np.ones((3, 3)) + np.diag([1.0, 0.0, 0.0])
    structure = sr.block(3, [(0,), (1, 2)])
    with pytest.raises(ValueError, match=r"covariance of block \(1, 2\) has smallest eigenvalue"):
        sr.project(np.zeros(3), singular, structure)
    assert_allclose(sr.project(np.zeros(3), singular, sr.diagonal(3)).precision, [0.5, 1.0, 1.0])
    for centre, sigma in ((np.zeros(2), np.eye(3)), (np.zeros(3), np.eye(2)), (np.zeros(3), np.ones((1, 3, 3)))):
        with pytest.raises(ValueError, match="structure of size 3"):
            sr.project(centre, sigma, structure)


@given(seeds, st.sampled_from(STRUCTURES))
@few
def test_precision_round_trip(seed: int, structure: Structure) -> None:
    """Packed triangles block after block, exact both ways."""
    rng = np.random.default_rng(seed)
    vector = rng.normal(size=sr.packed_size(structure))
    unpacked = sr.unpack_precision(vector, structure)
    assert unpacked.shape == sr.zeros(structure).precision.shape
    assert_array_equal(sr.pack_precision(unpacked, structure), vector)
    if structure.blocks is not None:
        parts = [ga.pack_triangle(unpacked[np.ix_(b, b)]) for b in structure.blocks]
        assert_array_equal(np.concatenate(parts), vector)
        assert_array_equal(unpacked, unpacked.T)
        assert np.count_nonzero(unpacked) == sum(len(b) ** 2 for b in structure.blocks)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_packing_of_a_batch_equals_loop(structure: Structure) -> None:
    """Leading dimensions stay in front."""
    vectors = np.random.default_rng(27).normal(size=(2, 3, sr.packed_size(structure)))
    unpacked = sr.unpack_precision(vectors, structure)
    assert_array_equal(sr.pack_precision(unpacked, structure), vectors)
    for index in np.ndindex(2, 3):
        assert_array_equal(unpacked[index], sr.unpack_precision(vectors[index], structure))


def test_packing_reads_the_symmetric_part() -> None:
    """As everywhere: rounding that made a matrix lopsided is averaged away."""
    assert_array_equal(sr.pack_precision(np.array([[1.0, 2.0], [4.0, 5.0]]), sr.full(2)), [1.0, 3.0, 5.0])


def test_packing_refuses_to_lose_entries() -> None:
    """Couplings between blocks, wrong shapes and wrong lengths are errors; packed vectors are copies."""
    with pytest.raises(ValueError, match=r"precision\[0, 2\] is 1 "):
        sr.pack_precision(np.ones((3, 3)), sr.block(3, [(0, 1), (2,)]))
    with pytest.raises(ValueError, match=r"precision\[2, 0\] is nan "):
        stacked = np.stack([np.eye(3), np.eye(3)])
        stacked[1, 2, 0] = np.nan
        sr.pack_precision(stacked, sr.block(3, [(0, 1), (2,)]))
    with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
        sr.pack_precision(np.eye(2), sr.diagonal(3))
    for misfit in (np.ones(3), np.eye(2), np.ones((3, 2)), np.array(1.0)):
        with pytest.raises(ValueError, match=r"must have shape \(3, 3\)"):
            sr.pack_precision(misfit, sr.full(3))
    with pytest.raises(ValueError, match=r"must have shape \(6,\)"):
        sr.unpack_precision(np.zeros(5), sr.full(3))
    vector = np.ones(2)
    sr.pack_precision(vector, sr.diagonal(2))[0] = 5.0
    sr.unpack_precision(vector, sr.diagonal(2))[0] = 5.0
    assert_array_equal(vector, 1.0)


def test_everything_public_is_listed_and_documented() -> None:
    """__all__ names what exists, and each has a docstring."""
    assert len(set(sr.__all__)) == len(sr.__all__)
    for name in sr.__all__:
        assert getattr(sr, name).__doc__, name

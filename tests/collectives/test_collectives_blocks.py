"""How an array is cut: into blocks, and these into chunks. Every rank cuts alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives import parts
from zstrat.collectives.schedules._chunks import Block, BlockTraits, cut


@given(count=st.integers(0, 2**40), grains=st.integers(1, 2**14))
def test_chunks_cover_a_block_and_are_no_larger_than_asked(count, grains) -> None:
    elements = 64 * grains
    step, chunks = cut(count, elements)
    assert 0 < step <= elements
    assert (chunks - 1) * step < max(count, 1) <= chunks * step
    assert not step % 64


@given(count=st.integers(1, 10**6), elements=st.integers(1, 63))
def test_chunks_have_64_elements_at_least(count, elements) -> None:
    assert cut(count, elements)[0] == 64


@given(count=st.integers(0, 300), size=st.integers(1, 20))
def test_blocks_are_neighbours_and_nearly_alike(count, size) -> None:
    flat = np.arange(count)
    blocks = parts(flat, size)
    np.testing.assert_array_equal(np.concatenate(blocks), flat)
    lengths = [len(block) for block in blocks]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert all(block.base is flat for block in blocks)


def test_parts_of_a_chunk() -> None:
    block = Block(0, BlockTraits(()), np.arange(130), None)
    assert block.cut(64) == 3
    assert [len(block.part(np.arange(130), chunk)) for chunk in range(3)] == [64, 64, 2]

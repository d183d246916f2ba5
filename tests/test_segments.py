"""Tiles: every row with an adapter lies in exactly one tile of its own adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax.kernels.tiles import max_tiles
from scute_jax.segments import block_segments


def check_tiles(seg, ids_in_order):
    """The invariants of Tiles and Segments, in plain Python."""
    covered = np.zeros(len(ids_in_order), int)
    for slot, start, rows in zip(
        *map(np.asarray, (seg.tiles.slot, seg.tiles.start, seg.tiles.rows)), strict=True
    ):
        assert 0 <= rows <= seg.tiles.size
        covered[start : start + rows] += 1
        assert (ids_in_order[start : start + rows] == slot).all()
    np.testing.assert_array_equal(covered, ids_in_order >= 0)


grouped = jax.jit(sj.segments, static_argnames=("num_adapters", "tile"))


@given(
    st.sampled_from([1, 30, 90]).flatmap(
        lambda n: st.lists(st.integers(-1, 6), min_size=n, max_size=n)
    ),
    st.sampled_from([None, 1, 4, 64]),
)
@settings(max_examples=60, deadline=None)
def test_segments_of_any_ids(ids, tile):
    ids = np.asarray(ids)
    seg = grouped(ids, num_adapters=7, tile=tile)
    order = np.asarray(seg.order)
    assert sorted(order) == list(range(len(ids)))
    np.testing.assert_array_equal(ids[order], seg.slot)
    assert (np.diff(seg.slot) >= 0).all()
    check_tiles(seg, ids[order])


def test_sorting_is_undone():
    seg = sj.segments(np.array([3, -1, 0, 3, 1, -1]), 7)
    x = np.arange(6)[:, None]
    np.testing.assert_array_equal(seg.sort(jnp.asarray(x))[:, 0], [1, 5, 2, 4, 0, 3])
    np.testing.assert_array_equal(seg.unsort(seg.sort(jnp.asarray(x))), x)


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 16, 64]))
def test_the_number_of_tiles_suffices_for_the_worst_grouping(rows, slots, size):
    used = min(rows, slots)
    counts = np.ones(used, int)
    counts[0] += rows - used
    for worst in (counts, np.bincount(np.arange(rows) % used)):
        assert np.sum(-(-worst // size)) <= max_tiles(rows, slots, size)


def test_no_adapters_at_all():
    seg = sj.segments(np.full(5, -1), 0)
    assert not np.asarray(seg.tiles.rows).any()


def test_blocks_are_tiles_and_padding_is_nobodys():
    seg = block_segments(jnp.asarray([2, -1, 0]), jnp.asarray([4, 3, 1]), 4, 3)
    np.testing.assert_array_equal(seg.slot, [2, 2, 2, 2, -1, -1, -1, -1, 0, -1, -1, -1])
    check_tiles(seg, np.asarray(seg.slot))


@pytest.mark.parametrize(
    "rows, adapters, size", [(16, 16, 1), (64, 16, 1), (512, 16, 32), (8192, 16, 64)]
)
def test_the_tile_fits_the_shape(rows, adapters, size):
    assert sj.segments(np.full(rows, -1), adapters).tiles.size == size

"""The segmented expand on Mosaic GPU: its numbers where jax can interpret it, and its lowering.

What is not an adapter's own holds NaN: rows and ranks of `low`, ranks of B.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from scute_jax.kernels import mosaic
from scute_jax.kernels.pools import LowRank, Vectors, at_tiles
from scute_jax.kernels.segmented_expand import pallas, reference
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.tiles import make_tiles

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
NARROW = ExpandTile(block_n=64, mosaic=True)
# As in test_twins: float32 sums in another order, half precision rounds the output once.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-10}
MIXES = [(half, h) for half in ("bfloat16", "float16") for h in (half, "float32")]
CASES = {  # ranks of the adapters, their rows, widths of the slices, parts of low
    "one page": ((5, 16, 0, 3), (70, 13, 20, 64), (144, 64), 2),
    "a chunk of pages": ((40, 64), (65, 63), (80,), 1),
    "chunks of pages": ((16, 100, 0), (1, 66, 5), (64,), 1),
}
combinations = pytest.mark.parametrize(
    "case, dtype, h_dtype",
    [("one page", *mix) for mix in MIXES]
    + [(case, "bfloat16", "float32") for case in CASES if case != "one page"],
)


def arrays(case, dtype, h_dtype, riding=True, size=64, base=7):
    """The arguments of the expand, and which rows are of the base model."""
    ranks, rows, widths, parts = CASES[case]
    rng, K, room = np.random.default_rng(0), len(ranks), -(-max(ranks) // 16)
    slot = np.repeat(np.arange(-1, K), [base, *rows]).astype(np.int32)
    tiles = make_tiles(jnp.asarray(slot), K, size)
    n = tiles.slot.shape[0]

    def normal(dtype, *shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def factors(d_out):
        table = rng.permutation(K * room).reshape(K, room).astype(np.int32)
        own = np.zeros((K * room, 16), bool)
        for k, rank in enumerate(ranks):
            own[table[k]] = (np.arange(room * 16) < rank).reshape(room, 16)
        B = jnp.where(own[:, :, None], normal(dtype, K * room, 16, d_out), jnp.nan)
        A = jnp.zeros((K * room, 16, 8), dtype)
        pool = LowRank(A, B, jnp.asarray(table), jnp.asarray(ranks, jnp.int32))
        return at_tiles(pool, tiles.slot)

    def vectors(d_out):
        row = np.arange(K, dtype=np.int32) % 3 - 1
        return at_tiles(Vectors(normal(dtype, 2, d_out), jnp.asarray(row)), tiles.slot)

    def low(pool):
        own_rows = np.arange(size) < np.asarray(tiles.rows)[:, None]
        own_ranks = np.arange(room * 16) < np.asarray(pool.rank)[:, None]
        own = own_rows[:, :, None] & own_ranks[:, None, :]
        return jnp.where(own[None], normal("float32", parts, n, size, room * 16), jnp.nan)

    h = tuple(normal(h_dtype, len(slot), d) for d in widths)
    pools = tuple(factors(d) for d in widths)
    scale = tuple(vectors(d) if riding else None for d in widths)
    shift = tuple(vectors(d) if riding and i == 0 else None for i, d in enumerate(widths))
    return (h, tuple(map(low, pools)), pools, scale, shift, tiles), slot < 0


@pytest.mark.skipif(mosaic.INTERPRETER is None, reason="this jax cannot interpret Mosaic GPU")
@combinations
def test_against_the_definition(case, dtype, h_dtype):
    (h, *parts, tiles), of_base = arrays(case, dtype, h_dtype)
    ours = pallas.segmented_expand(h, *parts, tiles, NARROW, interpret=True)
    for y, own_h, *own in zip(ours, h, *parts, strict=True):
        expected = np.asarray(reference.segmented_expand(own_h, *own, tiles), np.float64)
        bound = TOLERANCE[h_dtype] * np.abs(expected).max()
        assert np.abs(np.asarray(y, np.float64) - expected).max() <= bound
        np.testing.assert_array_equal(np.asarray(y)[of_base], np.asarray(own_h)[of_base])


def lowered(args, tile) -> str:
    with use_abstract_mesh(AbstractMesh((1,), ("one",), abstract_device=H200)):
        traced = jax.jit(lambda *a: pallas.segmented_expand(*a, tile)).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@combinations
def test_it_lowers(case, dtype, h_dtype):
    args, _ = arrays(case, dtype, h_dtype, riding=case == "one page")
    assert "mosaic_gpu" in lowered(args, NARROW)


def test_triton_takes_what_mosaic_does_not():
    for dtype, h_dtype, size in (("float32", "float32", 64), ("bfloat16", "float32", 16)):
        args, _ = arrays("one page", dtype, h_dtype, size=size)
        text = lowered(args, ExpandTile(mosaic=True))
        assert "triton" in text and "mosaic_gpu" not in text
    args, _ = arrays("one page", "bfloat16", "bfloat16")
    assert "mosaic_gpu" not in lowered(args, ExpandTile())

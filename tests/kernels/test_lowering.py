"""Every Pallas kernel is lowered for an NVIDIA GPU, in all dtypes of which serving mixes it.

No GPU is needed. Interpreted kernels, as a CPU runs them, accept products of mixed dtypes and
blocks of any side; compiled ones do not, and this is where that shows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from scute_jax.kernels.block_rotate import pallas_triton as rotate
from scute_jax.kernels.paged_attention.pallas_triton import paged_attention
from scute_jax.kernels.paged_rope.pallas_triton import paged_rope
from scute_jax.kernels.pools import LowRank, Rotation, Shared, SparseEntries, Vectors, at_tiles
from scute_jax.kernels.residual_norm.pallas_triton import residual_norm
from scute_jax.kernels.rope_attention.pallas_triton import rope_attention
from scute_jax.kernels.segmented_expand.pallas_triton import segmented_expand
from scute_jax.kernels.segmented_linear.pallas_triton import LinearTile, segmented_linear
from scute_jax.kernels.segmented_shrink.pallas_triton import segmented_shrink
from scute_jax.kernels.shared_factors.pallas_triton import shared_factors
from scute_jax.kernels.sparse_update.pallas_triton import sparse_update
from scute_jax.kernels.tiles import make_tiles

T, D, K = 24, 96, 3  # rows, width of x and h, adapters
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
# The dtype of the pools and of x, and that of h: half-precision products are taken in float32.
MIXES = [("float32", "float32")]
MIXES += [(half, h) for half in ("bfloat16", "float16") for h in (half, "float32")]


def zeros(dtype, *shape):
    return jnp.zeros(shape, dtype)


def low_rank(dtype, d_in=D, d_out=D, pages=2):
    table, rank = zeros("int32", K, pages), zeros("int32", K)
    return LowRank(zeros(dtype, 6, 16, d_in), zeros(dtype, 6, 16, d_out), table, rank)


def vectors(dtype):
    return Vectors(zeros(dtype, 2, D), zeros("int32", K))


def rotation(dtype, m, ordered):
    order = jnp.arange(D, dtype=jnp.int32) if ordered else None
    return Rotation(zeros(dtype, 2, D // m, m, m), zeros("int32", K), order)


def batch(dtype, h_dtype, size=16):
    slot = zeros("int32", T)
    return zeros(dtype, T, D), zeros(h_dtype, T, D), slot, make_tiles(slot, K, size)


def lowers(twin, *args):
    """The twin becomes code for a GPU."""
    with use_abstract_mesh(AbstractMesh((1,), ("one",), abstract_device=H200)):
        traced = jax.jit(lambda *a: twin(*a)).trace(*args)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


mixes = pytest.mark.parametrize("dtype, h_dtype", MIXES)
tile_sizes = pytest.mark.parametrize("size", [1, 16])


@mixes
@tile_sizes
@pytest.mark.parametrize("m", [2, 3, 15, 16, 32])
@pytest.mark.parametrize("ordered", [False, True])
def test_rotations(dtype, h_dtype, size, m, ordered):
    _, h, slot, tiles = batch(dtype, h_dtype, size)
    lowers(rotate.block_rotate, (h, h), (rotation(dtype, m, ordered),) * 2, tiles, slot)


@mixes
@tile_sizes
def test_scaled_inputs(dtype, h_dtype, size):
    _, h, slot, tiles = batch(dtype, h_dtype, size)
    lowers(rotate.scale_input, (h, h), (vectors(dtype),) * 2, tiles, slot)


@mixes
@tile_sizes
def test_the_segmented_update(dtype, h_dtype, size):
    x, h, _, tiles = batch(dtype, h_dtype, size)
    factors = (low_rank(dtype), None, low_rank(dtype))

    def twin(h, x, factors, scale, shift):
        low = segmented_shrink(x, factors, tiles)
        return segmented_expand(h, low, factors, scale, shift, tiles)

    def at(*pools):
        return tuple(at_tiles(pool, tiles.slot) for pool in pools)

    riding = at(vectors(dtype), vectors(dtype), None)
    lowers(twin, (h, h, h), x, at(*factors), riding, riding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@tile_sizes
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tile", [LinearTile(programs=1, block_k=16), LinearTile(shrink_k=16)])
def test_the_product_with_what_rides_on_it(dtype, size, scaled, tile):
    x, _, _, tiles = batch(dtype, dtype, size)
    W, pools = zeros(dtype, D, D), (low_rank(dtype), None, low_rank(dtype))
    factors, shift = (
        tuple(at_tiles(pool, tiles.slot) for pool in own)
        for own in (pools, (vectors(dtype), vectors(dtype), None))
    )
    scale = shift if scaled else (None,) * 3
    twin = partial(segmented_linear, tile=tile)
    lowers(twin, (x,) * 3, x, (W,) * 3, factors, scale, shift, tiles)


@tile_sizes
@pytest.mark.parametrize("pages", [1, 5, 6, 16])
def test_any_number_of_pages_rides(size, pages):
    x, _, _, tiles = batch("bfloat16", "bfloat16", size)
    W, none = zeros("bfloat16", D, D), (None,)
    factors = (at_tiles(low_rank("bfloat16", pages=pages), tiles.slot),)
    twin = partial(segmented_linear, tile=LinearTile())
    lowers(twin, (x,), x, (W,), factors, none, none, tiles)


@mixes
@pytest.mark.parametrize("with_u", [False, True])
def test_shared_factors(dtype, h_dtype, with_u):
    x, h, slot, _ = batch(dtype, h_dtype)
    row = zeros("int32", K, 2)
    vector = zeros(dtype, 4, D)
    u = vector if with_u else None
    shared = Shared(low_rank(dtype), zeros(dtype, 4, 32), vector, u, row, row)
    in_parts = jnp.zeros((3, *h.shape), jnp.float32)
    lowers(shared_factors, (h, in_parts), x, (shared, shared), slot)


@mixes
@tile_sizes
def test_sparse_matrices(dtype, h_dtype, size):
    x, h, _, tiles = batch(dtype, h_dtype, size)
    starts, rows = zeros("int32", 2, D + 1), zeros("int32", 2, 50)
    sparse = SparseEntries(starts, rows, zeros(dtype, 2, 50), zeros("int32", K))
    lowers(sparse_update, h, x, sparse, tiles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 32])
def test_attention(dtype, size):
    q, pages = zeros(dtype, 3, size, 6, 64), zeros(dtype, 8, 2, 16, 64)
    table, start, rows = zeros("int32", 3, 4), zeros("int32", 3), zeros("int32", 3)
    lowers(paged_attention, q, pages, pages, table, start, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("x_dtype", ["float32", "as the pages"])
@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("twin", [paged_rope, rope_attention])
def test_rope_with_pages(dtype, x_dtype, size, twin):
    heads = partial(zeros, "float32" if x_dtype == "float32" else dtype)
    split = heads(5, 3 * size, 6, 64), heads(1, 3 * size, 2, 64), heads(1, 3 * size, 2, 64)
    wave, pages = zeros("float32", 3 * size, 32), zeros(dtype, 8, 2, 16, 64)
    table, numbers = zeros("int32", 3, 4), zeros("int32", 3)
    for qkv in ((heads(1, 3 * size, 10, 64),), split):
        lowers(twin, qkv, pages, pages, wave, wave, table, numbers, numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parts", [1, 8])
def test_the_residual_stream(dtype, parts):
    x, added, weight = zeros("float32", T, D), zeros("float32", parts, T, D), zeros(dtype, D)
    lowers(partial(residual_norm, eps=1e-5, dtype=dtype), x, added, weight)

"""The segmented shrink on Pallas' Triton backend: all slices in one launch.

A program takes a block of ranks of one slice, one tile of rows and one part of d_in; where the
tile's adapter has no such ranks, it does nothing. The parts are summed by the expand, which reads
them anyway.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, most_ranks
from scute_jax.kernels.precision import precision
from scute_jax.kernels.rank_blocks import RankBlocks, block_size
from scute_jax.kernels.spans import Spans
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, TileRows, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class ShrinkTile:
    """block_k, block_r: columns of x and ranks in one product.

    d_in is split until there are `programs` or `most_parts`, or a part is one product long.
    """

    block_k: int = 512
    block_r: int = 16
    programs: int = 384
    most_parts: int = 16
    num_warps: int = 4
    num_stages: int = 2


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_shrink(
    x: Float[Array, "t d_in"],
    factors: tuple[LowRank | None, ...],
    tiles: Tiles,
    tile: ShrinkTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "splits n size r"] | None, ...]:
    """As the reference. Of the result, rows and ranks that the tile does not have are undefined."""
    tile = tile or tuned(ShrinkTile, rows=x.shape[0], rank=most_ranks(factors))
    live = [f for f in factors if f is not None]
    if not live:
        return tuple(None for _ in factors)
    size = 1 if tiles.size == 1 else max(MIN_SIDE, power_of_two(tiles.size))
    n, d_in = tiles.slot.shape[0], x.shape[1]
    sizes = tuple(block_size(f, tile.block_r) for f in live)
    counts = tuple(pl.cdiv(most_ranks([f]), r) for f, r in zip(live, sizes, strict=True))
    wanted = min(tile.most_parts, pl.cdiv(tile.programs, n * sum(counts)))
    spans = Spans.cut(d_in, min(tile.block_k, power_of_two(d_in)), wanted)
    slices = tuple(zip(accumulate(counts, initial=0), counts, sizes, strict=False))
    lows = pallas_call(
        partial(_kernel, slices, size, spans),
        name="segmented_shrink",
        grid=(sum(counts), n, spans.parts),  # slices side by side: they read the same rows of x
        out_shape=[
            jax.ShapeDtypeStruct((spans.parts, n, size, count * r), jnp.float32)
            for count, r in zip(counts, sizes, strict=True)
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(tiles.start, tiles.rows, x, *((f.A, f.table, f.rank) for f in live))
    result = iter(lows)
    return tuple(None if f is None else next(result) for f in factors)


def _kernel(slices, size, spans, start_ref, rows_ref, x_ref, *refs):
    """start, rows [n]; x [t, d_in]; per slice A [p, page, d_in], table [n, w], rank [n]; per slice
    low. A slice is (its first block of ranks, their number, ranks in a block)."""
    which, part = pl.program_id(0), pl.program_id(2)
    rows = TileRows(pl.program_id(1), start_ref, rows_ref, size)
    for s, (first, count, block) in enumerate(slices):
        A_ref, table_ref, rank_ref = refs[3 * s : 3 * s + 3]
        low_ref = refs[3 * len(slices) + s]

        @pl.when((which >= first) & (which < first + count) & (rows.count > 0))
        def _slice(
            A_ref=A_ref, table_ref=table_ref, rank_ref=rank_ref, low_ref=low_ref, first=first,
            block=block,
        ):  # fmt: skip
            adapter = RankBlocks(table_ref, rank_ref, rows.tile, A_ref.shape[1], block)
            store = partial(_store, low_ref, rows, part)
            shrink_block(rows, adapter, which - first, spans, part, x_ref, A_ref, store)


def _store(low_ref, rows, part, ranks, total):
    at = low_ref.at[part, rows.tile, rows.place[:, None], ranks[None, :]]
    plgpu.store(at, total, mask=rows.held[:, None])


def shrink_block(rows, adapter, block, spans, part, x_ref, A_ref, store):
    """store(ranks, product) with the product of a tile's rows with one block of its adapter's
    ranks, [size, ranks], if it has such."""
    own = adapter.block(block)
    product = _one_row if rows.one else _many_rows

    @pl.when(adapter.rank > block * adapter.size)
    def _work():
        store(own.ranks, product(rows, own, spans, part, x_ref, A_ref))


def _many_rows(rows, own, spans, part, x_ref, A_ref):
    def product(j, total):
        k, inside = spans.columns(part, j)
        at, here = rows.of(x_ref, k, inside)
        xs = plgpu.load(at, mask=here, other=0.0)
        a = own.load(A_ref, k, inside)
        return total + plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

    return spans.total(product, jnp.zeros((rows.size, own.ranks.shape[0]), jnp.float32))


def _one_row(rows, own, spans, part, x_ref, A_ref):
    def product(j, total):
        k, inside = spans.columns(part, j)
        x = plgpu.load(x_ref.at[rows.start, k], mask=inside, other=0.0).astype(jnp.float32)
        a = own.load(A_ref, k, inside).astype(jnp.float32)
        return total + jnp.sum(a * x[None, :], axis=1)

    return spans.total(product, jnp.zeros(own.ranks.shape, jnp.float32))[None, :]

"""The segmented shrink on Pallas' Triton backend: all slices in one launch.

A program takes one slice, one tile of rows and one part of d_in. Of A it reads only the ranks that
the tile's adapter has. The parts are summed by the expand, which reads them anyway.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, most_ranks
from scute_jax.kernels.precision import precision
from scute_jax.kernels.rank_blocks import RankBlocks, block_size
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class ShrinkTile:
    """block_k, block_r: columns of x and ranks in one product.

    d_in is split into parts until there are `programs` of them or a part is one product long.
    """

    block_k: int = 512
    block_r: int = 16
    programs: int = 384
    num_warps: int = 4
    num_stages: int = 2

    def parts(self, d_in: int, tiles: int) -> tuple[int, int]:
        """Products in a part and how many parts there are, for `tiles` tiles of all slices."""
        products = pl.cdiv(d_in, self.block_k)
        each = pl.cdiv(products, min(products, pl.cdiv(self.programs, tiles)))
        return each, pl.cdiv(products, each)


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
    size = max(MIN_SIDE, power_of_two(tiles.size))
    n, d_in = tiles.slot.shape[0], x.shape[1]
    tile = replace(tile, block_k=min(tile.block_k, power_of_two(d_in)))
    each, splits = tile.parts(d_in, n * len(live))
    blocks = tuple(block_size(f, tile.block_r) for f in live)
    lows = pallas_call(
        partial(_kernel, blocks, size, d_in, each, tile.block_k),
        name="segmented_shrink",
        grid=(len(live), n, splits),  # slices side by side: they read the same rows of x
        out_shape=[
            jax.ShapeDtypeStruct((splits, n, size, _width(f, block)), jnp.float32)
            for f, block in zip(live, blocks, strict=True)
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(tiles.slot, tiles.start, tiles.rows, x, *((f.A, f.table, f.rank) for f in live))
    result = iter(lows)
    return tuple(None if f is None else next(result) for f in factors)


def _width(factors: LowRank, block: int) -> int:
    ranks = factors.table.shape[1] * factors.A.shape[1]
    return -(-ranks // block) * block


def _kernel(blocks, size, d_in, each, block_k, slot_ref, start_ref, rows_ref, x_ref, *refs):
    """slot, start, rows [n]; x [t, d_in]; per slice A [p, page, d_in], table [K, w], rank [K];
    per slice low."""
    i, part = pl.program_id(1), pl.program_id(2)
    slot, rows, place = slot_ref[i], rows_ref[i], jnp.arange(size)
    row, held = start_ref[i] + place, place < rows
    for s, block in enumerate(blocks):
        A_ref, table_ref, rank_ref = refs[3 * s : 3 * s + 3]
        low_ref = refs[3 * len(blocks) + s]

        @pl.when((pl.program_id(0) == s) & (rows > 0))
        def _slice(A_ref=A_ref, table_ref=table_ref, rank_ref=rank_ref, low_ref=low_ref, b=block):
            adapter = RankBlocks(table_ref, rank_ref, slot, A_ref.shape[1], b)

            def product(own, j):
                k = (part * each + j) * block_k + jnp.arange(block_k)
                inside = k < d_in
                here = held[:, None] & inside[None, :]
                xs = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=here, other=0.0)
                a = own.load(A_ref, k, inside)
                return plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

            def shrink(own, _):
                if each == 1:  # keeps a loop over ranks the innermost: it is pipelined
                    total = product(own, 0)
                else:
                    zero = jnp.zeros((size, b), jnp.float32)
                    total = jax.lax.fori_loop(0, each, lambda j, y: y + product(own, j), zero)
                at = low_ref.at[part, i, place[:, None], own.ranks[None, :]]
                plgpu.store(at, total, mask=held[:, None])

            pl.when(adapter.rank > 0)(lambda: adapter.fold(shrink, None))

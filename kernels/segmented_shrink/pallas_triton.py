"""The segmented shrink on Pallas' Triton backend: all slices in one launch.

A program takes one tile of rows, one part of d_in and (where few rows make bandwidth scarce) one
slice. It reads its rows of x once for all ranks of a part, and of A only the ranks that the tile's
adapter has. The parts are summed by the expand, which reads them anyway.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank
from scute_jax.kernels.precision import precision
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two


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


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_shrink(
    x: Float[Array, "t d_in"],
    factors: tuple[LowRank | None, ...],
    tiles: Tiles,
    tile: ShrinkTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "splits n size r"] | None, ...]:
    """As the reference. Of the result, ranks past the adapter's own pages are undefined."""
    tile = tile or ShrinkTile()
    live = [f for f in factors if f is not None]
    if not live:
        return tuple(None for _ in factors)
    size = max(MIN_SIDE, power_of_two(tiles.size))
    n, d_in = tiles.slot.shape[0], x.shape[1]
    page = live[0].A.shape[1]
    block_r = max(tile.block_r, page)
    block_k = min(tile.block_k, power_of_two(d_in))
    splits = min(pl.cdiv(d_in, block_k), pl.cdiv(tile.programs, n * len(live)))
    shapes = [
        jax.ShapeDtypeStruct((splits, n, size, _width(f, block_r)), jnp.float32) for f in live
    ]
    kernel = partial(_kernel, len(live), size, d_in, splits, block_k, block_r)
    lows = pallas_call(
        kernel,
        name="segmented_shrink",
        grid=(n, splits, len(live)),
        out_shape=shapes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(tiles.slot, tiles.start, tiles.rows, x, *((f.A, f.table, f.rank) for f in live))
    result = iter(lows)
    return tuple(None if f is None else next(result) for f in factors)


def _width(factors: LowRank, block_r: int) -> int:
    ranks = factors.table.shape[1] * factors.A.shape[1]
    return -(-ranks // block_r) * block_r


def _kernel(
    slices, size, d_in, splits, block_k, block_r, slot_ref, start_ref, rows_ref, x_ref, *refs
):
    """slot, start, rows [n]; x [t, d_in]; per slice A [p, page, d_in], table [K, w], rank [K];
    per slice low."""
    i, part = pl.program_id(0), pl.program_id(1)
    rows, slot = rows_ref[i], slot_ref[i]
    row = start_ref[i] + jnp.arange(size)
    held = jnp.arange(size) < rows
    for s in range(slices):
        A_ref, table_ref, rank_ref = refs[3 * s : 3 * s + 3]
        low_ref = refs[3 * slices + s]

        @pl.when((pl.program_id(2) == s) & (rows > 0))
        def _slice(A_ref=A_ref, table_ref=table_ref, rank_ref=rank_ref, low_ref=low_ref):
            rank = rank_ref[slot]
            page = A_ref.shape[1]
            span = -(-d_in // (splits * block_k)) * block_k  # columns of one part

            def ranks(b, _):
                q = b * block_r + jnp.arange(block_r)
                own = q < rank
                at = plgpu.load(table_ref.at[slot, q // page], mask=own, other=0)

                def columns(j, total):
                    k = part * span + j * block_k + jnp.arange(block_k)
                    inside = k < d_in
                    xs = plgpu.load(
                        x_ref.at[row[:, None], k[None, :]],
                        mask=held[:, None] & inside[None, :],
                        other=0.0,
                    )
                    a = plgpu.load(
                        A_ref.at[at[:, None], (q % page)[:, None], k[None, :]],
                        mask=own[:, None] & inside[None, :],
                        other=0.0,
                    )
                    return total + plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

                total = jnp.zeros((size, block_r), jnp.float32)
                if span == block_k:  # keeps the loop over ranks the innermost: it is pipelined
                    total = columns(0, total)
                else:
                    total = jax.lax.fori_loop(0, span // block_k, columns, total)
                low_ref[part, i, :, pl.ds(b * block_r, block_r)] = total

            jax.lax.fori_loop(0, pl.cdiv(rank, block_r), ranks, None)

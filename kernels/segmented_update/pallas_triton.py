"""Shrink and expand in one launch on Pallas' Triton backend, for batches of few rows.

There a kernel lasts little longer than its start and its first look into memory, so that two of
them cost twice that. Here the first programs of the grid shrink, and the others expand: they fetch
h and B at once and wait for low until all parts of it are counted. Programs that shrink wait for
nobody, and a GPU starts programs in their order, so that the wait ends.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors, most_ranks
from scute_jax.kernels.rank_blocks import RankBlocks, block_size
from scute_jax.kernels.segmented_expand.pallas_triton import expand_block
from scute_jax.kernels.segmented_shrink.pallas_triton import ShrinkTile, Span, shrink_block
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, TileRows, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class UpdateTile:
    """As ShrinkTile and ExpandTile: shrink_r and expand_r are their block_r."""

    block_k: int = 512
    shrink_r: int = 16
    programs: int = 384
    most_parts: int = 16
    block_n: int = 256
    expand_r: int = 16
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Slice:
    """Where a slice begins and how much there is of it: blocks of ranks, and of columns."""

    first_rank: int
    ranks: int
    shrink_r: int
    first_column: int
    columns: int
    expand_r: int


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_update(
    h: tuple[Float[Array, "t d_out"], ...],
    x: Float[Array, "t d_in"],
    factors: tuple[LowRank, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    tile: UpdateTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference; every slice has factors, and all pools are at tiles."""
    tile = tile or tuned(UpdateTile, rows=x.shape[0], rank=most_ranks(factors))
    n, d_in = tiles.slot.shape[0], x.shape[1]
    size = max(MIN_SIDE, power_of_two(tiles.size))
    block_k = min(tile.block_k, power_of_two(d_in))
    block_n = min(tile.block_n, power_of_two(max(part.shape[1] for part in h)))
    shrink_r = [block_size(f, tile.shrink_r) for f in factors]
    ranks = [pl.cdiv(most_ranks([f]), r) for f, r in zip(factors, shrink_r, strict=True)]
    columns = [pl.cdiv(part.shape[1], block_n) for part in h]
    slices = [
        Slice(*sizes)
        for sizes in zip(
            accumulate(ranks, initial=0),
            ranks,
            shrink_r,
            accumulate(columns, initial=0),
            columns,
            (block_size(f, tile.expand_r) for f in factors),
            strict=False,
        )
    ]
    split = ShrinkTile(block_k=block_k, programs=tile.programs, most_parts=tile.most_parts)
    each, parts = split.parts(d_in, n * sum(ranks))
    counted = jnp.zeros((len(h), n), jnp.int32)
    args = (h, counted, tiles.start, tiles.rows, x, factors, scale, shift)
    flat, tree = jax.tree.flatten(args)
    lows = [
        jax.ShapeDtypeStruct((parts, n, size, count * r), jnp.float32)
        for count, r in zip(ranks, shrink_r, strict=True)
    ]
    span = Span(None, each, block_k, d_in)
    barrier = (lambda: None) if interpret else plgpu.debug_barrier
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*h, counted)]
    outs = pallas_call(
        partial(_kernel, tree, slices, size, block_n, span, parts, barrier),
        name="segmented_update",
        grid=(n * (parts * sum(ranks) + sum(columns)),),
        out_shape=[*like, *lows],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={k: k for k in range(len(like))},
    )(*flat)
    return tuple(outs[: len(h)])


def _kernel(tree, slices, size, block_n, span, parts, barrier, *refs):
    """The arguments flattened as `tree` says; the new h per slice, counted [slices, n], low."""
    args, results = refs[: tree.num_leaves], refs[tree.num_leaves :]
    h, _, start_ref, rows_ref, x_ref, factors, scale, shift = jax.tree.unflatten(tree, args)
    outs, counted_ref, lows = results[: len(h)], results[len(h)], results[len(h) + 1 :]
    n, program = start_ref.shape[0], pl.program_id(0)
    rank_blocks = slices[-1].first_rank + slices[-1].ranks
    shrinking = n * parts * rank_blocks

    @pl.when(program < shrinking)
    def _shrink():
        which, rest = program % rank_blocks, program // rank_blocks
        rows = TileRows(rest % n, start_ref, rows_ref, size)
        for s, own in enumerate(slices):

            @pl.when(_within(which, own.first_rank, own.ranks) & (rows.count > 0))
            def _slice(s=s, own=own):
                def count():
                    barrier()  # all threads have written their part of low
                    plgpu.atomic_add(counted_ref, (jnp.int32(s), rows.tile), jnp.int32(1))

                f = factors[s]
                adapter = RankBlocks(f.table, f.rank, rows.tile, f.A.shape[1], own.shrink_r)
                here = replace(span, part=rest // n)
                block = which - own.first_rank
                shrink_block(rows, adapter, block, here, x_ref, f.A, lows[s], count)

    @pl.when(program >= shrinking)
    def _expand():
        rest = program - shrinking
        column = rest // n
        rows = TileRows(rest % n, start_ref, rows_ref, size)
        for s, own in enumerate(slices):

            @pl.when(_within(column, own.first_column, own.columns) & (rows.count > 0))
            def _slice(s=s, own=own):
                def ready(adapter):
                    wanted = parts * pl.cdiv(adapter.rank, own.shrink_r)
                    _wait(counted_ref, s, rows.tile, wanted, barrier)

                f = factors[s]
                c = (column - own.first_column) * block_n + jnp.arange(block_n)
                lowrank = (lows[s], f.B, f.table, f.rank)
                riding = (p and (p.values, p.row) for p in (scale[s], shift[s]))
                expand_block(rows, c, h[s], outs[s], lowrank, *riding, own.expand_r, ready)


def _within(number, first, count):
    return (number >= first) & (number < first + count)


def _wait(counted_ref, s, tile, wanted, barrier):
    """Returns when `wanted` parts are counted, and all threads may read them."""

    at = (jnp.int32(s), tile)

    def look(_):
        return plgpu.load(counted_ref.at[at], volatile=True)

    seen = jax.lax.while_loop(lambda seen: seen < wanted, look, jnp.int32(0))
    # Adds 0, so written that the loop stays; acquires what was written before the count.
    plgpu.atomic_add(counted_ref, at, jnp.minimum(seen, 0))
    barrier()

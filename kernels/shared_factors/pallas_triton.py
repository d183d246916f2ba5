"""The shared-factor route on Pallas' Triton backend: two or three launches over the whole batch.

Rows are taken in blocks as they come, whatever adapters they use: a block reads a pair once if one
of its rows uses it. The shrink (shrink.py) leaves ((x * u) A) * d in the dtype of B; where d_in is
split, a launch of its own adds up the parts. It also leaves what it looked up, so that the expand
(expand.py) finds everything by one read: its inner loop is two reads and a product.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import Shared
from scute_jax.kernels.shared_factors.expand import expand_kernel
from scute_jax.kernels.shared_factors.lookup import Lookup
from scute_jax.kernels.shared_factors.shrink import shrink_kernel, sum_kernel
from scute_jax.kernels.spans import Spans
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned

MIN_COLUMNS = 32  # of a program: the shortest piece of a row that memory reads at once
SUMMED = 8  # rows of a program that adds up parts


@dataclass(frozen=True)
class SharedTile:
    """rows: of a block. Of the shrink, block_k, block_r: columns of x and ranks in one product;
    d_in is split until there are `programs` or `most_parts`. Of the expand, block_q: ranks in one
    product; block_n: output columns of a program, fewer until there are `column_programs`. In
    float32, block_k and block_q are a quarter of it.
    """

    rows: int = 64
    block_k: int = 128
    block_r: int = 64
    programs: int = 256
    most_parts: int = 16
    num_warps: int = 4
    num_stages: int = 3
    block_q: int = 64
    block_n: int = 128
    column_programs: int = 132
    expand_warps: int = 4
    expand_stages: int = 3


@partial(jax.jit, static_argnames=("tile", "interpret"))
def shared_factors(
    h: tuple[Float[Array, "*parts t d_out"], ...],
    x: Float[Array, "t d_in"],
    shared: tuple[Shared, ...],
    slot: Int[Array, "t"],
    tile: SharedTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference; every slice has shared terms."""
    tile = tile or tuned(SharedTile, rows=x.shape[0], rank=max(own.d.shape[1] for own in shared))
    size = min(tile.rows, max(MIN_SIDE, power_of_two(x.shape[0])))
    lows, lookups = _shrink(x, shared, slot, tile, size, interpret)
    blocks = pl.cdiv(x.shape[0], size)
    widths = [part.shape[-1] for part in h]
    block_n = _columns(tile, widths, blocks)
    block_q = _ranks(_depth(tile.block_q, x), shared)
    firsts = tuple(accumulate((pl.cdiv(width, block_n) for width in widths), initial=0))
    flat, tree = jax.tree.flatten((h, lows, lookups, shared))
    outs = pallas_call(
        partial(expand_kernel, tree, firsts, size, block_n, block_q, tile.expand_warps),
        name="shared_expand",
        grid=(blocks, firsts[-1]),
        out_shape=[jax.ShapeDtypeStruct(part.shape[-2:], part.dtype) for part in h],
        # What no row changes is not written; of an h in parts, all is.
        aliases={s: s for s, part in enumerate(h) if part.ndim == 2},
        num_warps=tile.expand_warps,
        num_stages=tile.expand_stages,
        interpret=interpret,
    )(*flat)
    return tuple(outs)


def _shrink(
    x: Array, shared: tuple[Shared, ...], slot: Array, tile: SharedTile, size: int, interpret: bool
) -> tuple[tuple[Array, ...], tuple[Lookup, ...]]:
    """For each slice ((x * u) A) * d [terms, rows, r], and what was looked up on the way."""
    t, d_in = x.shape
    blocks, block_r = pl.cdiv(t, size), _ranks(tile.block_r, shared)
    # The expand reads whole blocks of its own, too.
    whole = max(block_r, _ranks(_depth(tile.block_q, x), shared))
    ranks = [whole * pl.cdiv(own.d.shape[1], whole) for own in shared]
    terms = [own.row.shape[1] for own in shared]
    counts = [j * r // block_r for j, r in zip(terms, ranks, strict=True)]
    wanted = min(tile.most_parts, pl.cdiv(tile.programs, blocks * sum(counts)))
    spans = Spans.cut(d_in, min(_depth(tile.block_k, x), power_of_two(d_in)), wanted)
    how = {"num_warps": tile.num_warps, "interpret": interpret}
    flat, tree = jax.tree.flatten((slot, x, shared))
    firsts = tuple(accumulate(counts, initial=0))
    shapes = [(j, blocks * size, r) for j, r in zip(terms, ranks, strict=True)]
    rounded = [
        jax.ShapeDtypeStruct(shape, own.pairs.B.dtype)
        for shape, own in zip(shapes, shared, strict=True)
    ]
    parts = [jax.ShapeDtypeStruct((spans.parts, *shape), jnp.float32) for shape in shapes]
    lookups = [Lookup.shapes(own, blocks, size) for own in shared]
    out_shape, out_tree = jax.tree.flatten((rounded if spans.parts == 1 else parts, lookups))
    outs = pallas_call(
        partial(shrink_kernel, tree, out_tree, firsts, size, spans, block_r),
        name="shared_shrink",
        grid=(sum(counts), blocks, spans.parts),
        out_shape=out_shape,
        num_stages=tile.num_stages,
        **how,
    )(*flat)
    lows, lookups = jax.tree.unflatten(out_tree, outs)
    if spans.parts > 1:
        flat, tree = jax.tree.flatten((lows, lookups, [own.d for own in shared]))
        lows = pallas_call(
            partial(sum_kernel, tree, firsts, SUMMED, block_r),
            name="shared_sum",
            grid=(sum(counts), blocks * size // SUMMED),
            out_shape=rounded,
            num_stages=1,
            **how,
        )(*flat)
    return tuple(lows), tuple(lookups)


def _depth(most: int, x: Array) -> int:
    """How much is summed in one product: tensor cores do not take float32, registers hold it."""
    return most if x.dtype.itemsize == 2 else max(MIN_SIDE, most // 4)


def _ranks(most: int, shared: tuple[Shared, ...]) -> int:
    """Ranks in one product: whole pages, and no more than there are."""
    page, width = shared[0].pairs.A.shape[1], max(own.d.shape[1] for own in shared)
    return max(page, MIN_SIDE, min(most, power_of_two(width)))


def _columns(tile: SharedTile, widths: list[int], blocks: int) -> int:
    block_n = min(tile.block_n, power_of_two(max(widths)))
    while block_n > MIN_COLUMNS:
        if blocks * sum(pl.cdiv(width, block_n) for width in widths) >= tile.column_programs:
            break
        block_n //= 2
    return block_n

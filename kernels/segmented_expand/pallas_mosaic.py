"""The segmented expand on Pallas' Mosaic GPU backend (Hopper): all slices in one launch, in place.

A program takes one tile of rows and one block of output columns of one slice, as in the Triton
twin. All that it reads in blocks comes by the copy engine (TMA), and a WGMMA of 64 rows multiplies
each page of ranks. What lies outside of an array is zero to the copy engine: a page that the
adapter does not have and a vector that it does not have are copied from there.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels import mosaic
from scute_jax.kernels.mosaic import HALF, ROWS
from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.tiles import Tiles

PAGE = 16  # ranks of one WGMMA, and of a page
CHUNK = 4  # pages on their way at once
MIN_BLOCK, MAX_BLOCK = 64, 256  # columns of a program: pieces of h, and the widest WGMMA
NO_PAGE = -(2**31)  # of no table


def supports(
    h: tuple[Float[Array, "t d_out"], ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    interpret: bool = False,
) -> bool:
    """Whether this twin takes such arrays: tiles of 64 rows, pages of 16 ranks in half precision.

    The copy engine moves rows of a multiple of 16 bytes, and B in pieces of 16 columns.
    """
    fits = all(y.shape[1] % PAGE == 0 for y in h) and tiles.size == ROWS <= h[0].shape[0]
    pages = all(f is None or (f.B.shape[1] == PAGE and f.B.dtype in HALF) for f in factors)
    return fits and pages and (mosaic.INTERPRETER is not None or not interpret)


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_expand(
    h: tuple[Float[Array, "t d_out"], ...],
    low: tuple[Float[Array, "splits n size r"] | None, ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    tile: ExpandTile = ExpandTile(),  # noqa: B008
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference, where it `supports` the arrays."""
    parts = list(zip(low, factors, scale, shift, strict=True))
    live = [s for s, part in enumerate(parts) if any(p is not None for p in part)]
    if not live:
        return h
    block_n = min(max(tile.block_n, MIN_BLOCK), MAX_BLOCK)
    counts = [pl.cdiv(h[s].shape[1], block_n) for s in live]  # blocks of columns of each slice
    refs = [jax.new_ref(h[s]) for s in live]
    args = [_arrays(ref, *parts[s]) for ref, s in zip(refs, live, strict=True)]
    columns = tuple(zip(accumulate(counts, initial=0), counts, strict=False))
    mosaic.kernel(
        partial(_kernel, columns, block_n, interpret),
        name="segmented_expand",
        grid={"tile": tiles.slot.shape[0], "column": sum(counts)},
        interpret=interpret,
    )(tiles.start, tiles.rows, args)
    result = list(h)
    for s, ref in zip(live, refs, strict=True):
        result[s] = jax.freeze(ref)
    return tuple(result)


def _arrays(h, low, factors, scale, shift):
    """What a kernel gets of a slice: h, (low, B, table, rank) or None, (values, row) of s and b."""
    lowrank = factors and (low, factors.B, factors.table, factors.rank)
    vectors = {"s": scale, "b": shift}
    return h, lowrank, {k: (v.values, v.row) for k, v in vectors.items() if v is not None}


def _kernel(columns, block_n, interpret, start_ref, rows_ref, slices):
    """start, rows [n]; the `_arrays` of each slice, of which h is written as well.

    `columns` has the first block of columns of each slice, and how many there are.
    """
    tile, column = lax.axis_index("tile"), lax.axis_index("column")
    for (first, count), arrays in zip(columns, slices, strict=True):

        @pl.when((column >= first) & (column < first + count))
        def _slice(first=first, arrays=arrays):
            at = (column - first) * block_n
            block = Block(tile, start_ref[tile], rows_ref[tile], at, block_n)
            _expand_block(block, *arrays, interpret)


@dataclass(frozen=True)
class Block:
    """What a program works on: the rows of a tile at some columns of a slice."""

    tile: Any
    start: Any
    rows: Any
    column: Any
    width: int

    @property
    def columns(self):
        return pl.ds(self.column, self.width)


class Factors(NamedTuple):
    """The low-rank part of a slice; `page` has the first pages of the tile, all if they are few."""

    low_ref: Any
    B_ref: Any
    table_ref: Any
    rank: Any
    page: list

    @property
    def one_chunk(self) -> bool:
        return self.table_ref.shape[1] == len(self.page)


def _expand_block(block, h_ref, lowrank, vectors, interpret):
    """h * s + b + low B of a block; nothing if its adapter has none of it.

    `lowrank` is (low, B, table, rank) or None, `vectors` has (values, row) of s and of b.
    """
    factors, work = None, False
    if lowrank is not None:
        low_ref, B_ref, table_ref, rank_ref = lowrank
        page = [table_ref[block.tile, p] for p in range(min(CHUNK, table_ref.shape[1]))]
        factors = Factors(low_ref, B_ref, table_ref, rank_ref[block.tile], page)
        work = factors.rank > 0
        for each in page:  # looked up beside the rank, however late it is needed
            work &= each > NO_PAGE
    rows_of = {kind: row_ref[block.tile] for kind, (_, row_ref) in vectors.items()}
    for row in rows_of.values():
        work |= row >= 0

    @pl.when((block.rows > 0) & work)
    def _work():
        h_s = mosaic.pieces(h_ref.dtype, block.width)
        pages, B_dtype = (0, None) if factors is None else (len(factors.page), factors.B_ref.dtype)
        pl.run_scoped(
            partial(_work_scope, block, h_ref, factors, vectors, rows_of, interpret),
            h_s=h_s,
            h_bar=mosaic.barriers(len(h_s)),
            low_s=[mosaic.tiled((ROWS, PAGE), B_dtype, PAGE) for _ in range(pages)],
            B_s=[mosaic.tiled((PAGE, block.width), B_dtype, PAGE) for _ in range(pages)],
            B_bar=mosaic.barriers(max(1, pages)),
            v_s={k: plgpu.SMEM((block.width,), v.dtype) for k, (v, _) in vectors.items()},
            v_bar={k: mosaic.barriers(1) for k in vectors},
        )


def _work_scope(
    block, h_ref, factors, vectors, rows_of, interpret,
    *, h_s, h_bar, low_s, B_s, B_bar, v_s, v_bar,
):  # fmt: skip
    mosaic.fetch_rows(h_ref, block.start, block.column, h_s, h_bar)
    for kind, (values, _) in vectors.items():
        row = jnp.where(rows_of[kind] < 0, values.shape[0], rows_of[kind])
        plgpu.copy_gmem_to_smem(values.at[row, block.columns], v_s[kind], v_bar[kind].at[0])
    product = None
    if factors is not None and factors.one_chunk:
        _fetch_pages(block, factors, 0, low_s, B_s, B_bar)
    elif factors is not None:
        product = pl.run_scoped(
            partial(_product, block, factors, low_s, B_s, B_bar),
            plgpu.WGMMAAccumulatorRef((ROWS, block.width)),
        )
    for kind in vectors:
        plgpu.barrier_wait(v_bar[kind].at[0])
    width = h_s[0].shape[1]
    for j, piece in enumerate(h_s):
        columns = slice(j * width, (j + 1) * width)
        plgpu.barrier_wait(h_bar.at[j])
        y = _riding(piece, {kind: v.at[columns] for kind, v in v_s.items()})
        if product is not None:
            y = y + product[:, columns]
        elif factors is not None:
            parts = zip(low_s, B_s, strict=True)
            products = [(slice(None), own, B.at[:, columns]) for own, B in parts]
            y = mosaic.plus_products(y, products, interpret)
        piece[...] = y.astype(piece.dtype)
    plgpu.commit_smem()
    mosaic.send_rows(h_s, h_ref, block.start, block.column, block.rows)
    mosaic.sent()


def _riding(piece, vectors):
    """h * s + b of a piece in float32."""
    y = mosaic.load(piece, plgpu.Layout.WGMMA).astype(jnp.float32)

    def vector(kind):
        v = mosaic.load(vectors[kind], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(v.astype(jnp.float32), y.shape, (1,))

    if "s" in vectors:
        y = y + y * vector("s")
    return y + vector("b") if "b" in vectors else y


def _product(block, factors, low_s, B_s, B_bar, acc):
    """low B over the ranks that the adapter has, some pages at a time."""
    count = len(B_s)

    def step(c, _):
        _fetch_pages(block, factors, c * count, low_s, B_s, B_bar)
        for low, B in zip(low_s, B_s, strict=True):
            plgpu.wgmma(acc, low, B)
        plgpu.wgmma_wait(0)
        plgpu.commit_smem()  # no warp fetches the next pages before all have read these

    lax.fori_loop(0, pl.cdiv(factors.rank, count * PAGE), step, None)
    return acc[...]


def _fetch_pages(block, factors, first, low_s, B_s, B_bar):
    """x A and B of some pages of ranks, ready for WGMMA."""
    low_ref, B_ref, table_ref, rank, page = factors
    room, count = table_ref.shape[1], len(B_s)  # pages of an adapter and on their way at once
    pages = [jnp.minimum(first + p, room - 1) for p in range(count)]
    own = [rank - (first + p) * PAGE for p in range(count)]  # ranks from each page on
    if not factors.one_chunk:
        page = [table_ref[block.tile, p] for p in pages]
    for p in range(count):
        at = jnp.where(own[p] > 0, page[p], B_ref.shape[0])
        plgpu.copy_gmem_to_smem(B_ref.at[at, :, block.columns], B_s[p], B_bar.at[p])
    for p in range(count):
        low = _sum_parts(low_ref, block.tile, pages[p] * PAGE, own[p])
        low_s[p][...] = low.astype(B_ref.dtype)
    for p in range(count):
        plgpu.barrier_wait(B_bar.at[p])
        _clear(B_s[p], own[p])
    plgpu.commit_smem()


def _sum_parts(low_ref, tile, first, own):
    """The parts of x A added up at a page of ranks, zero for ranks that are not there."""
    ranks = pl.ds(first, PAGE)
    low = mosaic.load(low_ref.at[0, tile, :, ranks], plgpu.Layout.WGMMA)
    for part in range(1, low_ref.shape[0]):
        low = low + mosaic.load(low_ref.at[part, tile, :, ranks], plgpu.Layout.WGMMA)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE), 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(place < own, low, 0.0)


def _clear(B_s, own):
    """Zeros in the place of the ranks of a page that are not the adapter's."""

    @pl.when((own > 0) & (own < PAGE))
    def _():
        swizzle = PAGE * jnp.dtype(B_s.dtype).itemsize
        layout = plgpu.Layout.SMEM_GMEM_COPY(B_s.shape, B_s.dtype, swizzle)
        rank = plgpu.broadcasted_iota(jnp.int32, B_s.shape, 0, layout=layout)
        B_s[...] = jnp.where(rank < own, mosaic.load(B_s, layout), jnp.zeros((), B_s.dtype))

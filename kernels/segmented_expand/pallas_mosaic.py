"""The segmented expand on Pallas' Mosaic GPU backend (Hopper): all slices in one launch, in place.

A program takes one tile of rows and one block of output columns of one slice, as in the Triton
twin. All that it reads in blocks comes by the copy engine (TMA), the product is one WGMMA of 64
rows per page of ranks. What lies outside of an array is zero to the copy engine: a page that the
adapter does not have and a vector that it does not have are copied from there.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.tiles import Tiles

ROWS = 64  # of one WGMMA, and of a tile
PAGE = 16  # ranks of one WGMMA, and of a page
CHUNK = 4  # pages on their way at once
SWIZZLE = 128  # bytes of a row of h in shared memory; a row of h is cut into such pieces

MIN_BLOCK, MAX_BLOCK = 64, 256  # columns of a program: pieces of h, and the widest WGMMA
INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)  # from jax 0.12 on
HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))


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
    return fits and pages and (INTERPRETER is not None or not interpret)


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
    pl.kernel(
        partial(_kernel, columns, block_n),
        mesh=plgpu.Mesh(grid=(tiles.slot.shape[0], sum(counts)), grid_names=("tile", "column")),
        name="segmented_expand",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=INTERPRETER() if interpret else False,
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


def _kernel(columns, block_n, start_ref, rows_ref, slices):
    """start, rows [n]; the `_arrays` of each slice, of which h is written as well.

    `columns` has the first block of columns of each slice, and how many there are.
    """
    tile, column = lax.axis_index("tile"), lax.axis_index("column")
    for (first, count), arrays in zip(columns, slices, strict=True):

        @pl.when((column >= first) & (column < first + count))
        def _slice(first=first, arrays=arrays):
            at = (column - first) * block_n
            _expand_block(Block(tile, start_ref[tile], rows_ref[tile], at, block_n), *arrays)


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

    def piece(self, j: int, width: int):
        """The columns of a piece of h."""
        return pl.ds(self.column + j * width, width)


def _expand_block(block, h_ref, lowrank, vectors):
    """h * s + b + low B of a block; nothing if its adapter has none of it.

    `lowrank` is (low, B, table, rank) or None, `vectors` has (values, row) of s and of b.
    """
    rank = 0 if lowrank is None else lowrank[3][block.tile]
    rows_of = {kind: row_ref[block.tile] for kind, (_, row_ref) in vectors.items()}
    work = rank > 0
    for row in rows_of.values():
        work |= row >= 0

    @pl.when((block.rows > 0) & work)
    def _work():
        width = SWIZZLE // h_ref.dtype.itemsize
        count = block.width // width
        pages = 0 if lowrank is None else min(CHUNK, lowrank[2].shape[1])
        pl.run_scoped(
            partial(_work_scope, block, h_ref, lowrank, rank, vectors, rows_of),
            h_s=[_smem((ROWS, width), h_ref.dtype, SWIZZLE) for _ in range(count)],
            h_bar=_barriers(count),
            low_s=[_tiled((ROWS, PAGE), lowrank[1].dtype) for _ in range(pages)],
            B_s=[_tiled((PAGE, block.width), lowrank[1].dtype) for _ in range(pages)],
            B_bar=_barriers(max(1, pages)),
            v_s={k: plgpu.SMEM((block.width,), v.dtype) for k, (v, _) in vectors.items()},
            v_bar={k: _barriers(1) for k in vectors},
        )


def _work_scope(
    block, h_ref, lowrank, rank, vectors, rows_of, *, h_s, h_bar, low_s, B_s, B_bar, v_s, v_bar
):
    for j, piece in enumerate(h_s):
        at = h_ref.at[pl.ds(block.start, ROWS), block.piece(j, piece.shape[1])]
        plgpu.copy_gmem_to_smem(at, piece, h_bar.at[j])
    for kind, (values, _) in vectors.items():
        row = jnp.where(rows_of[kind] < 0, values.shape[0], rows_of[kind])
        plgpu.copy_gmem_to_smem(values.at[row, block.columns], v_s[kind], v_bar[kind].at[0])
    product = None
    if lowrank is not None:
        product = pl.run_scoped(
            partial(_product, block, *lowrank[:3], rank, low_s, B_s, B_bar),
            plgpu.WGMMAAccumulatorRef((ROWS, block.width)),
        )
    for kind in vectors:
        plgpu.barrier_wait(v_bar[kind].at[0])

    def vector(kind, columns, shape):
        v = _load(v_s[kind].at[columns], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(v.astype(jnp.float32), shape, (1,))

    for j, piece in enumerate(h_s):
        width = piece.shape[1]
        plgpu.barrier_wait(h_bar.at[j])
        y = _load(piece, plgpu.Layout.WGMMA).astype(jnp.float32)
        if "s" in vectors:
            y = y + y * vector("s", pl.ds(j * width, width), y.shape)
        if "b" in vectors:
            y = y + vector("b", pl.ds(j * width, width), y.shape)
        if product is not None:
            y = y + product[:, j * width : (j + 1) * width]
        piece[...] = y.astype(piece.dtype)
    plgpu.commit_smem()
    _store(block, h_s, h_ref)


def _product(block, low_ref, B_ref, table_ref, rank, low_s, B_s, B_bar, acc):
    """low B over the ranks that the adapter has, some pages at a time."""
    room, count = table_ref.shape[1], len(B_s)  # pages of an adapter and on their way at once

    def chunk(first):
        pages = [jnp.minimum(first + p, room - 1) for p in range(count)]
        own = [rank - (first + p) * PAGE for p in range(count)]  # ranks from each page on
        for p in range(count):
            page = jnp.where(own[p] > 0, table_ref[block.tile, pages[p]], B_ref.shape[0])
            plgpu.copy_gmem_to_smem(B_ref.at[page, :, block.columns], B_s[p], B_bar.at[p])
        for p in range(count):
            low = _sum_parts(low_ref, block.tile, pages[p] * PAGE, own[p])
            low_s[p][...] = low.astype(B_ref.dtype)
        for p in range(count):
            plgpu.barrier_wait(B_bar.at[p])
            _clear(B_s[p], own[p])
        plgpu.commit_smem()
        for p in range(count):
            plgpu.wgmma(acc, low_s[p], B_s[p])

    def step(c, _):
        chunk(c * count)
        plgpu.wgmma_wait(0)
        plgpu.commit_smem()  # no warp fetches the next pages before all have read these

    if room <= count:
        chunk(0)
    else:
        lax.fori_loop(0, pl.cdiv(rank, count * PAGE), step, None)
    return acc[...]


def _sum_parts(low_ref, tile, first, own):
    """The parts of x A added up at a page of ranks, zero for ranks that are not there."""
    ranks = pl.ds(first, PAGE)
    low = _load(low_ref.at[0, tile, :, ranks], plgpu.Layout.WGMMA)
    for part in range(1, low_ref.shape[0]):
        low = low + _load(low_ref.at[part, tile, :, ranks], plgpu.Layout.WGMMA)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS, PAGE), 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(place < own, low, 0.0)


def _clear(B_s, own):
    """Zeros in the place of the ranks of a page that are not the adapter's."""

    @pl.when((own > 0) & (own < PAGE))
    def _():
        layout = plgpu.Layout.SMEM_GMEM_COPY(B_s.shape, B_s.dtype, _page_swizzle(B_s.dtype))
        rank = plgpu.broadcasted_iota(jnp.int32, B_s.shape, 0, layout=layout)
        B_s[...] = jnp.where(rank < own, _load(B_s, layout), jnp.zeros((), B_s.dtype))


def _store(block, h_s, h_ref):
    """The rows of the tile go back to h: 64, or 32 and 16 and so on as their number is written."""
    at, some = 0, ROWS
    while some:

        @pl.when(block.rows & some != 0)
        def _(at=at, some=some):
            for j, piece in enumerate(h_s):
                to = h_ref.at[pl.ds(block.start + at, some), block.piece(j, piece.shape[1])]
                plgpu.copy_smem_to_gmem(piece.at[pl.ds(at, some)], to)

        at, some = at + (block.rows & some), some // 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _page_swizzle(dtype) -> int:
    return PAGE * jnp.dtype(dtype).itemsize


def _smem(shape, dtype, swizzle):
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(swizzle),))


def _tiled(shape, dtype):
    """Shared memory that a WGMMA of PAGE ranks can read."""
    tiling = plgpu.TilingTransform((8, PAGE))
    swizzle = plgpu.SwizzleTransform(_page_swizzle(dtype))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _barriers(count: int):
    return plgpu.Barrier(num_arrivals=1, num_barriers=count)


def _load(ref, layout):
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


# Until jax 0.11, an index has to be given.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_WHOLE = (...,) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()

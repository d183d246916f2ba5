"""The segmented expand on Pallas' Triton backend: all slices in one launch, h updated in place.

A program takes one tile of rows and one block of output columns of one slice. It reads h once,
applies s and b on the way, adds low B over the ranks that the tile's adapter has, and writes h
back. A tile whose adapter does nothing at the slice is left alone.
"""

from functools import partial, reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.precision import precision
from scute_jax.kernels.rank_blocks import RankBlocks, block_size
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import TileRows, pallas_call, power_of_two


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
    """As the reference."""
    parts = list(zip(low, factors, scale, shift, strict=True))
    live = [s for s, part in enumerate(parts) if any(p is not None for p in part)]
    if not live:
        return h
    n = tiles.slot.shape[0]
    block_n = min(tile.block_n, power_of_two(max(h[s].shape[1] for s in live)))
    counts = [pl.cdiv(h[s].shape[1], block_n) for s in live]  # blocks of columns of each slice
    args, layout = [], []
    for s in live:
        lows, f, sc, sh = parts[s]
        layout.append((f is not None, sc is not None, sh is not None))
        args.append(h[s])
        args += [lows, f.B, f.table, f.rank] if f is not None else []
        args += [sc.values, sc.row] if sc is not None else []
        args += [sh.values, sh.row] if sh is not None else []
    blocks = [factors[s] and block_size(factors[s], tile.block_r) for s in live]
    slices = tuple(zip(accumulate(counts, initial=0), counts, layout, blocks, strict=False))
    head = (tiles.start, tiles.rows)
    outs = pallas_call(
        partial(_kernel, slices, tiles.size, block_n),
        name="segmented_expand",
        grid=(n, sum(counts)),
        out_shape=[jax.ShapeDtypeStruct(h[s].shape, h[s].dtype) for s in live],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={place: s for s, place in enumerate(_places(layout, len(head)))},
    )(*head, *args)
    result = list(h)
    for s, out in zip(live, outs, strict=True):
        result[s] = out
    return tuple(result)


def _places(layout, first: int) -> list[int]:
    """Where each slice's h stands among the arguments."""
    places = []
    for with_factors, with_scale, with_shift in layout:
        places.append(first)
        first += 1 + 4 * with_factors + 2 * with_scale + 2 * with_shift
    return places


def _kernel(slices, size, block_n, start_ref, rows_ref, *refs):
    """start, rows [n]; per slice h [t, d_out] and what its layout says; the new h per slice.

    A slice is (its first block of columns, their number, its layout, ranks in one product).
    """
    column = pl.program_id(1)
    rows = TileRows(pl.program_id(0), start_ref, rows_ref, size)
    places = _places([layout for _, _, layout, _ in slices], 0)
    outs = refs[len(refs) - len(slices) :]
    for s, (first, count, (with_factors, with_scale, with_shift), block) in enumerate(slices):
        own = iter(refs[places[s] :])
        h_ref, out_ref = next(own), outs[s]
        lowrank = [next(own) for _ in range(4)] if with_factors else None
        scale = [next(own) for _ in range(2)] if with_scale else None
        shift = [next(own) for _ in range(2)] if with_shift else None

        @pl.when((column >= first) & (column < first + count) & (rows.count > 0))
        def _slice(
            h_ref=h_ref, out_ref=out_ref, lowrank=lowrank, scale=scale, shift=shift, first=first,
            block=block,
        ):  # fmt: skip
            c = (column - first) * block_n + jnp.arange(block_n)
            _expand_block(rows, c, h_ref, out_ref, lowrank, scale, shift, block)


def _expand_block(rows, c, h_ref, out_ref, lowrank, scale, shift, block):
    """h * s + b + low B of a tile's rows at the columns c; nothing if its adapter has none of it.

    `lowrank` is (low, B, table, rank), `scale` and `shift` (values, row), or None.
    """
    scale_row = -1 if scale is None else scale[1][rows.tile]
    shift_row = -1 if shift is None else shift[1][rows.tile]
    adapter = None
    if lowrank is not None:
        adapter = RankBlocks(lowrank[2], lowrank[3], rows.tile, lowrank[1].shape[1], block)
    rank = 0 if adapter is None else adapter.rank
    inside = c < h_ref.shape[1]

    def vectors():
        """s and b at the columns, or None."""
        s = None if scale is None else _vector(scale[0], scale_row, c, inside)
        return s, None if shift is None else _vector(shift[0], shift_row, c, inside)

    @pl.when((rank > 0) | (scale_row >= 0) | (shift_row >= 0))
    def _work():
        (_one_row if rows.one else _many_rows)(
            rows, c, inside, h_ref, out_ref, vectors, adapter, *(lowrank or (None, None))[:2]
        )


def _riding(y, s, b):
    """h * s + b of one row, or of rows, in float32."""
    y, wide = y.astype(jnp.float32), (None,) * (y.ndim - 1)
    if s is not None:
        y = y + y * s.astype(jnp.float32)[*wide]
    return y if b is None else y + b.astype(jnp.float32)[*wide]


def _many_rows(rows, c, inside, h_ref, out_ref, vectors, adapter, low_ref, B_ref):
    def operands(own):
        B = own.load(B_ref, c, inside)
        mask = rows.held[:, None] & own.own[None, :]
        low = _sum_parts(low_ref, (rows.tile, rows.place[:, None], own.ranks[None, :]), mask)
        return low, B

    def add(y, low, B):
        return y + plgpu.dot(low.astype(B.dtype), B, precision=precision(B.dtype))

    # What Triton hands from thread to thread it waits for at once: h and the vectors are on their
    # way together, then B and x A.
    at, here = rows.of(h_ref, c, inside)
    h = plgpu.load(at, mask=here, other=0.0)
    riding = vectors()
    one = operands(adapter.block(0)) if adapter is not None and adapter.one else None
    y = _riding(h, *riding)
    if one is not None:
        y = add(y, *one)
    elif adapter is not None:
        y = adapter.fold(lambda own, y: add(y, *operands(own)), y)
    at, _ = rows.of(out_ref, c, inside)
    plgpu.store(at, y.astype(out_ref.dtype), mask=here)


def _one_row(rows, c, inside, h_ref, out_ref, vectors, adapter, low_ref, B_ref):
    def add(own, y):
        B = own.load(B_ref, c, inside)
        low = _sum_parts(low_ref, (rows.tile, 0, own.ranks), own.own).astype(B.dtype)
        return y + jnp.sum(low.astype(jnp.float32)[:, None] * B.astype(jnp.float32), axis=0)

    y = _riding(plgpu.load(h_ref.at[rows.start, c], mask=inside, other=0.0), *vectors())
    if adapter is not None:
        y = adapter.fold(add, y)
    plgpu.store(out_ref.at[rows.start, c], y.astype(out_ref.dtype), mask=inside)


def _vector(values_ref, row, c, inside):
    """Columns c of a vector, zero if there is none: a row past the table is never read."""
    at = jnp.maximum(row, 0)
    mask = inside & (row >= 0)
    return plgpu.load(values_ref.at[at, c], mask=mask, other=0.0)


def _sum_parts(low_ref, at, mask):
    """The parts of x A added up, zero for rows and ranks that are not there."""
    parts = range(low_ref.shape[0])
    return reduce(jnp.add, [plgpu.load(low_ref.at[p, *at], mask=mask, other=0.0) for p in parts])

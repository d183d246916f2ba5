"""The segmented expand on Pallas' Triton backend: all slices in one launch, h updated in place.

A program takes one tile of rows and one block of output columns of one slice. It reads h once,
applies s and b on the way, adds low B over the ranks that the tile's adapter has, and writes h
back. A tile whose adapter does nothing at the slice is left alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.precision import precision
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two


@dataclass(frozen=True)
class ExpandTile:
    """block_n: output columns of a program; block_r: ranks in one product."""

    block_n: int = 256
    block_r: int = 16
    num_warps: int = 4
    num_stages: int = 2


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_expand(
    h: tuple[Float[Array, "t d_out"], ...],
    low: tuple[Float[Array, "splits n size r"] | None, ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    tile: ExpandTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference."""
    tile = tile or ExpandTile()
    parts = list(zip(low, factors, scale, shift, strict=True))
    live = [s for s, part in enumerate(parts) if any(p is not None for p in part)]
    if not live:
        return h
    n = tiles.slot.shape[0]
    widest = max(h[s].shape[1] for s in live)
    block_n = min(tile.block_n, power_of_two(widest))
    args, layout = [], []
    for s in live:
        lows, f, sc, sh = parts[s]
        present = (f is not None, sc is not None, sh is not None)
        layout.append(present)
        args.append(h[s])
        args += [lows, f.B, f.table, f.rank] if f is not None else []
        args += [sc.values, sc.row] if sc is not None else []
        args += [sh.values, sh.row] if sh is not None else []
    size = max(MIN_SIDE, power_of_two(tiles.size))
    page = next((f.B.shape[1] for f in factors if f is not None), tile.block_r)
    kernel = partial(_kernel, tuple(layout), size, block_n, max(tile.block_r, page))
    head = (tiles.slot, tiles.start, tiles.rows)
    places = _places(layout, len(head))
    outs = pallas_call(
        kernel,
        name="segmented_expand",
        grid=(n, pl.cdiv(widest, block_n), len(live)),
        out_shape=[jax.ShapeDtypeStruct(h[s].shape, h[s].dtype) for s in live],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={place: s for s, place in enumerate(places)},
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


def _kernel(layout, size, block_n, block_r, slot_ref, start_ref, rows_ref, *refs):
    """slot, start, rows [n]; per slice h [t, d_out] and what `layout` says; the new h per slice."""
    i, block = pl.program_id(0), pl.program_id(1)
    rows, slot = rows_ref[i], slot_ref[i]
    row = start_ref[i] + jnp.arange(size)
    held = jnp.arange(size) < rows
    places = _places(layout, 0)
    outs = refs[len(refs) - len(layout) :]
    for s, (with_factors, with_scale, with_shift) in enumerate(layout):
        own = iter(refs[places[s] :])
        h_ref, out_ref = next(own), outs[s]
        lowrank = [next(own) for _ in range(4)] if with_factors else None
        scale = [next(own) for _ in range(2)] if with_scale else None
        shift = [next(own) for _ in range(2)] if with_shift else None
        d_out = h_ref.shape[1]

        @pl.when((pl.program_id(2) == s) & (rows > 0) & (block * block_n < d_out))
        def _slice(h_ref=h_ref, out_ref=out_ref, lowrank=lowrank, scale=scale, shift=shift):
            rank = 0 if lowrank is None else lowrank[3][slot]
            scale_row = -1 if scale is None else scale[1][slot]
            shift_row = -1 if shift is None else shift[1][slot]

            @pl.when((rank > 0) | (scale_row >= 0) | (shift_row >= 0))
            def _work():
                c = block * block_n + jnp.arange(block_n)
                inside = c < h_ref.shape[1]
                here = held[:, None] & inside[None, :]
                y = plgpu.load(h_ref.at[row[:, None], c[None, :]], mask=here, other=0.0)
                y = y.astype(jnp.float32)
                if scale is not None:
                    y = y + y * _vector(scale[0], scale_row, c, inside)
                if shift is not None:
                    y = y + _vector(shift[0], shift_row, c, inside)
                if lowrank is not None:
                    y = _add_low(lowrank, y, rank, slot, i, c, inside, block_r)
                plgpu.store(
                    out_ref.at[row[:, None], c[None, :]], y.astype(out_ref.dtype), mask=here
                )


def _vector(values_ref, row, c, inside):
    """Columns c of a vector, zero if there is none: a row past the table is never read."""
    at = jnp.maximum(row, 0)
    mask = inside & (row >= 0)
    return plgpu.load(values_ref.at[at, c], mask=mask, other=0.0).astype(jnp.float32)[None, :]


def _add_low(lowrank, y, rank, slot, i, c, inside, block_r):
    low_ref, B_ref, table_ref, _ = lowrank
    splits, page = low_ref.shape[0], B_ref.shape[1]

    def ranks(b, y):
        q = b * block_r + jnp.arange(block_r)
        own = q < rank
        total = low_ref[0, i, :, pl.ds(b * block_r, block_r)]
        for part in range(1, splits):
            total = total + low_ref[part, i, :, pl.ds(b * block_r, block_r)]
        at = plgpu.load(table_ref.at[slot, q // page], mask=own, other=0)
        B = plgpu.load(
            B_ref.at[at[:, None], (q % page)[:, None], c[None, :]],
            mask=own[:, None] & inside[None, :],
            other=0.0,
        )
        total = jnp.where(own[None, :], total, 0.0).astype(B.dtype)
        return y + plgpu.dot(total, B, precision=precision(B.dtype))

    return jax.lax.fori_loop(0, pl.cdiv(rank, block_r), ranks, y)

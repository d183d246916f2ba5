"""The input transform on Pallas' Triton backend: one pass over x.

The first programs of the grid take tiles of rows whose adapter has an R and multiply them block by
block; the others copy, in plain row order, the rows that nobody turns. Each element of x is read
once and written once.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.precision import precision
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class RotateTile:
    """columns: of x in one program; copy_rows: rows that a copying program takes."""

    columns: int = 256
    copy_rows: int = 32
    num_warps: int = 4
    num_stages: int = 2


@partial(jax.jit, static_argnames=("tile", "interpret"))
def block_rotate(
    x: Float[Array, "t d_in"],
    rotation: Rotation,
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile | None = None,
    interpret: bool = False,
) -> Float[Array, "t d_in"]:
    """As the reference."""
    tile = tile or tuned(RotateTile, rows=x.shape[0], block=rotation.values.shape[-1])
    m = rotation.values.shape[-1]
    blocks = max(1, tile.columns // m)  # of R in one program
    ordered = rotation.order is not None
    kernel = partial(_rotate_kernel, _sizes(tiles), m, blocks, ordered)
    pool = (rotation.values, rotation.row, *((rotation.order,) if ordered else ()))
    return _launch(kernel, "block_rotate", blocks * m, x, pool, tiles, slot, tile, interpret)


@partial(jax.jit, static_argnames=("tile", "interpret"))
def scale_input(
    x: Float[Array, "t d_in"],
    scale: Vectors,
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile | None = None,
    interpret: bool = False,
) -> Float[Array, "t d_in"]:
    """As the reference."""
    tile = tile or tuned(RotateTile, rows=x.shape[0], block=1)
    kernel = partial(_scale_kernel, _sizes(tiles), tile.columns)
    pool = (scale.values, scale.row)
    return _launch(kernel, "scale_input", tile.columns, x, pool, tiles, slot, tile, interpret)


def _sizes(tiles: Tiles) -> tuple[int, int]:
    return tiles.slot.shape[0], max(MIN_SIDE, power_of_two(tiles.size))


def _launch(kernel, name, columns, x, pool, tiles, slot, tile, interpret):
    rows = min(tile.copy_rows, power_of_two(x.shape[0]))
    copies = pl.cdiv(x.shape[0], rows)
    has = (slot >= 0) & (pool[1][jnp.maximum(slot, 0)] >= 0)
    (out,) = pallas_call(
        partial(kernel, rows),
        name=name,
        grid=(tiles.slot.shape[0] + copies, pl.cdiv(x.shape[1], columns)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(tiles.slot, tiles.start, tiles.rows, has.astype(jnp.int32), x, *pool)
    return out


def _copy_rows(first, block, copy_rows, columns, has_ref, x_ref, out_ref):
    """Copies the rows first .. first + copy_rows - 1 that no tile turns."""
    row = first + jnp.arange(copy_rows)
    c = block * columns + jnp.arange(power_of_two(columns))
    inside = row < x_ref.shape[0]
    mine = inside & (plgpu.load(has_ref.at[row], mask=inside, other=1) == 0)
    here = mine[:, None] & ((c < x_ref.shape[1]) & (jnp.arange(len(c)) < columns))[None, :]
    at = (row[:, None], c[None, :])
    plgpu.store(out_ref.at[at], plgpu.load(x_ref.at[at], mask=here, other=0.0), mask=here)


def _wide(values):
    return values.astype(jnp.float32)


def _rotate_kernel(
    sizes,
    m,
    blocks,
    ordered,
    copy_rows,
    slot_ref,
    start_ref,
    rows_ref,
    has_ref,
    x_ref,
    R_ref,
    row_ref,
    *refs,
):
    """slot, start, rows [n]; has [t]; x [t, d_in]; R - I [k, d_in/m, m, m]; row [K];
    order [d_in] if `ordered`; x R."""
    order_ref, out_ref = refs if ordered else (None, *refs)
    n, size = sizes
    i, block = pl.program_id(0), pl.program_id(1)
    side = max(MIN_SIDE, power_of_two(m))

    @pl.when(i >= n)
    def _copy():
        _copy_rows((i - n) * copy_rows, block, copy_rows, blocks * m, has_ref, x_ref, out_ref)

    @pl.when(i < n)
    def _turn():
        tile = jnp.minimum(i, n - 1)
        rows = rows_ref[tile]
        entry = row_ref[slot_ref[tile]]

        @pl.when((rows > 0) & (entry >= 0))
        def _work():
            row = start_ref[tile] + jnp.arange(size)
            held = jnp.arange(size) < rows
            q = jnp.arange(side)

            def turn(b, _):
                j = block * blocks + b
                inside = (q < m) & (j < R_ref.shape[1])
                here = held[:, None] & inside[None, :]
                column = j * m + q
                if ordered:
                    # What is masked lies outside: interpreted, a masked store writes back what
                    # it read, and must not meet a column that this block turns.
                    named = plgpu.load(order_ref.at[column], mask=inside, other=0)
                    column = jnp.where(inside, named, x_ref.shape[1] + q)
                at = (row[:, None], column[None, :])
                xs = plgpu.load(x_ref.at[at], mask=here, other=0.0)
                R = plgpu.load(
                    R_ref.at[entry, j, q[:, None], q[None, :]],
                    mask=inside[:, None] & inside[None, :],
                    other=0.0,
                )
                left, right = (xs, R) if xs.dtype == R.dtype else (_wide(xs), _wide(R))
                turned = _wide(xs) + plgpu.dot(left, right, precision=precision(left.dtype))
                plgpu.store(out_ref.at[at], turned.astype(out_ref.dtype), mask=here)

            jax.lax.fori_loop(0, blocks, turn, None)


def _scale_kernel(
    sizes,
    columns,
    copy_rows,
    slot_ref,
    start_ref,
    rows_ref,
    has_ref,
    x_ref,
    u_ref,
    row_ref,
    out_ref,
):
    """As _rotate_kernel, with u - 1 [k, d_in] in place of R - I."""
    n, size = sizes
    i, block = pl.program_id(0), pl.program_id(1)

    @pl.when(i >= n)
    def _copy():
        _copy_rows((i - n) * copy_rows, block, copy_rows, columns, has_ref, x_ref, out_ref)

    @pl.when(i < n)
    def _scale():
        tile = jnp.minimum(i, n - 1)
        rows = rows_ref[tile]
        entry = row_ref[slot_ref[tile]]

        @pl.when((rows > 0) & (entry >= 0))
        def _work():
            row = start_ref[tile] + jnp.arange(size)
            c = block * columns + jnp.arange(columns)
            inside = c < x_ref.shape[1]
            here = (jnp.arange(size) < rows)[:, None] & inside[None, :]
            at = (row[:, None], c[None, :])
            xs = plgpu.load(x_ref.at[at], mask=here, other=0.0).astype(jnp.float32)
            u = plgpu.load(u_ref.at[entry, c], mask=inside, other=0.0).astype(jnp.float32)
            plgpu.store(out_ref.at[at], (xs + xs * u[None, :]).astype(out_ref.dtype), mask=here)

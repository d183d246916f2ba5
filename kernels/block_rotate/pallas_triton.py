"""The input transform on Pallas' Triton backend: one pass over x, all slices in one launch.

The first programs of the grid take tiles of rows whose adapter has an R; the others copy, in plain
row order, the rows that nobody turns. Blocks as wide as a tensor-core product are multiplied one
by one. Narrow blocks, which such a product would fill up with zeros, are multiplied element by
element, for many blocks and few rows at a time; a vector is an R of blocks of one.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.block_rotate.tile import RotateTile
from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.precision import precision
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@partial(jax.jit, static_argnames=("tile", "interpret"))
def block_rotate(
    x: tuple[Float[Array, "t d_in"], ...],
    rotation: tuple[Rotation, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile = RotateTile(),  # noqa: B008
    interpret: bool = False,
) -> tuple[Float[Array, "t d_in"], ...]:
    """As the reference."""
    return _rotate("block_rotate", x, rotation, tiles, slot, tile, interpret)


@partial(jax.jit, static_argnames=("tile", "interpret"))
def scale_input(
    x: tuple[Float[Array, "t d_in"], ...],
    scale: tuple[Vectors, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_in"], ...]:
    """As the reference."""
    tile = tile or tuned(RotateTile, rows=x[0].shape[0], block=1)
    rotation = tuple(Rotation(own.values[:, :, None, None], own.row) for own in scale)
    return _rotate("scale_input", x, rotation, tiles, slot, tile, interpret)


def _rotate(name, x, rotation, tiles, slot, tile, interpret):
    m, (t, d) = rotation[0].values.shape[-1], x[0].shape
    if m < MIN_SIDE:
        columns = min(power_of_two(tile.columns), power_of_two(d))
        turn = partial(_turn_narrow, m, min(tile.narrow_rows, power_of_two(tiles.size)), columns)
    else:
        blocks = max(1, tile.columns // m)  # of R in one program
        columns = blocks * m
        turn = partial(_turn_wide, m, max(MIN_SIDE, power_of_two(tiles.size)), blocks)
    n, copy_rows = tiles.slot.shape[0], min(tile.copy_rows, power_of_two(t))
    flat, tree = jax.tree.flatten((tiles.slot, tiles.start, tiles.rows, slot, x, rotation))
    outs = pallas_call(
        partial(_kernel, tree, n, turn, copy_rows, columns),
        name=name,
        grid=(n + pl.cdiv(t, copy_rows), pl.cdiv(d, columns), len(x)),
        out_shape=[jax.ShapeDtypeStruct(own.shape, own.dtype) for own in x],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(*flat)
    return tuple(outs)


def _kernel(tree, n, turn, copy_rows, columns, *refs):
    """The arguments flattened as `tree` says: slot, start, rows [n], the slot of each row [t], per
    slice x [t, d_in], per slice Rotation; per slice x R."""
    slot_ref, start_ref, rows_ref, who_ref, xs, rotations = jax.tree.unflatten(
        tree, refs[: tree.num_leaves]
    )
    i, block = pl.program_id(0), pl.program_id(1)
    outs = refs[tree.num_leaves :]
    for s, (x_ref, rotation, out_ref) in enumerate(zip(xs, rotations, outs, strict=True)):
        here = pl.program_id(2) == s

        @pl.when((i >= n) & here)
        def _copy(x_ref=x_ref, rotation=rotation, out_ref=out_ref):
            row = (i - n) * copy_rows + jnp.arange(copy_rows)
            inside = row < x_ref.shape[0]
            who = plgpu.load(who_ref.at[row], mask=inside, other=-1)
            entry = plgpu.load(rotation.row.at[who], mask=who >= 0, other=-1)
            place = jnp.arange(power_of_two(columns))
            c = block * columns + place
            there = (c < x_ref.shape[1]) & (place < columns)
            mask = (inside & (entry < 0))[:, None] & there[None, :]
            at = (row[:, None], c[None, :])
            plgpu.store(out_ref.at[at], plgpu.load(x_ref.at[at], mask=mask, other=0.0), mask=mask)

        @pl.when((i < n) & here)
        def _turn(x_ref=x_ref, rotation=rotation, out_ref=out_ref):
            tile = jnp.minimum(i, n - 1)
            first, rows = start_ref[tile], rows_ref[tile]
            entry = rotation.row[slot_ref[tile]]

            @pl.when((rows > 0) & (entry >= 0))
            def _work():
                pool = (rotation.values, rotation.order)
                turn(block, first, rows, entry, x_ref, *pool, out_ref)


def _turn_wide(m, size, blocks, block, first, rows, entry, x_ref, R_ref, order_ref, out_ref):
    """`blocks` blocks of R, one after the other, with all rows of a tile."""
    row = first + jnp.arange(size)
    held = jnp.arange(size) < rows
    q = jnp.arange(power_of_two(m))

    def turn(b, _):
        j = block * blocks + b
        inside = (q < m) & (j < R_ref.shape[1])
        here = held[:, None] & inside[None, :]
        at = (row[:, None], _column(j * m + q, inside, order_ref, x_ref)[None, :])
        xs = plgpu.load(x_ref.at[at], mask=here, other=0.0)
        R = plgpu.load(
            R_ref.at[entry, j, q[:, None], q[None, :]],
            mask=inside[:, None] & inside[None, :],
            other=0.0,
        )
        left, right = (xs, R) if xs.dtype == R.dtype else (_float32(xs), _float32(R))
        turned = _float32(xs) + plgpu.dot(left, right, precision=precision(left.dtype))
        plgpu.store(out_ref.at[at], turned.astype(out_ref.dtype), mask=here)

    jax.lax.fori_loop(0, blocks, turn, None)


def _turn_narrow(
    m, size, columns, block, first, rows, entry, x_ref, R_ref, order_ref, out_ref
):  # fmt: skip
    """y[c] = x[c] + sum_p x[m j + p] (R - I)[j, p, q] with c = m j + q, `size` rows at a time."""
    c = block * columns + jnp.arange(columns)
    inside, j, q = c < x_ref.shape[1], c // m, c % m
    sources = [_column(j * m + p, inside, order_ref, x_ref) for p in range(m)]
    target = _column(c, inside, order_ref, x_ref)
    R = [plgpu.load(R_ref.at[entry, j, p, q], mask=inside, other=0.0) for p in range(m)]

    def turn(b, _):
        place = b * size + jnp.arange(size)
        row = (first + place)[:, None]
        here = (place < rows)[:, None] & inside[None, :]
        x = turned = jnp.zeros((size, columns), jnp.float32)
        for p in range(m):
            x_p = plgpu.load(x_ref.at[row, sources[p][None, :]], mask=here, other=0.0)
            x_p = _float32(x_p)
            x = jnp.where((q == p)[None, :], x_p, x)
            turned = turned + x_p * _float32(R[p])[None, :]
        y = (x + turned).astype(out_ref.dtype)
        plgpu.store(out_ref.at[row, target[None, :]], y, mask=here)

    jax.lax.fori_loop(0, pl.cdiv(rows, size), turn, None)


def _column(c, inside, order_ref, x_ref):
    """Where the coordinates c stand. What is not inside lies past the end: interpreted, a masked
    store writes back what it read, and must not meet a column that its program turns."""
    if order_ref is None:
        return c
    return jnp.where(inside, plgpu.load(order_ref.at[c], mask=inside, other=0), x_ref.shape[1] + c)


def _float32(values):
    return values.astype(jnp.float32)

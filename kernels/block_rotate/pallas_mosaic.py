"""The input transform on Pallas' Mosaic GPU backend (Hopper): one pass over x, all slices at once.

The first programs of the grid take a tile of rows and some columns of one slice: rows and blocks of
R come by the copy engine (TMA), and each 64 columns of x are multiplied by WGMMA from registers.
The others look for rows of no adapter, in groups of 64, and copy them.
"""

from functools import partial, reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels import mosaic
from scute_jax.kernels.block_rotate.tile import RotateTile
from scute_jax.kernels.mosaic import HALF, ROWS
from scute_jax.kernels.pools import Rotation
from scute_jax.kernels.tiles import Tiles

SIDES = (16, 32, 64, 128)  # of blocks of R
MAX_COLUMNS = 256  # of a program
COPIED = 1024  # columns that a copying program looks after, one block after the other


def supports(
    x: tuple[Float[Array, "t d_in"], ...],
    rotation: tuple[Rotation, ...],
    tiles: Tiles,
    interpret: bool = False,
) -> bool:
    """Whether this twin takes such arrays: tiles of 64 rows, x and R of one half-width dtype."""

    def fits(own, R):
        dtypes = own.dtype == R.values.dtype and own.dtype in HALF
        return dtypes and R.order is None and R.values.shape[-1] in SIDES

    known = mosaic.INTERPRETER is not None or not interpret
    return known and tiles.size == ROWS <= x[0].shape[0] and all(map(fits, x, rotation))


@partial(jax.jit, static_argnames=("tile", "interpret"))
def block_rotate(
    x: tuple[Float[Array, "t d_in"], ...],
    rotation: tuple[Rotation, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_in"], ...]:
    """As the reference, where it `supports` the arrays."""
    m, (t, d) = rotation[0].values.shape[-1], x[0].shape
    span = max(m, mosaic.piece_width(x[0].dtype))
    width = max(1, min(tile.columns, MAX_COLUMNS) // span) * span
    n, blocks, copies = tiles.slot.shape[0], pl.cdiv(d, width), pl.cdiv(d, COPIED)
    turning = n * len(x) * blocks
    body = partial(_kernel, turning=turning, blocks=blocks, copies=copies, width=width)
    outs = mosaic.kernel(
        partial(body, interpret=interpret),
        name="block_rotate",
        grid={"program": turning + pl.cdiv(t, ROWS) * len(x) * copies},
        interpret=interpret,
        out_type=tuple(jax.ShapeDtypeStruct(own.shape, own.dtype) for own in x),
    )(
        (tiles.slot, tiles.start, tiles.rows, slot),
        x,
        tuple((jnp.reshape(R.values, (-1, d, m)), R.row) for R in rotation),
    )
    return tuple(outs)


def _kernel(rows, xs, rotations, *outs, turning, blocks, copies, width, interpret):
    """Of the tiles slot, start, rows [n] and of each row its slot [t]; per slice x [t, d], per
    slice (R [n, d, m], row [K]), a block of R below the other; per slice x R."""
    slot_ref, start_ref, rows_ref, who_ref = rows
    program = lax.axis_index("program")

    def place(program, count):
        """Which rows, which slice, which columns."""
        each = lax.div(program, count)
        return lax.div(each, len(xs)), lax.rem(each, len(xs)), lax.rem(program, count)

    @pl.when(program < turning)
    def _turn():
        tile, here, column = place(program, blocks)
        # All three are on their way at once, whatever the compiler would rather do.
        first, count, adapter = start_ref[tile], rows_ref[tile], slot_ref[tile]
        for s, (x_ref, (R_ref, row_ref), out_ref) in enumerate(
            zip(xs, rotations, outs, strict=True)
        ):

            @pl.when((here == s) & (count > 0) & (adapter >= 0) & (first >= 0))
            def _(x_ref=x_ref, R_ref=R_ref, row_ref=row_ref, out_ref=out_ref):
                at = (first, count, column * width)
                entry = row_ref[adapter]
                _turn_tile(at, width, entry, x_ref, R_ref, out_ref, interpret)

    @pl.when(program >= turning)
    def _copy():
        group, here, column = place(program - turning, copies)
        first = group * ROWS

        def nobody(r):
            return who_ref[jnp.minimum(first + r, who_ref.shape[0] - 1)] < 0

        some = reduce(or_, [nobody(r) for r in range(ROWS)])
        for s, (x_ref, out_ref) in enumerate(zip(xs, outs, strict=True)):

            @pl.when((here == s) & some)
            def _(x_ref=x_ref, out_ref=out_ref):
                _copy_group(first, column * COPIED, width, nobody, x_ref, out_ref)


def _turn_tile(at, width, entry, x_ref, R_ref, out_ref, interpret):
    m, x_s = R_ref.shape[-1], mosaic.pieces(x_ref.dtype, width)
    pl.run_scoped(
        partial(_turn_scope, at, entry, x_ref, R_ref, out_ref, interpret),
        x_s=x_s,
        x_bar=mosaic.barriers(len(x_s)),
        R_s=mosaic.tiled((width, m), R_ref.dtype, min(m, x_s[0].shape[1])),
        R_bar=mosaic.barriers(1),
    )


def _turn_scope(at, entry, x_ref, R_ref, out_ref, interpret, *, x_s, x_bar, R_s, R_bar):
    first, count, column = at
    mosaic.fetch_rows(x_ref, first, column, x_s, x_bar)

    @pl.when(entry >= 0)
    def _():
        R = R_ref.at[entry, pl.ds(column, R_s.shape[0])]
        plgpu.copy_gmem_to_smem(R, R_s, R_bar.at[0])
        plgpu.barrier_wait(R_bar.at[0])
        many = max(1, R_s.shape[1] // x_s[0].shape[1])  # pieces of a block
        for j in range(0, len(x_s), many):
            for i in range(j, j + many):
                plgpu.barrier_wait(x_bar.at[i])
            _turn_pieces(x_s[j : j + many], R_s, j * x_s[0].shape[1], interpret)
        plgpu.commit_smem()

    @pl.when(entry < 0)
    def _():
        _arrived(x_bar, len(x_s))

    mosaic.send_rows(x_s, out_ref, first, column, count)
    mosaic.sent()


def _turn_pieces(x_s, R_s, row, interpret):
    """x + x (R - I) in place: pieces that hold whole blocks, which stand in R_s from `row` on."""
    m, wide = R_s.shape[1], x_s[0].shape[1]
    xs = [mosaic.load(piece, plgpu.Layout.WGMMA) for piece in x_s]
    for i, (x, piece) in enumerate(zip(xs, x_s, strict=True)):
        if m > wide:  # one block for all pieces
            own = slice(i * wide, (i + 1) * wide)
            products = [
                (slice(None), left, R_s.at[pl.ds(row + p * wide, wide), own])
                for p, left in enumerate(xs)
            ]
        else:
            places = [slice(c, c + m) for c in range(0, wide, m)]
            products = [(at, x[:, at], R_s.at[pl.ds(row + at.start, m)]) for at in places]
        y = mosaic.plus_products(x.astype(jnp.float32), products, interpret)
        piece[...] = y.astype(piece.dtype)


def _copy_group(first, column, width, nobody, x_ref, out_ref):
    """Copies the rows of nobody among 64 rows, at `COPIED` columns."""

    def scope(x_s, x_bar):
        def copy(start, count):
            def block(j, _):
                at = column + j * width
                mosaic.fetch_rows(x_ref, first, at, x_s, x_bar)
                _arrived(x_bar, len(x_s))
                mosaic.send_rows(x_s, out_ref, first + start, at, count, start)
                mosaic.sent()

            here = jnp.minimum(COPIED, x_ref.shape[1] - column)
            lax.fori_loop(0, lax.div(here + width - 1, width), block, None)

        def row(r, run):
            """`run` rows in front of row r are nobody's."""
            run = jnp.where(nobody(r), run + 1, 0)

            @pl.when((run > 0) & ((r == ROWS - 1) | ~nobody(r + 1)))
            def _():
                copy(r + 1 - run, run)

            return run

        lax.fori_loop(0, ROWS, row, 0)

    x_s = mosaic.pieces(x_ref.dtype, width)
    pl.run_scoped(scope, x_s, mosaic.barriers(len(x_s)))


def _arrived(bars, count):
    for j in range(count):
        plgpu.barrier_wait(bars.at[j])

"""x A of all tiles side by side, [rows, n * width]: a row has zeros but at the ranks of its adapter
in the columns of its tile. So one product with all B, one below the other, is low B of every row.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scute_jax.kernels.precision import precision


def store_low(low_ref, rows, width, ranks, total):
    """The product of a tile's rows with some ranks, and zeros for all other rows."""
    at = jnp.arange(low_ref.shape[0])
    others = (at < rows.start) | (at >= rows.start + rows.count)
    store_zeros(low_ref, rows, width, ranks, others)
    at = low_ref.at[rows.row[:, None], (rows.tile * width + ranks)[None, :]]
    plgpu.store(at, total.astype(low_ref.dtype), mask=rows.held[:, None])


def store_zeros(low_ref, rows, width, ranks, which):
    at = jnp.arange(low_ref.shape[0])
    zeros = jnp.zeros((at.shape[0], ranks.shape[0]), low_ref.dtype)
    at = low_ref.at[at[:, None], (rows.tile * width + ranks)[None, :]]
    plgpu.store(at, zeros, mask=which[:, None])


def add_low_B(start, wait, rows, low_ref, factors, width, block_r, c):
    """start() and the product of all rows with columns c of all B, [rows, columns] in float32,
    once `wait` returns.

    A row gets 0 times the B of others. Where that is not 0, because a B is not finite, the sum is
    made anew from start(), so that each row adds up its own.
    """
    total, used = start(), rows.tiles()
    blocks = pl.cdiv(used * width, block_r)
    wait()

    def load(z):
        return _load(rows, low_ref, factors, width, z * block_r + jnp.arange(block_r), used, c)

    def add(z, total):
        low, B, _ = load(z)
        return total + plgpu.dot(low, B, precision=precision(B.dtype))

    def add_own(z, total):
        low, B, tile = load(z)
        first = z * block_r // width

        def one(i, total):
            here = tile == i
            own = jnp.where(here[None, :], low, 0), jnp.where(here[:, None], B, 0)
            added = total + plgpu.dot(*own, precision=precision(B.dtype))
            return jnp.where((of_row == i)[:, None], added, total)

        of_row = rows.tile()
        return jax.lax.fori_loop(first, pl.cdiv((z + 1) * block_r, width), one, total)

    total = jax.lax.fori_loop(0, blocks, add, total)
    spoiled = jnp.max(jnp.where(jnp.abs(total) < jnp.inf, 0, 1)) > 0
    return jax.lax.cond(
        spoiled, lambda: jax.lax.fori_loop(0, blocks, add_own, start()), lambda: total
    )


def _load(rows, low_ref, factors, width, q, used, c):
    """Columns q of low, those rows of all B at columns c, and the tile of each."""
    (tile, rank), page = _split(q, width), factors.A.shape[1]
    there = tile < used
    held = plgpu.load(rows.rows_ref.at[tile], mask=there, other=0) > 0
    own = held & (rank < plgpu.load(factors.rank.at[tile], mask=there, other=0))
    place, within = _split(rank, page)
    listed = there & (place < factors.table.shape[1])
    at = plgpu.load(factors.table.at[tile, place], mask=listed, other=0)
    inside = c < factors.B.shape[-1]
    B = factors.B.at[at[:, None], within[:, None], c[None, :]]
    B = plgpu.load(B, mask=own[:, None] & inside[None, :], other=0.0)
    low = low_ref.at[jnp.arange(low_ref.shape[0])[:, None], q[None, :]]
    # A mask that holds for whole tiles: with that of the ranks, copies would be of one number each.
    return plgpu.load(low, mask=there[None, :], other=0.0), B, tile


def _split(q, n):
    """q / n and what remains, of numbers that are not negative: the compiler then sees that they
    are the same, or count up, in whole blocks of n."""
    return jax.lax.div(q, jnp.full_like(q, n)), jax.lax.rem(q, jnp.full_like(q, n))

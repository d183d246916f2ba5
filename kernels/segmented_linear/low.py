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


def add_low_B(low, start, wait):
    """start() and the product of all rows with some columns of all B, [rows, columns] in float32.

    `low` is not read before `wait` returns, which is called once start() is there. A row gets 0
    times the B of others. Where that is not 0, because a B is not finite, the sum is made anew from
    start(), so that each row adds up its own.
    """

    def add(z, total):
        return total + _dot(low.x_A(z), low.B(z))

    total = start()
    wait()
    total = jax.lax.fori_loop(0, low.blocks, add, total)
    spoiled = jnp.where(total == total, 0, 1)  # 0 times what is not finite is NaN
    # Of two axes one by one: with jax 0.12, both at once become no code for a GPU.
    any_spoiled = jnp.max(jnp.max(spoiled, axis=1)) > 0
    return jax.lax.cond(
        any_spoiled, lambda: jax.lax.fori_loop(0, low.blocks, low.add_own, start()), lambda: total
    )


class Low:
    """x A of all rows and some columns c of all B, in blocks of block_r ranks; of the tiles
    first .. last - 1."""

    def __init__(self, rows, low_ref, factors, width, block_r, c, first, last):
        self.rows, self.low_ref = rows, low_ref
        self.places_ref, self.B_ref = factors.places, factors.B
        self.width, self.block_r, self.c = width, block_r, c
        self.first, self.last = first, jnp.minimum(last, rows.tiles())
        self.blocks = pl.cdiv(jnp.maximum(0, self.last - first) * width, block_r)

    def x_A(self, z):
        """Block z of x A, zero past the last tile."""
        q, (tile, _) = self._ranks(z)
        at = self.low_ref.at[jnp.arange(self.low_ref.shape[0])[:, None], q[None, :]]
        # The mask holds for whole tiles: with one of ranks, copies would be of one number each.
        return plgpu.load(at, mask=(tile < self.last)[None, :], other=0.0)

    def B(self, z):
        """Block z of all B, zero where an adapter has no such rank."""
        (_, (tile, rank)), B_ref, places_ref = self._ranks(z), self.B_ref, self.places_ref
        there = (tile < self.last) & (rank < places_ref.shape[1])
        place = plgpu.load(places_ref.at[tile, rank], mask=there, other=-1)
        held = plgpu.load(self.rows.rows_ref.at[tile], mask=there, other=0) > 0
        page = B_ref.shape[1]
        at = B_ref.at[(place // page)[:, None], (place % page)[:, None], self.c[None, :]]
        mask = (held & (place >= 0))[:, None] & (self.c < B_ref.shape[-1])[None, :]
        return plgpu.load(at, mask=mask, other=0.0)

    def add_own(self, z, total):
        """total and the product of block z, tile by tile: a row takes nothing of other tiles."""
        (_, (tile, _)), low, B = self._ranks(z), self.x_A(z), self.B(z)
        of_row = self.rows.tile()

        def one(i, total):
            here = tile == i
            own = jnp.where(here[None, :], low, 0), jnp.where(here[:, None], B, 0)
            return jnp.where((of_row == i)[:, None], total + _dot(*own), total)

        first, last = z * self.block_r // self.width, pl.cdiv((z + 1) * self.block_r, self.width)
        return jax.lax.fori_loop(self.first + first, self.first + last, one, total)

    def _ranks(self, z):
        """The columns of block z in x A, and of each the tile and the rank in it."""
        q = z * self.block_r + jnp.arange(self.block_r)
        tile, rank = _split(q, self.width)
        return self.first * self.width + q, (self.first + tile, rank)


def _dot(low, B):
    return plgpu.dot(low, B, precision=precision(B.dtype))


def _split(q, n):
    """q / n and what remains, of numbers that are not negative: the compiler then sees that they
    are the same, or count up, in whole blocks of n."""
    return jax.lax.div(q, jnp.full_like(q, n)), jax.lax.rem(q, jnp.full_like(q, n))

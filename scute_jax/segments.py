"""Segments: which rows of a batch belong to which adapter, worked out once per step."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Int

from scute_jax.kernels.tiles import Tiles, make_tiles


@struct.dataclass
class Segments:
    """The rows of a batch grouped by adapter.

    Invariants: order is a permutation of the rows, or None if the rows are handed over grouped
    already; every row with an adapter lies in exactly one tile, and that tile is its adapter's.
    """

    slot: Int[Array, "t"]  # adapter of each grouped row, -1 = base row
    order: Int[Array, "t"] | None  # order[i] = the row of x that is grouped row i
    tiles: Tiles
    num_adapters: int = struct.field(pytree_node=False)

    def sort(self, x: Array) -> Array:
        """The rows of x in the order of the segments."""
        return x if self.order is None else jnp.take(x, self.order, axis=0)

    def unsort(self, y: Array) -> Array:
        """The inverse of `sort`."""
        if self.order is None:
            return y
        return jnp.zeros_like(y).at[self.order].set(y, unique_indices=True)


def segments(
    adapter_ids: Int[Array, "t"],
    num_adapters: int,
    *,
    presorted: bool = False,
    tile: int | None = None,
) -> Segments:
    """Segments of rows that use adapter adapter_ids[i], -1 = base model. Works inside jit.

    `presorted` promises that the ids are non-decreasing; no row is then moved. `tile` is the number
    of rows in a tile; None chooses it from the shapes.
    Raises: ValueError if concrete ids lie outside [-1, num_adapters) or break the promise.
    Undefined: the same of ids that are traced.
    """
    if not isinstance(adapter_ids, Tracer):
        _check(np.asarray(adapter_ids), num_adapters, presorted)
    ids = jnp.asarray(adapter_ids, jnp.int32)
    order = None if presorted else jnp.argsort(ids, stable=True).astype(jnp.int32)
    slot = ids if order is None else ids[order]
    size = tile_rows(ids.shape[0], num_adapters) if tile is None else tile
    tiles = make_tiles(slot, max(num_adapters, 1), size)
    return Segments(slot=slot, order=order, tiles=tiles, num_adapters=num_adapters)


def block_segments(
    block_slot: Int[Array, "n"], rows: Int[Array, "n"], size: int, num_adapters: int
) -> Segments:
    """Segments of n blocks of `size` rows whose first rows[i] rows use adapter block_slot[i].

    The rest of a block is padding (base rows). Each block is a tile: nothing is sorted or moved.
    """
    place = jnp.arange(size, dtype=jnp.int32)[None, :]
    slot = jnp.where(place < rows[:, None], block_slot[:, None], -1)
    tiles = Tiles(
        slot=jnp.maximum(block_slot, 0),
        start=jnp.arange(block_slot.shape[0], dtype=jnp.int32) * size,
        rows=jnp.where(block_slot >= 0, rows, 0),
        size=size,
    )
    return Segments(jnp.reshape(slot, (-1,)), None, tiles, num_adapters)


def tile_rows(num_rows: int, num_adapters: int) -> int:
    """Rows per tile: few when most segments hold few rows, more when tiles would be well filled.

    A GPU's tensor cores take no fewer than 16; a tile of one row, which leaves them out, is the
    cheapest where hardly any adapter has two, and anywhere else.
    """
    per_adapter = num_rows // max(num_adapters, 1)
    least = 16 if jax.default_backend() == "gpu" and per_adapter > 1 else 1
    return next((size for size in (64, 32, 16) if per_adapter >= size), least)


def _check(ids: np.ndarray, num_adapters: int, presorted: bool) -> None:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"adapter_ids must be a vector of integers, got {ids.dtype}{ids.shape}; "
            "give one id per row of x, -1 for rows of the base model."
        )
    outside = np.flatnonzero((ids < -1) | (ids >= num_adapters))
    if outside.size:
        raise ValueError(
            f"adapter_ids[{outside[0]}] is {ids[outside[0]]}, but there are {num_adapters} "
            f"adapters; ids run from -1 (base) to {num_adapters - 1}."
        )
    if presorted and np.any(np.diff(ids) < 0):
        raise ValueError("presorted=True needs adapter_ids in non-decreasing order.")

"""Tiles: how the sorted rows of a batch are cut so that each piece belongs to one adapter."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Tiles:
    """Pieces of at most `size` consecutive rows; a piece holds rows of one adapter only.

    Invariants: tiles do not overlap; rows of no adapter (base rows, padding) are in no tile; an
    empty tile has rows == 0, and its slot and start mean nothing. The number of tiles follows from
    the shapes alone, so that the grouping never recompiles.
    """

    slot: Int[Array, "n"]  # the adapter of the tile, an index into the tables of the pools
    start: Int[Array, "n"]  # its first row
    rows: Int[Array, "n"]  # how many rows it has, 0 .. size
    size: int = struct.field(pytree_node=False)

    def row_index(self, num_rows: int) -> tuple[Int[Array, "n size"], Bool[Array, "n size"]]:
        """The row that each place of a tile holds, clipped into range, and whether it holds one."""
        place = jnp.arange(self.size, dtype=jnp.int32)[None, :]
        valid = place < self.rows[:, None]
        return jnp.clip(self.start[:, None] + place, 0, num_rows - 1), valid


def make_tiles(sorted_slot: Int[Array, "t"], num_slots: int, size: int) -> Tiles:
    """Cuts rows that are sorted by slot (-1 = base rows, first) into tiles. Works inside jit.

    Undefined: rows that are not sorted, slots outside [-1, num_slots).
    """
    t = sorted_slot.shape[0]
    if size == 1:
        rows = (sorted_slot >= 0).astype(jnp.int32)
        start = jnp.arange(t, dtype=jnp.int32)
        return Tiles(slot=jnp.maximum(sorted_slot, 0), start=start, rows=rows, size=1)
    starts = jnp.searchsorted(sorted_slot, jnp.arange(num_slots + 1, dtype=sorted_slot.dtype))
    starts = starts.astype(jnp.int32)  # first row of each slot; starts[num_slots] == t
    counts = jnp.diff(starts)
    ends = jnp.cumsum(-(-counts // size))  # tiles up to and with each slot
    tile = jnp.arange(max_tiles(t, num_slots, size), dtype=jnp.int32)
    slot = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    used = slot < num_slots
    slot = jnp.minimum(slot, num_slots - 1)
    before = jnp.where(slot > 0, ends[slot - 1], 0).astype(jnp.int32)
    start = starts[slot] + (tile - before) * size
    rows = jnp.where(used, jnp.minimum(size, starts[slot + 1] - start), 0)
    return Tiles(slot=slot, start=start, rows=rows.astype(jnp.int32), size=size)


def max_tiles(num_rows: int, num_slots: int, size: int) -> int:
    """The most tiles that any grouping of the rows can need."""
    if size == 1:
        return num_rows
    groups = min(num_rows, num_slots)
    return (num_rows + groups * (size - 1)) // size

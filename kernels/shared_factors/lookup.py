"""What a shrink looks up of its rows, for the launches behind it, which find it by one read."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from scute_jax.kernels.pools import Shared
from scute_jax.kernels.triton import power_of_two


@struct.dataclass
class Lookup:
    """Of each term: what the rows use, and for blocks of rows the pairs that they use, as *items*.

    Undefined: `item` where a pool has one pair; items from the count of their block on.
    """

    entry: Int[Array, "j t"]  # of the row, or -1
    rank: Int[Array, "j t"]  # of the row's pair, or 0
    item: Int[Array, "j t"]  # which of its block's is the row's pair, or -1
    count: Int[Array, "n j"]  # items of a block
    most: Int[Array, "n j"]  # ranks of the largest item
    items: Int[Array, "n j k 1+w"]  # the rank of each, and the pages that hold it

    @staticmethod
    def shapes(shared: Shared, blocks: int, size: int) -> "Lookup":
        """Of that of `blocks` blocks of `size` rows."""
        terms, (num_pairs, pages) = shared.row.shape[1], shared.pairs.table.shape

        def ints(*shape: int):
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        of_rows, of_blocks = ints(terms, blocks * size), ints(blocks, terms)
        items = ints(blocks, terms, min(num_pairs, size), 1 + pages)
        return Lookup(of_rows, of_rows, of_rows, of_blocks, of_blocks, items)  # type: ignore[arg-type]


class BlockPairs:
    """A block of rows at one term: their entries, and the pairs that they use, one by one."""

    def __init__(self, shared, slot_ref, block, size, j):
        self.shared, self.block, self.j = shared, block, j
        self.at, self.num_pairs = block * size + jnp.arange(size), shared.pairs.rank.shape[0]
        slot = plgpu.load(slot_ref.at[self.at], mask=self.at < slot_ref.shape[0], other=-1)
        self.entry = plgpu.load(shared.row.at[slot, j], mask=slot >= 0, other=-1)
        pair = plgpu.load(shared.pair.at[slot, j], mask=slot >= 0, other=-1)
        self.pair = jnp.where(self.entry >= 0, pair, -1)
        if self.num_pairs == 1:
            self.count = jnp.minimum(jnp.max(self.pair) + 1, 1)
        else:
            self.count, self.item = self._items()

    def each(self, work):
        """work(item, pair) for each pair that a row uses, smallest first."""
        if self.num_pairs == 1:
            pl.when(self.count > 0)(lambda: work(0, 0))
            return

        def step(k, p):
            work(k, p)
            return self._least(self.pair > p)

        jax.lax.fori_loop(0, self.count, step, self._least(self.pair >= 0))

    def write(self, lookup):
        """Stores all of it."""
        rank_ref, table_ref = self.shared.pairs.rank, self.shared.pairs.table
        pages = table_ref.shape[1]
        rank = plgpu.load(rank_ref.at[self.pair], mask=self.pair >= 0, other=0)
        plgpu.store(lookup.entry.at[self.j, self.at], self.entry)
        plgpu.store(lookup.rank.at[self.j, self.at], rank)
        if self.num_pairs > 1:
            plgpu.store(lookup.item.at[self.j, self.at], self.item)
        lookup.count[self.block, self.j] = self.count
        lookup.most[self.block, self.j] = jnp.max(rank)

        def write_item(k, p):
            place = jnp.arange(power_of_two(1 + pages))
            page = plgpu.load(
                table_ref.at[p, place - 1], mask=(place > 0) & (place <= pages), other=0
            )
            own = jnp.where(place == 0, rank_ref[p], page)
            at = lookup.items.at[self.block, self.j, k, place]
            plgpu.store(at, own, mask=place <= pages)

        self.each(write_item)

    def _least(self, among):
        """The smallest pair of these rows."""
        return jnp.min(jnp.where(among, self.pair, self.num_pairs))

    def _items(self):
        """How many pairs there are, and which of them is that of each row."""

        def step(carry):
            p, k, item = carry
            return self._least(self.pair > p), k + 1, jnp.where(self.pair == p, k, item)

        none, first = jnp.full_like(self.pair, -1), self._least(self.pair >= 0)
        start = first, jnp.int32(0), none
        _, count, item = jax.lax.while_loop(lambda carry: carry[0] < self.num_pairs, step, start)
        return count, item

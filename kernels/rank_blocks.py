"""How Triton kernels walk over the ranks of an adapter: in blocks gathered from its pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scute_jax.kernels.pools import LowRank
from scute_jax.kernels.triton import MIN_SIDE, power_of_two

T = TypeVar("T")


def block_size(factors: LowRank, most: int) -> int:
    """Ranks in one product: all that an adapter of the pool can have, if they are not too many."""
    page, pages = factors.A.shape[1], factors.table.shape[1]
    return max(page, MIN_SIDE, min(most, power_of_two(page * pages)))


@dataclass(frozen=True)
class Block:
    """Some ranks: their numbers, which of them the adapter has, and the pages that hold them."""

    ranks: Any
    own: Any
    page: Any
    place: Any  # within the page

    def load(self, pool_ref, columns, inside):
        """These ranks of a pool at some columns, zero for ranks that the adapter does not have."""
        at = (self.page[:, None], self.place[:, None], columns[None, :])
        return plgpu.load(pool_ref.at[at], mask=self.own[:, None] & inside[None, :], other=0.0)


class RankBlocks:
    """The ranks of the adapter in `slot`, in blocks of `size`."""

    def __init__(self, table_ref, rank_ref, slot, page: int, size: int):
        self.table_ref, self.slot, self.page_size, self.size = table_ref, slot, page, size
        self.one = table_ref.shape[1] * page <= size
        # Both loads depend on the slot alone. Where one block is all, neither waits for the other.
        self.rank = rank_ref[slot]
        self._pages = self._load_pages(self._numbers(0)) if self.one else None

    def fold(self, step: Callable[[Block, T], T], carry: T) -> T:
        """`step` over the blocks that the adapter has; its rank must not be 0."""
        if self.one:
            return step(self._block(self._numbers(0), self._pages), carry)

        def body(b, carry):
            ranks = self._numbers(b)
            return step(self._block(ranks, self._load_pages(ranks)), carry)

        return jax.lax.fori_loop(0, pl.cdiv(self.rank, self.size), body, carry)

    def _numbers(self, b):
        return b * self.size + jnp.arange(self.size)

    def _load_pages(self, ranks):
        page = ranks // self.page_size
        there = page < self.table_ref.shape[1]
        return plgpu.load(self.table_ref.at[self.slot, page], mask=there, other=0)

    def _block(self, ranks, pages) -> Block:
        return Block(ranks, ranks < self.rank, pages, ranks % self.page_size)

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
    """The ranks of the adapter of a tile, in blocks of `size`. The tables are at tiles."""

    def __init__(self, table_ref, rank_ref, tile, page: int, size: int):
        self.table_ref, self.tile, self.page_size, self.size = table_ref, tile, page, size
        self.one = table_ref.shape[1] * page <= size
        # Where one block is all, neither load waits for the other.
        self.rank = rank_ref[tile]
        self._pages = self._load_pages(self._numbers(0)) if self.one else None

    def fold(self, step: Callable[[Block, T], T], carry: T) -> T:
        """`step` over the blocks that the adapter has."""
        if self.one:  # without ranks, a block of zeros
            return step(self.block(0), carry)
        blocks = pl.cdiv(self.rank, self.size)
        return jax.lax.fori_loop(0, blocks, lambda b, carry: step(self.block(b), carry), carry)

    def block(self, b) -> Block:
        """Block b, of which the adapter may have no rank."""
        ranks = self._numbers(b)
        return self._block(ranks, self._pages if self.one else self._load_pages(ranks))

    def _numbers(self, b):
        return b * self.size + jnp.arange(self.size)

    def _load_pages(self, ranks):
        page = ranks // self.page_size
        there = page < self.table_ref.shape[1]
        return plgpu.load(self.table_ref.at[self.tile, page], mask=there, other=0)

    def _block(self, ranks, pages) -> Block:
        return Block(ranks, ranks < self.rank, pages, ranks % self.page_size)

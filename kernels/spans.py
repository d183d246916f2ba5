"""How Triton kernels cut d_in into parts, so that few rows keep a whole GPU busy."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Spans:
    """`parts` parts of d_in, each of `each` products of `block_k` columns."""

    d_in: int
    block_k: int
    each: int
    parts: int

    @classmethod
    def cut(cls, d_in: int, block_k: int, wanted: int) -> "Spans":
        """About `wanted` parts, at least one and none without columns."""
        products = pl.cdiv(d_in, block_k)
        each = pl.cdiv(products, max(1, min(products, wanted)))
        return cls(d_in, block_k, each, pl.cdiv(products, each))

    def columns(self, part, j):
        """The columns of product j of a part, and which of them there are."""
        k = (part * self.each + j) * self.block_k + jnp.arange(self.block_k)
        return k, k < self.d_in

    def total(self, product, zero: Any, first: Any = 0, last: Any = None) -> Any:
        """The sum over a part, or its products first .. last - 1; `product(j, sum)` adds one."""
        if self.each == 1 and last is None:
            return product(0, zero)
        return jax.lax.fori_loop(first, self.each if last is None else last, product, zero)

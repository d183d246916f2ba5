"""The second half of the shared factors on Pallas' Triton backend: h + (low B) * e.

All items of a block of rows (the pairs of its terms) are one loop. With one term e is taken after
it, and with one pair nothing of it is selected before the end. With more terms, lookups are two
steps and e is one step ahead of the product that they are for. Rows without terms are stored where
h is in parts, which are summed here; else they lie in the result.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scute_jax.kernels.precision import precision
from scute_jax.kernels.triton import power_of_two

EARLY = 32  # numbers of h that a thread may hold during the products


def expand_kernel(tree, firsts, size, block_n, block_q, warps, *refs):
    """The arguments flattened as `tree` says: per slice h [t, d_out] or its parts, low, Lookup
    and Shared; the new h per slice. Slice s has the columns from block firsts[s] on."""
    hs, lows, lookups, pools = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    block, column = pl.program_id(0), pl.program_id(1)
    slices = zip(hs, lows, lookups, pools, refs[tree.num_leaves :], strict=True)
    for s, (h_ref, low_ref, lookup, shared, out_ref) in enumerate(slices):

        @pl.when((column >= firsts[s]) & (column < firsts[s + 1]))
        def _slice(
            h_ref=h_ref, low_ref=low_ref, lookup=lookup, shared=shared, out_ref=out_ref,
            first=firsts[s],
        ):  # fmt: skip
            c = (column - first) * block_n + jnp.arange(block_n)
            part = _Part(shared, low_ref, lookup, block, size, c, block_q)
            if shared.row.shape[1] == 1:
                early = size * block_n <= EARLY * 32 * warps
                _one_term(part, h_ref, out_ref, early)
            else:
                _terms(part, h_ref, out_ref)


class _Part:
    """A block of rows and of columns of a slice."""

    def __init__(self, shared, low_ref, lookup, block, size, c, block_q):
        self.shared, self.low_ref, self.lookup, self.block = shared, low_ref, lookup, block
        self.c, self.there = c, c < shared.e.shape[1]
        self.at, self.block_q = block * size + jnp.arange(size), block_q
        self.zero = jnp.zeros((size, c.shape[0]), jnp.float32)
        self.one_pair = shared.pairs.rank.shape[0] == 1

    def rank(self, j, k):
        """The rank of item k of a term."""
        return self.lookup.items[self.block, j, k, 0]

    def rows(self, ref, j):
        """Of a lookup, what it has of these rows."""
        return plgpu.load(ref.at[j, self.at])

    def pages(self, j, k, b, rank):
        """Where the ranks of block b are, and which of them there are."""
        q = self._ranks(b)
        at = self.lookup.items.at[self.block, j, k, 1 + q // self.shared.pairs.B.shape[1]]
        return plgpu.load(at, mask=q < rank, other=0)

    def product(self, j, b, rank, page):
        """low B over block b of the ranks of one item."""
        B_ref, q = self.shared.pairs.B, self._ranks(b)
        low = plgpu.load(self.low_ref.at[j, self.at[:, None], q[None, :]])
        B = plgpu.load(
            B_ref.at[page[:, None], (q % B_ref.shape[1])[:, None], self.c[None, :]],
            mask=(q < rank)[:, None] & self.there[None, :],
            other=0.0,
        )
        return plgpu.dot(low, B, precision=precision(B.dtype))

    def columns(self, ref, row, held, *first):
        """These columns of some rows, in float32; behind a first index, if there is one."""
        at = ref.at[(*first, row[:, None], self.c[None, :])]
        mask = held[:, None] & self.there[None, :]
        return plgpu.load(at, mask=mask, other=0.0).astype(jnp.float32)

    def h(self, ref, mine):
        """These columns of h: of rows of mine, or of all where h is in parts."""
        if len(ref.shape) == 2:
            return self.columns(ref, self.at, mine)
        held = self.at < ref.shape[1]
        parts = (self.columns(ref, self.at, held, p) for p in range(ref.shape[0]))
        return reduce(jnp.add, parts)

    def store(self, h_ref, out_ref, h, y, changed):
        """y for rows that changed, h for the others."""
        if len(h_ref.shape) == 3:
            y, changed = jnp.where(changed[:, None], y, h), self.at < out_ref.shape[0]
        at = out_ref.at[self.at[:, None], self.c[None, :]]
        plgpu.store(at, y.astype(out_ref.dtype), mask=changed[:, None] & self.there[None, :])

    def _ranks(self, b):
        return b * self.block_q + jnp.arange(self.block_q)


def _one_term(part, h_ref, out_ref, early):
    lookup, j = part.lookup, part.block * 0  # indices of a ref have to be traced
    count, most = lookup.count[part.block, j], lookup.most[part.block, j]
    entry = part.rows(lookup.entry, j)
    item = None if part.one_pair else part.rows(lookup.item, j)
    mine, steps = entry >= 0, pl.cdiv(most, part.block_q)

    def e():
        return part.columns(part.shared.e, entry, mine)

    def step(i, total):
        if item is None:
            return total + part.product(j, i, most, part.pages(j, j, i, most))
        k, b = i // steps, i % steps
        rank = part.rank(j, k)
        added = total + part.product(j, b, rank, part.pages(j, k, b, rank))
        return jnp.where((item == k)[:, None], added, total)

    @pl.when((count > 0) | (len(h_ref.shape) == 3))
    def _work():
        riding = (part.h(h_ref, mine), e()) if early else None
        total = jax.lax.fori_loop(0, count * steps, step, part.zero)
        if riding is None:
            total = total * e()
            h = part.h(h_ref, mine)
            part.store(h_ref, out_ref, h, h + total, mine)
        else:
            h, own = riding
            part.store(h_ref, out_ref, h, h + total * own, mine)


def _terms(part, h_ref, out_ref):
    lookup, block, terms = part.lookup, part.block, part.shared.row.shape[1]
    j = jnp.arange(power_of_two(terms))
    most_items, most_ranks = (
        jnp.max(plgpu.load(ref.at[block, j], mask=j < terms, other=0))
        for ref in (lookup.count, lookup.most)
    )
    steps = pl.cdiv(most_ranks, part.block_q)
    total = terms * most_items * steps

    def place(i):
        """The term, the item and the block of ranks of a step; after the last, the last again."""
        i = jnp.minimum(i, total - 1)
        return i // (most_items * steps), i // steps % most_items, i % steps

    def factor(i):
        """The rank of the item of a step, and where those of this block are."""
        j, k, b = place(i)
        rank = jnp.where(k < lookup.count[block, j], part.rank(j, k), 0)
        return rank, part.pages(j, k, b, rank)

    def entries(i):
        """Of the rows whose pair is the item of a step, the others have -1."""
        j, k, _ = place(i)
        entry = part.rows(lookup.entry, j)
        return entry if part.one_pair else jnp.where(part.rows(lookup.item, j) == k, entry, -1)

    def vectors(entry):
        return part.columns(part.shared.e, entry, entry >= 0)

    def step(i, carry):
        y, shares, (rank, page), (entry, e), coming = carry
        j, _, b = place(i)
        ahead = factor(i + 1), vectors(coming), entries(i + 2)
        added = y + part.product(j, b, rank, page) * e
        mine = (entry >= 0) & (b * part.block_q < rank)
        y, shares = jnp.where(mine[:, None], added, y), shares | mine
        # Triton pipelines no loop that hands on a value as it is: the least entry is -1.
        return y, shares, ahead[0], (jnp.maximum(coming, -1), ahead[1]), ahead[2]

    @pl.when(total > 0)
    def _work():
        h = part.h(h_ref, part.at < h_ref.shape[-2])
        shares, entry = jnp.zeros(part.at.shape, jnp.bool_), entries(0)
        carry = h, shares, factor(0), (entry, vectors(entry)), entries(1)
        y, shares, *_ = jax.lax.fori_loop(0, total, step, carry)
        part.store(h_ref, out_ref, h, y, shares)

    if len(h_ref.shape) == 3:

        @pl.when(total == 0)
        def _nothing():
            every = part.at < h_ref.shape[1]
            h = part.h(h_ref, every)
            part.store(h_ref, out_ref, h, h, every)

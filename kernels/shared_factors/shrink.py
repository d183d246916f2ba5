"""The first half of the shared factors on Pallas' Triton backend: ((x * u) A) * d."""

from functools import reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from scute_jax.kernels.precision import precision
from scute_jax.kernels.shared_factors.lookup import BlockPairs


def shrink_kernel(tree, out_tree, firsts, size, spans, block_r, *refs):
    """The arguments flattened as `tree` says: slot [t], x [t, d_in], per slice Shared; the results
    as `out_tree` says: per slice low, per slice Lookup. Slice s has the programs from firsts[s] on:
    a block of ranks of a term each. Where d_in is in one part, low is scaled and rounded."""
    slot_ref, x_ref, pools = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    lows, lookups = jax.tree.unflatten(out_tree, refs[tree.num_leaves :])
    which, block, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    for s, (shared, low_ref, lookup) in enumerate(zip(pools, lows, lookups, strict=True)):

        @pl.when((which >= firsts[s]) & (which < firsts[s + 1]))
        def _slice(shared=shared, low_ref=low_ref, lookup=lookup, first=firsts[s]):
            per_term = low_ref.shape[-1] // block_r
            j, b = (which - first) // per_term, (which - first) % per_term
            _shrink(
                shared, j, b, part, spans, block_r, x_ref, low_ref, lookup, slot_ref, block, size
            )


def _shrink(shared, j, b, part, spans, block_r, x_ref, low_ref, lookup, slot_ref, block, size):
    """The products of a block of rows with a block of ranks, pair by pair."""
    A_ref, table_ref, rank_ref = shared.pairs.A, shared.pairs.table, shared.pairs.rank
    page, q = A_ref.shape[1], b * block_r + jnp.arange(block_r)

    def find(p):
        held = q // page < table_ref.shape[1]
        return rank_ref[p], plgpu.load(table_ref.at[p, q // page], mask=held, other=0)

    # Where there is one pair, this waits for none of what the rows have.
    found = find(0) if rank_ref.shape[0] == 1 else None
    rows = BlockPairs(shared, slot_ref, block, size, j)
    pl.when((b == 0) & (part == 0))(lambda: rows.write(lookup))

    def work(_, p):
        rank, at = found or find(p)
        uses, own = rows.pair == p, q < rank

        def product(i, total):
            k, there = spans.columns(part, i)
            here = uses[:, None] & there[None, :]
            xs = plgpu.load(x_ref.at[rows.at[:, None], k[None, :]], mask=here, other=0.0)
            if shared.u is not None:
                u_at = shared.u.at[rows.entry[:, None], k[None, :]]
                u = plgpu.load(u_at, mask=here, other=0.0).astype(jnp.float32)
                xs = (xs.astype(jnp.float32) * u).astype(xs.dtype)
            a = plgpu.load(
                A_ref.at[at[:, None], (q % page)[:, None], k[None, :]],
                mask=own[:, None] & there[None, :],
                other=0.0,
            )
            return total + plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

        zero = jnp.zeros((size, block_r), jnp.float32)
        here = rows.at[:, None], q[None, :]
        if spans.parts > 1:  # ranks past the last block that the pair has are not read

            @pl.when(b * block_r < rank)
            def _product():
                total = spans.total(product, zero)
                plgpu.store(low_ref.at[part, j, *here], total, mask=uses[:, None])

            return
        # Where the pair has no such ranks, the expand reads zeros.
        total = jax.lax.cond(b * block_r < rank, lambda: spans.total(product, zero), lambda: zero)
        ranks = jnp.where(uses, rank, 0)
        low = _scaled(total, shared.d, rows.entry, ranks, q).astype(low_ref.dtype)
        plgpu.store(low_ref.at[j, *here], low, mask=uses[:, None])

    rows.each(work)


def sum_kernel(tree, firsts, size, block_r, *refs):
    """The arguments flattened as `tree` says: per slice the parts of low, Lookup and d; per slice
    low. Slice s has the programs from firsts[s] on: a block of ranks of a term each."""
    all_parts, lookups, ds = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    which, at = pl.program_id(0), pl.program_id(1) * size + jnp.arange(size)
    slices = zip(all_parts, lookups, ds, refs[tree.num_leaves :], strict=True)
    for s, (parts, lookup, d_ref, low_ref) in enumerate(slices):

        @pl.when((which >= firsts[s]) & (which < firsts[s + 1]))
        def _slice(parts=parts, lookup=lookup, d_ref=d_ref, low_ref=low_ref, first=firsts[s]):
            per_term = low_ref.shape[-1] // block_r
            j, b = (which - first) // per_term, (which - first) % per_term
            q = b * block_r + jnp.arange(block_r)
            entry = plgpu.load(lookup.entry.at[j, at])
            ranks = plgpu.load(lookup.rank.at[j, at])

            @pl.when(jnp.max(entry) >= 0)
            def _work():
                here = j, at[:, None], q[None, :]
                own = (plgpu.load(parts.at[p, *here]) for p in range(parts.shape[0]))
                low = _scaled(reduce(jnp.add, own), d_ref, entry, ranks, q)
                plgpu.store(low_ref.at[here], low.astype(low_ref.dtype))


def _scaled(total, d_ref, entry, ranks, q):
    """total * d, zero at ranks that a row does not have."""
    held = (entry >= 0)[:, None] & (q < d_ref.shape[1])[None, :]
    d = plgpu.load(d_ref.at[entry[:, None], q[None, :]], mask=held, other=0.0)
    return jnp.where(q[None, :] < ranks[:, None], total * d.astype(jnp.float32), 0.0)

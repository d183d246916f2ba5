"""The shared-factor route on Pallas' Triton backend: two launches over the whole batch.

All slices are in both launches. Rows are taken in blocks as they come, whatever adapters they use:
a block reads a pair once if one of its rows uses it, and each row is scaled by its own d and e. A
block without such rows does nothing. The parts of the first sum (over d_in) are added up in the
second launch, which walks over the terms: their number (RandLoRA has a hundred) is not unrolled.
"""

from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import Shared
from scute_jax.kernels.precision import precision
from scute_jax.kernels.spans import Spans
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class SharedTile:
    """rows: of a block; block_k: columns of x in one product; block_r: ranks in one product;
    block_n: output columns of a program. d_in is split until there are `programs` or `most_parts`.
    """

    rows: int = 64
    block_k: int = 128
    programs: int = 256
    most_parts: int = 8
    block_r: int = 64
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3


@partial(jax.jit, static_argnames=("tile", "interpret"))
def shared_factors(
    h: tuple[Float[Array, "t d_out"], ...],
    x: Float[Array, "t d_in"],
    shared: tuple[Shared, ...],
    slot: Int[Array, "t"],
    tile: SharedTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference; every slice has shared terms."""
    widths = [own.d.shape[1] for own in shared]
    tile = tile or tuned(SharedTile, rows=x.shape[0], rank=max(widths))
    t, d_in = x.shape
    size = min(tile.rows, max(MIN_SIDE, power_of_two(t)))
    blocks = pl.cdiv(t, size)
    page = shared[0].pairs.A.shape[1]
    block_r = max(page, min(tile.block_r, power_of_two(max(widths))))
    rank_blocks = [pl.cdiv(width, block_r) for width in widths]
    terms = [own.row.shape[1] for own in shared]
    counts = [j * r for j, r in zip(terms, rank_blocks, strict=True)]
    wanted = min(tile.most_parts, pl.cdiv(tile.programs, blocks * sum(counts)))
    spans = Spans.cut(d_in, min(tile.block_k, power_of_two(d_in)), wanted)
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "interpret": interpret}
    flat, tree = jax.tree.flatten((slot, x, shared))
    firsts = tuple(accumulate(counts, initial=0))
    lows = pallas_call(
        partial(_shrink_kernel, tree, firsts, size, spans, block_r),
        name="shared_shrink",
        grid=(sum(counts), blocks, spans.parts),
        out_shape=[
            jax.ShapeDtypeStruct((spans.parts, j, blocks, size, r * block_r), jnp.float32)
            for j, r in zip(terms, rank_blocks, strict=True)
        ],
        **how,
    )(*flat)
    block_n = min(tile.block_n, power_of_two(max(part.shape[1] for part in h)))
    firsts = tuple(accumulate((pl.cdiv(part.shape[1], block_n) for part in h), initial=0))
    flat, tree = jax.tree.flatten((h, tuple(lows), slot, shared))
    outs = pallas_call(
        partial(_expand_kernel, tree, firsts, size, block_n, block_r),
        name="shared_expand",
        grid=(blocks, firsts[-1]),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in h],
        aliases={s: s for s in range(len(h))},
        **how,
    )(*flat)
    return tuple(outs)


class _Rows:
    """A block of rows and what their adapters have: of term j the entry and the pair, -1 = none."""

    def __init__(self, block, size, t, slot_ref, shared):
        self.at = block * size + jnp.arange(size)
        self.inside = self.at < t
        self.shared = shared
        self.slot = plgpu.load(slot_ref.at[self.at], mask=self.inside, other=-1)

    def entry(self, j):
        return plgpu.load(self.shared.row.at[self.slot, j], mask=self.slot >= 0, other=-1)

    def pair(self, j, entry):
        return plgpu.load(self.shared.pair.at[self.slot, j], mask=entry >= 0, other=-1)


def _shrink_kernel(tree, firsts, size, spans, block_r, *refs):
    """The arguments flattened as `tree` says: slot [t], x [t, d_in], per slice Shared; per slice
    low. Slice s has the programs from firsts[s] on: a block of ranks of a term each."""
    slot_ref, x_ref, pools = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    which, block, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    for s, (shared, low_ref) in enumerate(zip(pools, refs[tree.num_leaves :], strict=True)):

        @pl.when((which >= firsts[s]) & (which < firsts[s + 1]))
        def _slice(shared=shared, low_ref=low_ref, first=firsts[s]):
            per_term = low_ref.shape[-1] // block_r
            j, b = (which - first) // per_term, (which - first) % per_term
            rows = _Rows(block, size, x_ref.shape[0], slot_ref, shared)
            _shrink(rows, shared, j, b, block, part, spans, block_r, x_ref, low_ref)


def _shrink(rows, shared, j, b, block, part, spans, block_r, x_ref, low_ref):
    """The products of a block of rows with a block of ranks, pair by pair."""
    A_ref, table_ref, rank_ref = shared.pairs.A, shared.pairs.table, shared.pairs.rank
    row, entry, page = rows.at, rows.entry(j), A_ref.shape[1]
    pair, q = rows.pair(j, entry), b * block_r + jnp.arange(block_r)

    def shrink_pair(p, _):
        uses = pair == p

        @pl.when((jnp.sum(uses.astype(jnp.int32)) > 0) & (b * block_r < rank_ref[p]))
        def _work():
            own = q < rank_ref[p]
            at = plgpu.load(table_ref.at[p, q // page], mask=own, other=0)

            def product(i, total):
                k, there = spans.columns(part, i)
                here = uses[:, None] & there[None, :]
                xs = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=here, other=0.0)
                if shared.u is not None:
                    u = plgpu.load(shared.u.at[entry[:, None], k[None, :]], mask=here, other=0.0)
                    wide = xs.astype(jnp.float32)
                    xs = (wide * u.astype(jnp.float32)).astype(xs.dtype)
                a = plgpu.load(
                    A_ref.at[at[:, None], (q % page)[:, None], k[None, :]],
                    mask=own[:, None] & there[None, :],
                    other=0.0,
                )
                return total + plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

            total = spans.total(product, jnp.zeros((rows.at.shape[0], block_r), jnp.float32))
            place = (part, j, block, jnp.arange(rows.at.shape[0])[:, None], q[None, :])
            plgpu.store(low_ref.at[place], total, mask=uses[:, None])  # others have other pairs

    jax.lax.fori_loop(*_pairs(pair, entry, rank_ref.shape[0]), shrink_pair, None)


def _pairs(pair, entry, num_pairs):
    """The first and (one past) the last pair that rows use; an empty range if they use none."""
    return jnp.min(jnp.where(entry >= 0, pair, num_pairs)), jnp.max(pair) + 1


def _expand_kernel(tree, firsts, size, block_n, block_r, *refs):
    """The arguments flattened as `tree` says: per slice h [t, d_out], per slice low, slot [t], per
    slice Shared; the new h per slice. Slice s has the blocks of columns from firsts[s] on."""
    hs, lows, slot_ref, pools = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    block, column = pl.program_id(0), pl.program_id(1)
    outs = refs[tree.num_leaves :]
    for s, (h_ref, low_ref, shared, out_ref) in enumerate(zip(hs, lows, pools, outs, strict=True)):

        @pl.when((column >= firsts[s]) & (column < firsts[s + 1]))
        def _slice(h_ref=h_ref, low_ref=low_ref, shared=shared, out_ref=out_ref, first=firsts[s]):
            c = (column - first) * block_n + jnp.arange(block_n)
            rows = _Rows(block, size, h_ref.shape[0], slot_ref, shared)
            _expand(rows, shared, block, c, block_r, h_ref, low_ref, out_ref)


def _expand(rows, shared, block, c, block_r, h_ref, low_ref, out_ref):
    """Adds the shared terms of a block of rows at the columns c."""
    B_ref, table_ref, rank_ref = shared.pairs.B, shared.pairs.table, shared.pairs.rank
    d_ref, e_ref, (size,) = shared.d, shared.e, rows.at.shape
    num_pairs, page, terms = rank_ref.shape[0], B_ref.shape[1], shared.row.shape[1]
    there = c < h_ref.shape[1]
    zero = jnp.zeros((size, c.shape[0]), jnp.float32)

    def add_term(j, y):
        entry = rows.entry(j)
        mine, pair = entry >= 0, rows.pair(j, entry)

        def add_pair(p, y):
            own_row = pair == p

            def ranks(b, y):
                q = b * block_r + jnp.arange(block_r)
                own = q < rank_ref[p]
                mask = own_row[:, None] & own[None, :]
                total = _sum_parts(low_ref, j, block, q, mask)
                d = plgpu.load(d_ref.at[entry[:, None], q[None, :]], mask=mask, other=0.0)
                scaled = jnp.where(mask, total * d.astype(jnp.float32), 0.0)
                place = plgpu.load(table_ref.at[p, q // page], mask=own, other=0)
                B = plgpu.load(
                    B_ref.at[place[:, None], (q % page)[:, None], c[None, :]],
                    mask=own[:, None] & there[None, :],
                    other=0.0,
                )
                return y + plgpu.dot(scaled.astype(B.dtype), B, precision=precision(B.dtype))

            any_row = jnp.sum(own_row.astype(jnp.int32)) > 0
            count = jnp.where(any_row, pl.cdiv(rank_ref[p], block_r), 0)
            added = jax.lax.fori_loop(0, count, ranks, zero)
            return y + jnp.where(own_row[:, None], added, 0.0)

        added = jax.lax.fori_loop(*_pairs(pair, entry, num_pairs), add_pair, zero)
        wide = mine[:, None] & there[None, :]
        e = plgpu.load(e_ref.at[entry[:, None], c[None, :]], mask=wide, other=0.0)
        return y + jnp.where(mine[:, None], added * e.astype(jnp.float32), 0.0)

    def has_term(j, found):
        return found | (rows.entry(j) >= 0)

    sharing = jax.lax.fori_loop(0, terms, has_term, jnp.zeros((size,), jnp.bool_))

    @pl.when(jnp.sum(sharing.astype(jnp.int32)) > 0)
    def _work():
        at, here = (rows.at[:, None], c[None, :]), sharing[:, None] & there[None, :]
        y = plgpu.load(h_ref.at[at], mask=here, other=0.0).astype(jnp.float32)
        y = jax.lax.fori_loop(0, terms, add_term, y)
        plgpu.store(out_ref.at[at], y.astype(out_ref.dtype), mask=here)


def _sum_parts(low_ref, j, block, q, mask):
    """x A of one term, of the rows and ranks in the mask."""
    at = (j, block, jnp.arange(mask.shape[0])[:, None], q[None, :])
    parts = range(low_ref.shape[0])
    return reduce(jnp.add, (plgpu.load(low_ref.at[(p, *at)], mask=mask, other=0.0) for p in parts))

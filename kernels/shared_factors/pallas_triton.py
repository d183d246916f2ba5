"""The shared-factor route on Pallas' Triton backend: two launches over the whole batch.

Rows are taken in blocks as they come, whatever adapters they use: a block reads a pair once if one
of its rows uses it, and each row is scaled by its own d and e. A block without such rows does
nothing. The parts of the first sum (over d_in) are added up in the second launch.
"""

from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import Shared
from scute_jax.kernels.precision import precision
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class SharedTile:
    """rows: of a block; block_k: columns of x in one product; splits: parts of d_in;
    block_r: ranks in one product; block_n: output columns of a program."""

    rows: int = 64
    block_k: int = 128
    splits: int = 4
    block_r: int = 64
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3


@partial(jax.jit, static_argnames=("tile", "interpret"))
def shared_factors(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    shared: Shared,
    slot: Int[Array, "t"],
    tile: SharedTile | None = None,
    interpret: bool = False,
) -> Float[Array, "t d_out"]:
    """As the reference."""
    tile = tile or tuned(SharedTile, rows=x.shape[0], rank=shared.d.shape[1])
    t, d_in = x.shape
    size = min(tile.rows, max(MIN_SIDE, power_of_two(t)))
    blocks = pl.cdiv(t, size)
    page = shared.pairs.A.shape[1]
    block_r = max(page, min(tile.block_r, power_of_two(shared.d.shape[1])))
    ranks = pl.cdiv(shared.d.shape[1], block_r) * block_r
    block_k = min(tile.block_k, power_of_two(d_in))
    who = (slot, shared.row, shared.pair)
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "interpret": interpret}
    terms, has_u = shared.row.shape[1], shared.u is not None
    low_shape = (tile.splits, terms, blocks, size, ranks)
    (low,) = pallas_call(
        partial(_shrink_kernel, size, d_in, tile.splits, block_k, block_r, has_u),
        name="shared_shrink",
        grid=(blocks, tile.splits, terms * (ranks // block_r)),
        out_shape=[jax.ShapeDtypeStruct(low_shape, jnp.float32)],
        **how,
    )(*who, x, shared.pairs.A, shared.pairs.table, shared.pairs.rank, shared.u)
    block_n = min(tile.block_n, power_of_two(h.shape[1]))
    (out,) = pallas_call(
        partial(_expand_kernel, size, block_n, block_r),
        name="shared_expand",
        grid=(blocks, pl.cdiv(h.shape[1], block_n)),
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype)],
        aliases={0: 0},
        **how,
    )(h, low, *who, shared.pairs.B, shared.pairs.table, shared.pairs.rank, shared.d, shared.e)
    return out


class _Rows:
    """A block of rows and what their adapters have: of term j the entry and the pair, -1 = none."""

    def __init__(self, block, size, t, slot_ref, row_ref, pair_ref):
        self.at = block * size + jnp.arange(size)
        self.inside = self.at < t
        self.row_ref, self.pair_ref = row_ref, pair_ref
        self.slot = plgpu.load(slot_ref.at[self.at], mask=self.inside, other=-1)

    def entry(self, j):
        return plgpu.load(self.row_ref.at[self.slot, j], mask=self.slot >= 0, other=-1)

    def pair(self, j, entry):
        return plgpu.load(self.pair_ref.at[self.slot, j], mask=entry >= 0, other=-1)


def _shrink_kernel(
    size, d_in, splits, block_k, block_r, has_u, slot_ref, row_ref, pair_ref, x_ref, A_ref,
    table_ref, rank_ref, *refs,
):  # fmt: skip
    """slot [t]; row, pair [K, j]; x [t, d_in]; A [n, page, d_in]; table [P, w]; rank [P]; if
    `has_u` u [k, d_in]; low."""
    u_ref, low_ref = refs if has_u else (None, *refs)
    per_term = low_ref.shape[-1] // block_r
    block, part, rest = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    j, b = rest // per_term, rest % per_term
    rows = _Rows(block, size, x_ref.shape[0], slot_ref, row_ref, pair_ref)
    row, entry = rows.at, rows.entry(j)
    pair, page = rows.pair(j, entry), A_ref.shape[1]
    q = b * block_r + jnp.arange(block_r)
    span = -(-d_in // (splits * block_k)) * block_k

    def shrink_pair(p, _):
        uses = pair == p

        @pl.when((jnp.sum(uses.astype(jnp.int32)) > 0) & (b * block_r < rank_ref[p]))
        def _work():
            own = q < rank_ref[p]
            at = plgpu.load(table_ref.at[p, q // page], mask=own, other=0)

            def columns(i, total):
                k = part * span + i * block_k + jnp.arange(block_k)
                there = k < d_in
                here = uses[:, None] & there[None, :]
                xs = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=here, other=0.0)
                if has_u:
                    u = plgpu.load(u_ref.at[entry[:, None], k[None, :]], mask=here, other=0.0)
                    wide = xs.astype(jnp.float32)
                    xs = (wide * u.astype(jnp.float32)).astype(xs.dtype)
                a = plgpu.load(
                    A_ref.at[at[:, None], (q % page)[:, None], k[None, :]],
                    mask=own[:, None] & there[None, :],
                    other=0.0,
                )
                return total + plgpu.dot(xs, a, trans_b=True, precision=precision(xs.dtype))

            zero = jnp.zeros((size, block_r), jnp.float32)
            total = jax.lax.fori_loop(0, span // block_k, columns, zero)
            place = (part, j, block, jnp.arange(size)[:, None], q[None, :])
            plgpu.store(low_ref.at[place], total, mask=uses[:, None])  # others have other pairs

    jax.lax.fori_loop(*_pairs(pair, entry, rank_ref.shape[0]), shrink_pair, None)


def _pairs(pair, entry, num_pairs):
    """The first and (one past) the last pair that rows use; an empty range if they use none."""
    return jnp.min(jnp.where(entry >= 0, pair, num_pairs)), jnp.max(pair) + 1


def _expand_kernel(
    size, block_n, block_r, h_ref, low_ref, slot_ref, row_ref, pair_ref, B_ref, table_ref,
    rank_ref, d_ref, e_ref, out_ref,
):  # fmt: skip
    """h [t, d_out]; low; slot [t]; row, pair [K, j]; B [n, page, d_out]; table [P, w]; rank [P];
    d [k, r]; e [k, d_out]; the new h."""
    num_pairs, page, terms = rank_ref.shape[0], B_ref.shape[1], row_ref.shape[1]
    block, column = pl.program_id(0), pl.program_id(1)
    rows = _Rows(block, size, h_ref.shape[0], slot_ref, row_ref, pair_ref)
    c = column * block_n + jnp.arange(block_n)
    there = c < h_ref.shape[1]
    zero = jnp.zeros((size, block_n), jnp.float32)

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

"""Attention over a paged cache on Pallas' Triton backend.

A program takes one block of queries and some of the query heads that read one key head (all of
them when a block is a single token), and walks over the pages of its sequence up to the last key
that its queries see, with a running softmax. Pages past that are not read.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.precision import precision
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionTile:
    """keys: looked at in one step of the walk; rows: queries times heads of one program at most."""

    keys: int = 64
    rows: int = 64
    num_warps: int = 4
    num_stages: int = 2


@partial(jax.jit, static_argnames=("tile", "interpret"))
def paged_attention(
    q: Float[Array, "n size hq dh"],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> Float[Array, "n size hq dh"]:
    """As the reference."""
    tile = tile or AttentionTile()
    n, size, hq, dh = q.shape
    hkv = k_pages.shape[1]
    group = hq // hkv
    heads = group if size * group <= tile.rows else 1  # query heads of one program
    (out,) = pallas_call(
        partial(_kernel, group, heads, tile.keys),
        name="paged_attention",
        grid=(n, hq // heads),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(q, k_pages, v_pages, table, start, rows)
    return out


def _kernel(group, heads, keys, q_ref, k_ref, v_ref, table_ref, start_ref, rows_ref, out_ref):
    """q [n, size, hq, dh]; k, v [p, hkv, page, dh]; table [n, w]; start, rows [n]; out as q."""
    i, first_head = pl.program_id(0), pl.program_id(1) * heads
    size, dh = q_ref.shape[1], q_ref.shape[3]
    kv_head = first_head // group
    rows = rows_ref[i]

    @pl.when(rows > 0)
    def _attend():
        r = jnp.arange(max(MIN_SIDE, power_of_two(size * heads)))
        token, head = r // heads, first_head + r % heads
        held = (r < size * heads) & (token < rows)
        c = jnp.arange(max(MIN_SIDE, power_of_two(dh)))
        wide = c < dh
        at = (i, token[:, None], head[:, None], c[None, :])
        here = held[:, None] & wide[None, :]
        q = plgpu.load(q_ref.at[at], mask=here, other=0.0)
        position = start_ref[i] + token
        end = start_ref[i] + rows

        walk = add_keys(q, k_ref, v_ref, table_ref, i, kv_head, position, end, keys)
        zero = jnp.zeros(r.shape, jnp.float32)
        least = jnp.full(r.shape, -1e30, jnp.float32)
        first = (least, zero, jnp.zeros((r.shape[0], c.shape[0]), jnp.float32))
        _, weight, total = jax.lax.fori_loop(0, pl.cdiv(end, keys), walk, first)
        attended = total / jnp.where(held, weight, 1.0)[:, None]
        plgpu.store(out_ref.at[at], attended.astype(out_ref.dtype), mask=here)


def add_keys(q, k_ref, v_ref, table_ref, i, kv_head, position, end, keys):
    """One step of the walk: q [r, dh] looks at the next `keys` keys of block i that are before
    `end` and not past `position`, one for each query or one for all."""
    dh, page = k_ref.shape[3], k_ref.shape[2]
    c = jnp.arange(q.shape[1])

    def walk(step, carry):
        peak, weight, total = carry
        key = step * keys + jnp.arange(keys)
        there = key < end
        place = plgpu.load(table_ref.at[i, key // page], mask=there, other=0)
        of_key = (place[:, None], kv_head, (key % page)[:, None], c[None, :])
        mask = there[:, None] & (c < dh)[None, :]
        k = plgpu.load(k_ref.at[of_key], mask=mask, other=0.0)
        score = plgpu.dot(q, k, trans_b=True, precision=precision(q.dtype))
        score = score * (dh**-0.5 * LOG2_E)
        seen = key[None, :] <= (position[:, None] if position.ndim else position)
        score = jnp.where(seen, score, -jnp.inf)
        top = jnp.maximum(peak, jnp.max(score, axis=1))
        shrink = jnp.exp2(peak - top)
        share = jnp.exp2(score - top[:, None])
        v = plgpu.load(v_ref.at[of_key], mask=mask, other=0.0)
        added = plgpu.dot(share.astype(v.dtype), v, precision=precision(v.dtype))
        return top, weight * shrink + jnp.sum(share, axis=1), total * shrink[:, None] + added

    return walk

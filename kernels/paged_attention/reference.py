"""The definition of attention over a paged cache: blocks of queries, each of one sequence."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from scute_jax.kernels.precision import einsum

KEYS_PER_STEP = 128  # keys that one step of the loop looks at


def paged_attention(
    q: Float[Array, "n size hq dh"],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
) -> Float[Array, "n size hq dh"]:
    """softmax(q k^T / sqrt(dh)) v over the keys at positions 0 .. the query's own.

    Block i holds queries of one sequence at positions start[i] .. start[i] + rows[i] - 1; position
    j of that sequence lies in page table[i, j // page], place j % page. Query head h reads key head
    h // (hq / hkv). Only pages up to the longest block are looked at.
    Source: FlashAttention (arXiv:2205.14135) alg. 1, the running softmax, over pages.
    Dtypes: accumulates in float32; weights are rounded to the dtype of v; returns that of q.
    Undefined: queries that a block does not have (size > rows).
    """
    n, size, hq, dh = q.shape
    hkv, page = k_pages.shape[1:3]
    per_step = max(1, min(table.shape[1], KEYS_PER_STEP // page))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_step)))
    grouped = jnp.reshape(q, (n, size, hkv, hq // hkv, dh))
    position = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
    end = start + rows
    keys = per_step * page

    def add_keys(step, carry):
        peak, weight, total = carry
        pages = lax.dynamic_slice_in_dim(table, step * per_step, per_step, axis=1)
        k = _keys(k_pages, pages)  # [n, hkv, keys, dh]
        v = _keys(v_pages, pages)
        score = einsum("nqhgd,nhkd->nhgqk", grouped, k) * (dh**-0.5)
        at = step * keys + jnp.arange(keys, dtype=jnp.int32)
        seen = (at[None, None, :] <= position[:, :, None]) & (at[None, :] < end[:, None])[:, None]
        seen = seen[:, None, None, :, :]
        score = jnp.where(seen, score, -jnp.inf)
        top = jnp.maximum(peak, jnp.max(score, axis=-1))
        shrink = jnp.exp(peak - top)
        share = jnp.where(seen, jnp.exp(score - top[..., None]), 0.0)
        # A place that holds no key of the sequence may hold anything: select, never multiply.
        v = jnp.where(jnp.any(seen, axis=3)[:, :, 0, :, None], v, 0)
        total = total * shrink[..., None] + einsum("nhgqk,nhkd->nhgqd", share.astype(v.dtype), v)
        return top, weight * shrink + jnp.sum(share, axis=-1), total

    shape = (n, hkv, hq // hkv, size)
    zero = jnp.zeros(shape, jnp.float32)
    first = (
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        zero,
        jnp.zeros((*shape, dh), jnp.float32),
    )
    longest = jnp.max(jnp.where(rows > 0, end, 0))
    steps = jnp.minimum(-(-longest // keys), table.shape[1] // per_step)
    _, weight, total = lax.fori_loop(0, steps, add_keys, first)
    attended = total / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)[..., None]
    return jnp.reshape(jnp.transpose(attended, (0, 3, 1, 2, 4)), q.shape).astype(q.dtype)


def _keys(pages: Float[Array, "p hkv page dh"], table: Int[Array, "n s"]):
    """The keys of s pages per block, in order: [n, hkv, s * page, dh]."""
    gathered = jnp.moveaxis(jnp.take(pages, table, axis=0, mode="clip"), 2, 1)
    n, hkv, s, page, dh = gathered.shape
    return jnp.reshape(gathered, (n, hkv, s * page, dh))

"""Rope, the cache's new entries and attention on Pallas' Triton backend.

Blocks of many queries take two kernels. Where a block is a single token, one does: a program takes
a row and a key head. It turns the query heads that read it and the key, writes key and value to
their page, starts the running softmax with them, and walks over the pages of the keys before.
"""

from bisect import bisect_right
from functools import partial, reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.paged_attention.pallas_triton import (
    LOG2_E,
    AttentionTile,
    add_keys,
    paged_attention,
)
from scute_jax.kernels.paged_rope.pallas_triton import paged_rope
from scute_jax.kernels.triton import MIN_SIDE, pallas_call, power_of_two


@partial(jax.jit, static_argnames=("tile", "interpret"))
def rope_attention(
    qkv: tuple[Float[Array, "parts t h dh"], ...],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t hq dh"], Float[Array, "p hkv page dh"], Float[Array, "p hkv page dh"]]:
    """As the reference."""
    tile, where, pages = tile or AttentionTile(), (table, start, rows), (k_pages, v_pages)
    (_, t, _, dh), hkv = qkv[0].shape, k_pages.shape[1]
    if t > table.shape[0]:
        q, *pages = paged_rope(qkv, *pages, cos, sin, *where, interpret=interpret)
        blocks = jnp.reshape(q, (table.shape[0], -1, *q.shape[1:]))
        attended = paged_attention(blocks, *pages, *where, tile=tile, interpret=interpret)
        return jnp.reshape(attended, q.shape), *pages
    heads = [part.shape[2] for part in qkv]
    given = len(qkv) + 5  # arguments before the pages
    attended, k_pages, v_pages = pallas_call(
        partial(_kernel, tuple(accumulate(heads, initial=0)), tile.keys),
        name="rope_attention",
        grid=(t, hkv),
        out_shape=[
            jax.ShapeDtypeStruct((t, sum(heads) - 2 * hkv, dh), k_pages.dtype),
            *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pages),
        ],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={given: 1, given + 1: 2},
    )(*qkv, cos, sin, *where, *pages)
    return attended, k_pages, v_pages


def _kernel(firsts, keys, *refs):
    """Arrays of heads [parts, t, h, dh], of which array i has those from firsts[i] on; cos, sin
    [t, dh / 2]; table [t, w]; start, rows [t]; pages [p, hkv, page, dh] twice; what is attended
    [t, hq, dh]; the new pages."""
    *heads_refs, cos_ref, sin_ref, table_ref, start_ref, rows_ref = refs[:-5]
    out_ref, k_ref, v_ref = refs[-3:]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    (_, hq, dh), (_, hkv, page, _) = out_ref.shape, k_ref.shape
    half, group = dh // 2, hq // hkv

    @pl.when(rows_ref[row] > 0)
    def _attend():
        c = jnp.arange(max(MIN_SIDE, power_of_two(dh)))
        wide = c < dh
        first = c < half
        cos, sin = (
            plgpu.load(ref.at[row, jnp.where(first, c, c - half)], mask=wide, other=0.0)
            for ref in (cos_ref, sin_ref)
        )
        sin = jnp.where(first, -sin, sin)

        def load(begin, head, column, mask):
            """Heads among those from `begin` on, summed up."""
            array = bisect_right(firsts, begin) - 1
            ref, head = heads_refs[array], begin - firsts[array] + head
            at = [ref.at[part, row, head, column] for part in range(ref.shape[0])]
            parts = [plgpu.load(each, mask=mask, other=0.0).astype(jnp.float32) for each in at]
            return reduce(jnp.add, parts)

        r = jnp.arange(max(MIN_SIDE, power_of_two(group)))
        here = (r < group)[:, None] & wide[None, :]
        head, other = (kv_head * group + r)[:, None], jnp.where(first, c + half, c - half)
        q, q_other = (load(0, head, column[None, :], here) for column in (c, other))
        k, k_other = (load(hq, kv_head, column, wide) for column in (c, other))
        v = load(hq + hkv, kv_head, c, wide).astype(v_ref.dtype)
        k = (k * cos + k_other * sin).astype(k_ref.dtype)
        q = (q * cos[None, :] + q_other * sin[None, :]).astype(k_ref.dtype)
        start = start_ref[row]
        place = table_ref[row, jnp.minimum(start // page, table_ref.shape[1] - 1)]
        for ref, own in ((k_ref, k), (v_ref, v)):
            plgpu.store(ref.at[place, kv_head, start % page, c], own, mask=wide)

        # The row's own key is at hand: what is read of the pages was there before.
        score = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32)[None, :], axis=1)
        score = score * (dh**-0.5 * LOG2_E)
        own = jnp.zeros((r.shape[0], c.shape[0]), jnp.float32) + v.astype(jnp.float32)[None, :]
        before = score, jnp.ones(r.shape, jnp.float32), own
        walk = add_keys(q, k_ref, v_ref, table_ref, row, kv_head, start - 1, start, keys)
        _, weight, total = jax.lax.fori_loop(0, pl.cdiv(start, keys), walk, before)
        attended = (total / weight[:, None]).astype(out_ref.dtype)
        plgpu.store(out_ref.at[row, head, c[None, :]], attended, mask=here)

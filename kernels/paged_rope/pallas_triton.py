"""Rotary positions with a paged cache on Pallas' Triton backend, the pages updated in place.

A program takes one row and one key head: it turns the query heads that read it, turns and writes
the key, and writes the value. A row that is not there writes nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.triton import pallas_call, power_of_two

NUM_WARPS, NUM_STAGES = 1, 1  # a program moves a kilobyte or two


@partial(jax.jit, static_argnames="interpret")
def paged_rope(
    qkv: Float[Array, "t h dh"],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    interpret: bool = False,
) -> tuple[Float[Array, "t hq dh"], Float[Array, "p hkv page dh"], Float[Array, "p hkv page dh"]]:
    """As the reference."""
    (t, heads, dh), hkv, pages = qkv.shape, k_pages.shape[1], (k_pages, v_pages)
    turned, k_pages, v_pages = pallas_call(
        partial(_kernel, t // table.shape[0]),
        name="paged_rope",
        grid=(t, hkv),
        out_shape=[
            jax.ShapeDtypeStruct((t, heads - 2 * hkv, dh), k_pages.dtype),
            *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pages),
        ],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        interpret=interpret,
        aliases={6: 1, 7: 2},
    )(qkv, cos, sin, table, start, rows, *pages)
    return turned, k_pages, v_pages


def _kernel(
    size, qkv_ref, cos_ref, sin_ref, table_ref, start_ref, rows_ref, _k_pages, _v_pages, turned_ref,
    k_pages_ref, v_pages_ref,
):  # fmt: skip
    """qkv [t, h, dh]; cos, sin [t, dh / 2]; table [n, w]; start, rows [n]; pages [p, hkv, page, dh]
    twice; the turned q [t, hq, dh]; the new pages."""
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block, token = row // size, row % size
    (_, hq, dh), (_, hkv, page_size, _) = turned_ref.shape, k_pages_ref.shape
    half, group = dh // 2, hq // hkv
    c = jnp.arange(power_of_two(half))
    inside = c < half

    def halves(head):
        parts = qkv_ref.at[row, head, c], qkv_ref.at[row, head, half + c]
        return [plgpu.load(part, mask=inside, other=0.0).astype(jnp.float32) for part in parts]

    # All loads come first: none waits for another one, or for a store.
    cos, sin = (plgpu.load(ref.at[row, c], mask=inside, other=0.0) for ref in (cos_ref, sin_ref))
    queries = [kv_head * group + g for g in range(group)]
    *qs, k, v = [halves(head) for head in (*queries, hq + kv_head, hq + hkv + kv_head)]
    position = start_ref[block] + token
    column = jnp.minimum(position // page_size, table_ref.shape[1] - 1)
    place = table_ref[block, column], kv_head, position % page_size
    mask = inside & (token < rows_ref[block])

    def turned(first, second):
        return first * cos - second * sin, second * cos + first * sin

    def write(ref, at, parts):
        for begin, part in zip((0, half), parts, strict=True):
            plgpu.store(ref.at[*at, begin + c], part.astype(ref.dtype), mask=mask)

    for head, q in zip(queries, qs, strict=True):
        write(turned_ref, (row, head), turned(*q))
    write(k_pages_ref, place, turned(*k))
    write(v_pages_ref, place, v)

"""Rotary positions with a paged cache on Pallas' Triton backend, the pages updated in place.

A program takes one row and one key head: it turns the query heads that read it, turns and writes
the key, and writes the value. A row that is not there writes nothing.
"""

from bisect import bisect_right
from functools import partial, reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from scute_jax.kernels.triton import pallas_call, power_of_two

NUM_WARPS, NUM_STAGES = 2, 1  # a program moves a kilobyte or two


@partial(jax.jit, static_argnames="interpret")
def paged_rope(
    qkv: tuple[Float[Array, "parts t h dh"], ...],
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
    (_, t, _, dh), hkv, pages = qkv[0].shape, k_pages.shape[1], (k_pages, v_pages)
    heads = [part.shape[2] for part in qkv]
    given = len(qkv) + 5  # arguments before the pages
    turned, k_pages, v_pages = pallas_call(
        partial(_kernel, t // table.shape[0], tuple(accumulate(heads, initial=0))),
        name="paged_rope",
        grid=(t, hkv),
        out_shape=[
            jax.ShapeDtypeStruct((t, sum(heads) - 2 * hkv, dh), k_pages.dtype),
            *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pages),
        ],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        interpret=interpret,
        aliases={given: 1, given + 1: 2},
    )(*qkv, cos, sin, table, start, rows, *pages)
    return turned, k_pages, v_pages


def _kernel(size, firsts, *refs):
    """Arrays of heads [parts, t, h, dh], of which array i has those from firsts[i] on; cos, sin
    [t, dh / 2]; table [n, w]; start, rows [n]; pages [p, hkv, page, dh] twice; the turned q
    [t, hq, dh]; the new pages."""
    *heads_refs, cos_ref, sin_ref, table_ref, start_ref, rows_ref = refs[:-5]
    turned_ref, k_pages_ref, v_pages_ref = refs[-3:]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block, token = row // size, row % size
    (_, hq, dh), (_, hkv, page_size, _) = turned_ref.shape, k_pages_ref.shape
    half, group = dh // 2, hq // hkv
    c = jnp.arange(power_of_two(half))
    inside = c < half

    def halves(first, head):
        """Both halves of a head among those from `first` on."""
        array = bisect_right(firsts, first) - 1
        ref, head = heads_refs[array], first - firsts[array] + head

        def half_of(begin):
            at = [ref.at[part, row, head, begin + c] for part in range(ref.shape[0])]
            return [plgpu.load(each, mask=inside, other=0.0).astype(jnp.float32) for each in at]

        return half_of(0), half_of(half)

    # All loads come first: none waits for another one, or for a store.
    cos, sin = (plgpu.load(ref.at[row, c], mask=inside, other=0.0) for ref in (cos_ref, sin_ref))
    queries = [kv_head * group + g for g in range(group)]
    qs = [halves(0, head) for head in queries]
    k, v = halves(hq, kv_head), halves(hq + hkv, kv_head)
    position = start_ref[block] + token
    column = jnp.minimum(position // page_size, table_ref.shape[1] - 1)
    place = table_ref[block, column], kv_head, position % page_size
    mask = inside & (token < rows_ref[block])

    def summed(parts):
        return [reduce(jnp.add, part) for part in parts]

    def turned(parts):
        first, second = parts
        return first * cos - second * sin, second * cos + first * sin

    def write(ref, at, parts):
        for begin, part in zip((0, half), parts, strict=True):
            plgpu.store(ref.at[*at, begin + c], part.astype(ref.dtype), mask=mask)

    for head, q in zip(queries, qs, strict=True):
        write(turned_ref, (row, head), turned(summed(q)))
    write(k_pages_ref, place, turned(summed(k)))
    write(v_pages_ref, place, summed(v))

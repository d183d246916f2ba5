"""The definition: rope and the writes of the cache, then attention over it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.paged_attention.reference import paged_attention
from scute_jax.kernels.paged_rope.reference import paged_rope


def rope_attention(
    qkv: tuple[Float[Array, "parts t h dh"], ...],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
) -> tuple[Float[Array, "t hq dh"], Float[Array, "p hkv page dh"], Float[Array, "p hkv page dh"]]:
    """`paged_attention` of the queries that `paged_rope` returns over the pages that it returns.

    Row i * size + j is token j of block i (t = n * size). Undefined: rows that are not there.
    """
    q, k_pages, v_pages = paged_rope(qkv, k_pages, v_pages, cos, sin, table, start, rows)
    blocks = jnp.reshape(q, (table.shape[0], -1, *q.shape[1:]))
    attended = paged_attention(blocks, k_pages, v_pages, table, start, rows)
    return jnp.reshape(attended, q.shape), k_pages, v_pages

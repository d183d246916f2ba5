"""Attention over a paged cache, for decoding (blocks of one query) and prefill (blocks of many)."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.paged_attention import pallas_triton, reference


def paged_attention(
    q: Float[Array, "n size hq dh"],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "n size hq dh"]:
    """Causal attention of each block of queries over the pages of its sequence.

    See reference.py for the definition.
    """
    return _OP(q, k_pages, v_pages, table, start, rows, implementation=implementation)


_OP = Op("paged_attention", reference.paged_attention, pallas_triton.paged_attention)

"""Attention over a paged cache, for decoding (blocks of one query) and prefill (blocks of many)."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, choose
from scute_jax.kernels.paged_attention import reference


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
    attend = choose("paged_attention", _TWINS, implementation)
    return attend(q, k_pages, v_pages, table, start, rows)


_TWINS = {"reference": reference.paged_attention}

"""What attention does between its projections: rope, new entries of the cache, the attending."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.rope_attention import pallas_triton, reference


def rope_attention(
    qkv: tuple[Float[Array, "parts t h dh"], ...],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t hq dh"], Float[Array, "p hkv page dh"], Float[Array, "p hkv page dh"]]:
    """Causal attention of n blocks of turned queries, and the pages with their keys and values.

    See reference.py for the definition.
    """
    args = (qkv, k_pages, v_pages, cos, sin, table, start, rows)
    return _OP(*args, implementation=implementation)


_OP = Op("rope_attention", reference.rope_attention, pallas_triton.rope_attention)

"""Queries and keys turned by their positions; keys and values written to their pages."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.paged_rope import pallas_triton, reference


def paged_rope(
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
    """The turned queries, and the pages with the turned keys and the values.

    See reference.py for the definition.
    """
    args = (qkv, k_pages, v_pages, cos, sin, table, start, rows)
    return _OP(*args, implementation=implementation)


_OP = Op("paged_rope", reference.paged_rope, pallas_triton.paged_rope)

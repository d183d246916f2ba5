"""Terms on factors that many adapters share: read once per step, however many tenants."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import Shared
from scute_jax.kernels.shared_factors import pallas_triton, reference


def shared_factors(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    shared: Shared,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_out"]:
    """h plus the shared terms of each row's adapter. See reference.py for the definition.

    Differentiable in h, x and every pool.
    """
    return _OP(h, x, shared, slot, implementation=implementation)


_OP = Op("shared_factors", reference.shared_factors, pallas_triton.shared_factors)

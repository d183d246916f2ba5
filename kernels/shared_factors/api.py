"""Terms on factors that many adapters share: read once per step, however many tenants."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, choose
from scute_jax.kernels.pools import Shared
from scute_jax.kernels.shared_factors import reference


def shared_factors(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    shared: Shared,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_out"]:
    """h plus the shared terms of each row's adapter. See reference.py for the definition."""
    return choose("shared_factors", _TWINS, implementation)(h, x, shared, slot)


_TWINS = {"reference": reference.shared_factors}

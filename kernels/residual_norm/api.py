"""What a layer adds to the residual stream, and the norm of it that comes next."""

from functools import cache, partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.residual_norm import pallas_triton, reference


def residual_norm(
    x: Float[Array, "t d"],
    added: Float[Array, "parts t d"],
    weight: Float[Array, "d"],
    eps: float,
    dtype: jnp.dtype,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """x with the parts added in float32, and that normalised and times the weight in `dtype`.

    See reference.py for the definition.
    """
    return _op(eps, jnp.dtype(dtype))(x, added, weight, implementation=implementation)


@cache
def _op(eps: float, dtype: jnp.dtype) -> Op:
    twins = reference.residual_norm, pallas_triton.residual_norm
    return Op("residual_norm", *(partial(twin, eps=eps, dtype=dtype) for twin in twins))

"""How every product of this package is taken: float32 accumulation, and no silent TF32."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def einsum(spec: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """The einsum of two arrays in float32.

    Dtypes: operands of one half-precision dtype are multiplied as they are; float32 operands and
    mixed ones are multiplied in full float32 (on a GPU the default would be TF32).
    """
    # XLA's CPU backend does not multiply every batch of half-precision matrices.
    if left.dtype != right.dtype or jax.default_backend() == "cpu":
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(
        spec, left, right, precision=precision(left.dtype), preferred_element_type=jnp.float32
    )


def precision(dtype) -> lax.Precision:
    """The matmul precision that keeps `dtype` exact."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

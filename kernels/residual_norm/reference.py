"""The definition of the residual stream's next value and its norm."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def residual_norm(
    x: Float[Array, "t d"],
    added: Float[Array, "parts t d"],
    weight: Float[Array, "d"],
    *,
    eps: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """(y, `normalised` y * weight) of y = x + sum of the parts.

    Dtypes: float32 throughout; the norm is rounded to `dtype`.
    """
    y = x.astype(jnp.float32) + jnp.sum(added.astype(jnp.float32), axis=0)
    return y, (normalised(y, eps) * weight.astype(jnp.float32)[None, :]).astype(dtype)


def normalised(x: Float[Array, "t d"], eps: float) -> Float[Array, "t d"]:
    """x / sqrt(mean(x^2) + eps), which a norm multiplies with its weight.

    Source: RMSNorm (arXiv:1910.07467) eq. 4. Dtypes: float32 throughout.
    """
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)

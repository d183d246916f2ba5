"""Results that come in parts, which the one who reads them adds up."""

from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_parts(parts: Float[Array, "parts t d"]) -> Float[Array, "t d"]:
    """The sum, one after the other in their order: where a part is zero, it does not matter which.
    XLA's own sum over an axis may group them. Dtypes: that of the parts."""
    return reduce(jnp.add, (parts[p] for p in range(parts.shape[0])))

"""A kernel of one block that does next to nothing: a chain of them shows what a launch costs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.triton import pallas_call


def one_block(x: Float[Array, "n"]) -> Float[Array, "n"]:
    """x + 1, in a launch of its own. n is a power of two."""
    if jax.default_backend() != "gpu":
        return jax.lax.optimization_barrier(x + 1)
    (out,) = pallas_call(
        _add_one,
        name="one_block",
        grid=(1,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        num_warps=1,
        num_stages=1,
        interpret=False,
    )(x)
    return out


def _add_one(x_ref, out_ref):
    out_ref[jnp.arange(x_ref.shape[0])] = x_ref[jnp.arange(x_ref.shape[0])] + 1

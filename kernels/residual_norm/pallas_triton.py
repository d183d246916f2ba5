"""The residual stream and its norm on Pallas' Triton backend: a program takes one row."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.triton import pallas_call, power_of_two

PER_WARP, MOST_WARPS = 512, 16  # 16 numbers for each thread


@partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def residual_norm(
    x: Float[Array, "t d"],
    added: Float[Array, "parts t d"],
    weight: Float[Array, "d"],
    *,
    eps: float,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """As the reference."""
    width = power_of_two(x.shape[1])
    y, normalised = pallas_call(
        partial(_kernel, width, eps),
        name="residual_norm",
        grid=(x.shape[0],),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct(x.shape, dtype),
        ],
        num_warps=min(MOST_WARPS, max(1, width // PER_WARP)),
        num_stages=1,
        interpret=interpret,
    )(x, added, weight)
    return y, normalised


def _kernel(width, eps, x_ref, added_ref, weight_ref, y_ref, normalised_ref):
    """x [t, d]; added [parts, t, d]; weight [d]; y, normalised [t, d]."""
    row, c = pl.program_id(0), jnp.arange(width)
    inside = c < x_ref.shape[1]

    def load(at):
        return plgpu.load(at, mask=inside, other=0.0).astype(jnp.float32)

    parts = [load(added_ref.at[part, row, c]) for part in range(added_ref.shape[0])]
    x, weight = load(x_ref.at[row, c]), load(weight_ref.at[c])
    y = x + reduce(jnp.add, parts)
    plgpu.store(y_ref.at[row, c], y, mask=inside)
    square = jnp.sum(y * y) / x_ref.shape[1]
    normalised = y * jax.lax.rsqrt(square + eps) * weight
    plgpu.store(normalised_ref.at[row, c], normalised.astype(normalised_ref.dtype), mask=inside)

"""x W * s + b + (x A) B: the product with frozen weights and what adapters do to it, in one."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.arrivals import Counts
from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import LowRank, Vectors, at_tiles
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.segmented_linear import pallas_triton
from scute_jax.kernels.segmented_update import segmented_update
from scute_jax.kernels.tiles import Tiles

MOST_ROWS = 64  # past it the product is bound by arithmetic, and is better left to cuBLAS
MOST_RANKS = 256  # past it factors are better off in launches of their own
HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))


def suits(x: Float[Array, "t d_in"], weights: tuple[Float[Array, "d_in d_out"], ...]) -> bool:
    """Whether the one launch is made for such arrays: few rows, all in one half precision."""
    return x.shape[0] <= MOST_ROWS and all(W.dtype == x.dtype in HALF for W in weights)


def segmented_linear(
    xs: tuple[Float[Array, "t d_in"], ...],
    x: Float[Array, "t d_in"],
    weights: tuple[Float[Array, "d_in d_out"], ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    counts: Counts | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "parts t d_out"], ...]:
    """For each slice of a fused layer: x' W * s + b + (x A) B of each row's adapter, in parts.

    `xs` has the x' of each slice, x after its input transform. Rows in no tile get x' W. As
    `segmented_update` of x' W, without rounding it in between. The caller adds up the parts, which
    can cost it nothing; the gradient takes that for granted. `counts` is one of `zero_counts`, for
    this call alone; without, it is made here, in a launch of its own. Source: x W plus the SGMV of
    Punica (arXiv:2310.18547), with ragged ranks in pages. Dtypes: all in float32.
    """
    parts = (tuple(at_tiles(p, tiles.slot) for p in own) for own in (factors, scale, shift))
    return _OP(xs, x, weights, *parts, tiles, counts, implementation=implementation)


def _reference(xs, x, weights, factors, scale, shift, tiles, counts):
    h = tuple(einsum("ti,io->to", own, W) for own, W in zip(xs, weights, strict=True))
    h = segmented_update(h, x, factors, scale, shift, tiles, implementation="reference")
    return tuple(y[None] for y in h)


def _of_sum(cotangent):
    return tuple(parts[:1] for parts in cotangent)


_OP = Op("segmented_linear", _reference, pallas_triton.segmented_linear, _of_sum)

from scute_jax.kernels.residual_norm.api import residual_norm
from scute_jax.kernels.residual_norm.reference import normalised

__all__ = ["normalised", "residual_norm"]

from scute_jax.kernels.residual_norm.api import residual_norm

__all__ = ["residual_norm"]

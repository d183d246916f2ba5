from scute_jax.kernels.shared_factors.api import shared_factors

__all__ = ["shared_factors"]

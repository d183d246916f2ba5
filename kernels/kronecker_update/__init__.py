from scute_jax.kernels.kronecker_update.api import kronecker_update

__all__ = ["kronecker_update"]

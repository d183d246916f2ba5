from scute_jax.kernels.sparse_update.api import sparse_update

__all__ = ["sparse_update"]

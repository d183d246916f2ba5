from scute_jax.kernels.segmented_update.api import segmented_update

__all__ = ["segmented_update"]

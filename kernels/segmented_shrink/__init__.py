from scute_jax.kernels.segmented_shrink.api import segmented_shrink

__all__ = ["segmented_shrink"]

from scute_jax.kernels.segmented_expand.api import segmented_expand

__all__ = ["segmented_expand"]

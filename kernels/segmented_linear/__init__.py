from scute_jax.kernels.segmented_linear.api import segmented_linear, suits

__all__ = ["segmented_linear", "suits"]

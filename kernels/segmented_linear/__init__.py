from scute_jax.kernels.segmented_linear.api import MOST_RANKS, segmented_linear, suits

__all__ = ["MOST_RANKS", "segmented_linear", "suits"]

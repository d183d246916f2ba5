from scute_jax.kernels.paged_rope.api import paged_rope

__all__ = ["paged_rope"]

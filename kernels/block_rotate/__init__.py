from scute_jax.kernels.block_rotate.api import block_rotate, scale_input

__all__ = ["block_rotate", "scale_input"]

from scute_jax.kernels.rope_attention.api import rope_attention

__all__ = ["rope_attention"]

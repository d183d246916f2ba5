from scute_jax.kernels.embedding_update.api import embedding_update

__all__ = ["embedding_update"]

"""The paged KV cache as a pytree: pages of keys and values, one array per layer."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from scute_jax.models.config import LlamaConfig


@struct.dataclass
class KVCache:
    """Keys and values of all sequences. Which page belongs to whom is the caller's business.

    Invariants: all arrays have one shape, and the dtype of activations. A position that no sequence
    has written may hold anything.
    """

    k: tuple[Float[Array, "pages hkv page dh"], ...]
    v: tuple[Float[Array, "pages hkv page dh"], ...]

    @classmethod
    def create(
        cls, config: LlamaConfig, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> "KVCache":
        """An empty cache with room for num_pages * page_size tokens."""
        shape = (num_pages, config.num_key_value_heads, page_size, config.head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            k=tuple(jnp.zeros(shape, dtype) for _ in layers),
            v=tuple(jnp.zeros(shape, dtype) for _ in layers),
        )

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]


def page_bytes(config: LlamaConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * page_size * jnp.dtype(dtype).itemsize

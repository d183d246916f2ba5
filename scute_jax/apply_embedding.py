"""The token embedding under many adapters: a site whose input is a token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels import embedding_update, replace_rows
from scute_jax.segments import Segments
from scute_jax.slots import SiteSlots


def apply_embedding(
    E: Float[Array, "vocab d"], slots: SiteSlots, token: Int[Array, "t"], seg: Segments
) -> Float[Array, "t d"]:
    """E[token] * s + b + A[token] B of each row's adapter, or the row with which it replaces token.

    A token past the base's vocabulary means something only to an adapter that replaces it.
    Dtypes: float32.
    """
    token = seg.sort(token)
    h = jnp.take(E, token, axis=0, mode="clip").astype(jnp.float32)
    h = embedding_update(h, token, slots.factors, slots.scale, slots.shift, seg.tiles)
    if slots.tokens is not None:
        h = replace_rows(h, token, slots.tokens, seg.slot)
    return seg.unsort(h)

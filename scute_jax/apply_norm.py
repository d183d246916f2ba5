"""A norm under many adapters: a site whose W is the diagonal of the norm's weight."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels import Implementation, segmented_update, sparse_update
from scute_jax.segments import Segments
from scute_jax.slots import SiteSlots


def apply_norm(
    x: Float[Array, "t d"],
    weight: Float[Array, "d"],
    slots: SiteSlots,
    seg: Segments,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d"]:
    """(x * weight) * s + b + x S of each row's adapter, for x that is normalised already.

    S is there for numbers of a norm that s cannot change, since the base's own are zero.
    Dtypes: float32.
    """
    h = x * weight.astype(jnp.float32)[None, :]
    if not jax.tree.leaves(slots):
        return h
    x, h = seg.sort(x), seg.sort(h)
    parts = (None,), (slots.scale,), (slots.shift,)
    (h,) = segmented_update((h,), x, *parts, seg.tiles, implementation=implementation)
    if slots.sparse is not None:
        h = sparse_update(h, x, slots.sparse, seg.tiles, implementation=implementation)
    return seg.unsort(h)

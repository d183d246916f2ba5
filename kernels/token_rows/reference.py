"""The definition of replaced rows: of a table that is looked up, and of one that x is multiplied
with.

Dtypes: products in float32; results have the dtype of h. Places of a table that an adapter does
not fill, and rows of no adapter, change nothing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.gather import gather_rows
from scute_jax.kernels.pools import TokenTable
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.tiles import Tiles


def replace_rows(
    h: Float[Array, "t d"], token: Int[Array, "t"], table: TokenTable, slot: Int[Array, "t"]
) -> Float[Array, "t d"]:
    """rows[i] on rows whose adapter has token == ids[i], h elsewhere. Tokens are not negative."""
    entry = jnp.where(slot >= 0, table.row[jnp.maximum(slot, 0)], -1)
    ids = jnp.take(table.ids, entry, axis=0, mode="clip")
    hit = (ids == token[:, None]) & (entry >= 0)[:, None]
    own = table.rows[jnp.maximum(entry, 0), jnp.argmax(hit, axis=-1)]
    return jnp.where(jnp.any(hit, axis=-1)[:, None], own.astype(h.dtype), h)


def replace_columns(
    h: Float[Array, "t vocab"], x: Float[Array, "t d"], table: TokenTable, tiles: Tiles
) -> Float[Array, "t vocab"]:
    """x . rows[i] in column ids[i] of h; a column that h does not have is left out."""
    t, vocab = h.shape
    index, valid = tiles.row_index(t)
    entry = table.row[tiles.slot]
    ids, rows = (jnp.take(part, entry, axis=0, mode="clip") for part in (table.ids, table.rows))
    dtype = jnp.promote_types(x.dtype, rows.dtype)
    logits = einsum("nsd,nkd->nsk", gather_rows(x, index).astype(dtype), rows.astype(dtype))
    row = jnp.where(valid & (entry >= 0)[:, None], index, t)[:, :, None]
    column = jnp.where(ids >= 0, ids, vocab)[:, None, :]
    return h.at[row, column].set(logits.astype(h.dtype), mode="drop")

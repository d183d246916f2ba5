"""The definition of replaced rows: of a table that is looked up, and of one that x is multiplied
with.

Dtypes: products in float32; results have the dtype of h. Places of a table that an adapter does
not fill, and rows of no adapter, change nothing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import TokenTable
from scute_jax.kernels.precision import einsum


def replace_rows(
    h: Float[Array, "t d"], token: Int[Array, "t"], table: TokenTable, slot: Int[Array, "t"]
) -> Float[Array, "t d"]:
    """rows[i] on rows whose adapter has token == ids[i], h elsewhere. Tokens are not negative."""
    entry, ids = _own(table, slot)
    hit = ids == token[:, None]
    own = table.rows[entry, jnp.argmax(hit, axis=-1)]
    return jnp.where(jnp.any(hit, axis=-1)[:, None], own.astype(h.dtype), h)


def replace_columns(
    h: Float[Array, "t vocab"], x: Float[Array, "t d"], table: TokenTable, slot: Int[Array, "t"]
) -> Float[Array, "t vocab"]:
    """x . rows[i] in column ids[i] of h; a column that h does not have is left out.

    Multiplies with the rows of all adapters at once, which reads each once, and selects.
    """
    entry, ids = _own(table, slot)
    dtype = jnp.promote_types(x.dtype, table.rows.dtype)
    every = einsum("td,nkd->tnk", x.astype(dtype), table.rows.astype(dtype))
    own = jnp.take_along_axis(every, entry[:, None, None], axis=1)[:, 0]
    column = jnp.where(ids >= 0, ids, h.shape[1])
    return h.at[jnp.arange(h.shape[0])[:, None], column].set(own.astype(h.dtype), mode="drop")


def _own(table: TokenTable, slot: Int[Array, "t"]) -> tuple[Int[Array, "t"], Int[Array, "t k"]]:
    """The entry of each row's adapter, and its ids, -1 where it has none."""
    entry = jnp.where(slot >= 0, table.row[jnp.maximum(slot, 0)], -1)
    ids = jnp.take(table.ids, entry, axis=0, mode="clip")
    return jnp.maximum(entry, 0), jnp.where((entry >= 0)[:, None], ids, -1)

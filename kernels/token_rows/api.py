"""Rows of the vocabulary that adapters replace, in the embedding and as columns of the head."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import TokenTable
from scute_jax.kernels.token_rows import reference


def replace_rows(
    h: Float[Array, "t d"], token: Int[Array, "t"], table: TokenTable, slot: Int[Array, "t"]
) -> Float[Array, "t d"]:
    """The row of each token: the adapter's own where it has one, h elsewhere.

    One implementation, like `replace_columns`: gathers and selects, which XLA runs on any device.
    """
    return reference.replace_rows(h, token, table, slot)


def replace_columns(
    h: Float[Array, "t vocab"], x: Float[Array, "t d"], table: TokenTable, slot: Int[Array, "t"]
) -> Float[Array, "t vocab"]:
    """The logits h with those of replaced tokens computed anew. See reference.py."""
    return reference.replace_columns(h, x, table, slot)

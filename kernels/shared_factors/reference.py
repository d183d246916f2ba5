"""The definition of the shared-factor route: terms whose A and B belong to many adapters."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from scute_jax.kernels.gather import gather_pages
from scute_jax.kernels.pools import Shared
from scute_jax.kernels.precision import einsum


def shared_factors(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    shared: Shared,
    slot: Int[Array, "t"],
) -> Float[Array, "t d_out"]:
    """h + sum over the shared terms of each row's adapter of (((x * u) A) * d) B * e.

    `slot` is the adapter of each row, -1 for base rows. Each pair is two products over the whole
    batch, of which a row selects its own.
    Source: VeRA (arXiv:2310.11454) eq. 2, batched.
    Dtypes: accumulates in float32; the scaled x A is rounded to the dtype of B; returns that of h.
    """
    row = jnp.where(slot[:, None] >= 0, shared.row[slot], -1)
    pair = shared.pair[slot]
    total = h.astype(jnp.float32)
    for p in range(shared.pairs.rank.shape[0]):
        mine = (row >= 0) & (pair == p)
        total = lax.cond(jnp.any(mine), _add_pair, _add_nothing, total, x, shared, p, row, mine)
    return total.astype(h.dtype)


def _add_nothing(total: Array, *_: Array) -> Array:
    return total


def _add_pair(
    total: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    shared: Shared,
    p: Int[Array, ""],
    row: Int[Array, "t j"],
    mine: Bool[Array, "t j"],
) -> Float[Array, "t d_out"]:
    which = jnp.asarray(p, jnp.int32)[None]
    A = gather_pages(shared.pairs.A, shared.pairs, which)[0]
    B = gather_pages(shared.pairs.B, shared.pairs, which)[0]
    for j in range(row.shape[1]):
        low = einsum("td,rd->tr", _scaled(x, shared, row[:, j]), A)
        d = jnp.take(shared.d, row[:, j], axis=0, mode="clip").astype(jnp.float32)
        e = jnp.take(shared.e, row[:, j], axis=0, mode="clip").astype(jnp.float32)
        own = mine[:, j, None]
        scaled = jnp.where(own, low * d, 0).astype(B.dtype)
        total = jnp.where(own, total + einsum("tr,rd->td", scaled, B) * e, total)
    return total


def _scaled(
    x: Float[Array, "t d_in"], shared: Shared, row: Int[Array, "t"]
) -> Float[Array, "t d_in"]:
    """x * u, rounded to the dtype of x."""
    if shared.u is None:
        return x
    u = jnp.take(shared.u, row, axis=0, mode="clip").astype(jnp.float32)
    return (x.astype(jnp.float32) * u).astype(x.dtype)

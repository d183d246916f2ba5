"""The definition of rotary positions with a paged cache: q turned, k turned and written, v written.

Source: RoFormer (arXiv:2104.09864) eq. 34, in the half-split layout of Hugging Face checkpoints.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_rope(
    qkv: tuple[Float[Array, "parts t h dh"], ...],
    k_pages: Float[Array, "p hkv page dh"],
    v_pages: Float[Array, "p hkv page dh"],
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
) -> tuple[Float[Array, "t hq dh"], Float[Array, "p hkv page dh"], Float[Array, "p hkv page dh"]]:
    """(q turned, k_pages with k turned, v_pages with v).

    `qkv` has the heads of q, then of k, then of v: in one array, or in one for each. What is meant
    is the sum of the parts of an array. Row i * size + j is token j of block i (t = n * size), at
    position start[i] + j of a sequence whose position m lies in page table[i, m // page], place
    m % page. cos and sin are those of the angles of each row's position. Tokens past rows[i] are
    not there: they write nothing.
    Dtypes: sums and turns in float32; returns q, and writes, in the dtype of the pages.
    Undefined: the queries of tokens that are not there.
    """
    hkv, dtype = k_pages.shape[1], k_pages.dtype
    heads = jnp.concatenate([jnp.sum(p.astype(jnp.float32), axis=0) for p in qkv], axis=1)
    q, k, v = jnp.split(heads, (heads.shape[1] - 2 * hkv, heads.shape[1] - hkv), axis=1)
    place = _places(heads.shape[0] // table.shape[0], table, start, rows, *k_pages.shape[::2][:2])
    q, k = (_turned(part, cos[:, None, :], sin[:, None, :]).astype(dtype) for part in (q, k))
    return q, _written(k_pages, k, *place), _written(v_pages, v, *place)


def _turned(
    x: Float[Array, "t h dh"], cos: Float[Array, "t 1 half"], sin: Float[Array, "t 1 half"]
) -> Float[Array, "t h dh"]:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _places(
    size: int,
    table: Int[Array, "n w"],
    start: Int[Array, "n"],
    rows: Int[Array, "n"],
    num_pages: int,
    page_size: int,
) -> tuple[Int[Array, "t"], Int[Array, "t"]]:
    """The page and the place in it of each row; what is not there goes past the last page."""
    token = jnp.arange(size, dtype=jnp.int32)[None, :]
    position = start[:, None] + token
    column = jnp.clip(position // page_size, 0, table.shape[1] - 1)
    page = jnp.take_along_axis(table, column, axis=1)
    page = jnp.where(token < rows[:, None], page, num_pages)
    return jnp.reshape(page, (-1,)), jnp.reshape(position % page_size, (-1,))


def _written(
    pages: Float[Array, "p hkv page dh"],
    new: Float[Array, "t hkv dh"],
    page: Int[Array, "t"],
    place: Int[Array, "t"],
) -> Float[Array, "p hkv page dh"]:
    return pages.at[page, :, place].set(new.astype(pages.dtype), mode="drop")

"""The slots of all adapters at one site, packed into the pools that the kernels read."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from scute_jax.fold import fold
from scute_jax.kernels import LowRank, Rotation, Shared, Vectors
from scute_jax.namespace import namespace
from scute_jax.normal_form import NormalForm, Term

PAGE = 16  # ranks in a page: the narrowest side of a tensor-core product


@struct.dataclass
class SiteSlots:
    """What K adapters do at one site; a part that no adapter uses is None and costs nothing.

    Invariants: all tables have K rows; block sizes of `rotations` differ, and none is 1 (blocks
    of size 1 are `input_scale`).
    """

    factors: LowRank | None = None
    scale: Vectors | None = None  # s - 1
    shift: Vectors | None = None  # b
    input_scale: Vectors | None = None  # the vector of an R of 1x1 blocks, minus 1
    rotations: tuple[Rotation, ...] = ()
    shared: Shared | None = None


def pack_site(
    forms: Sequence[NormalForm], d_in: int, d_out: int, dtype: jnp.dtype, page: int = PAGE
) -> SiteSlots:
    """The pools of a fixed list of adapters at one site; adapter k is forms[k].

    Works on traced arrays: gradients flow to every slot of every form.
    Raises: ValueError naming the form and the slot if a shape does not fit the site.
    """
    forms = [fold(form) for form in forms]
    for k, form in enumerate(forms):
        check_form(form, d_in, d_out, f"forms[{k}]")
    scales = [None if f.s is None else f.s - 1 for f in forms]
    inputs = [input_vector(f) for f in forms]
    owned = [owned_factors(f) for f in forms]
    return SiteSlots(
        factors=_pack_factors(owned, dtype, page) if _any(owned) else None,
        scale=_pack_vectors(scales, dtype),
        shift=_pack_vectors([f.b for f in forms], dtype),
        input_scale=_pack_vectors(inputs, dtype),
        rotations=_pack_rotations(forms, dtype),
        shared=_pack_shared(forms, d_out, dtype, page),
    )


def check_form(form: NormalForm, d_in: int, d_out: int, name: str) -> None:
    """Raises ValueError if a slot of the form does not fit a site of these widths."""
    shapes: dict[str, tuple[Array | None, tuple[int, ...]]]
    shapes = {"s": (form.s, (d_out,)), "b": (form.b, (d_out,))}
    if form.R is not None:
        m = form.R.shape[-1]
        shapes["R"] = (form.R, (d_in // m, m, m))
    for j, term in enumerate(form.terms):
        r = term.A.shape[-1]
        shapes |= {
            f"terms[{j}].A": (term.A, (d_in, r)),
            f"terms[{j}].B": (term.B, (r, d_out)),
            f"terms[{j}].d": (term.d, (r,)),
            f"terms[{j}].e": (term.e, (d_out,)),
        }
    for slot, (array, expected) in shapes.items():
        if array is not None and tuple(array.shape) != expected:
            raise ValueError(
                f"{name}.{slot} has shape {tuple(array.shape)}, but a site with d_in={d_in} and "
                f"d_out={d_out} needs {expected}; was the adapter made for another projection, "
                "or a factor not transposed to (d_in, r) and (r, d_out)?"
            )


def owned_factors(
    form: NormalForm,
) -> tuple[Float[Array, "r d_in"], Float[Array, "r d_out"]] | None:
    """The factors of a folded form, all owned terms side by side, one row per rank."""
    owned = [term for term in form.terms if term.pair is None and term.rank > 0]
    if not owned:
        return None
    xp = namespace(*(factor for term in owned for factor in (term.A, term.B)))
    return xp.concatenate([t.A.T for t in owned]), xp.concatenate([t.B for t in owned])


def input_vector(form: NormalForm) -> Float[Array, "d_in"] | None:
    """The vector that scales the input, minus 1, if R has blocks of size 1."""
    if form.R is None or form.R.shape[-1] != 1:
        return None
    return form.R[:, 0, 0] - 1


def rotation_offset(form: NormalForm) -> Float[Array, "d_in/m m m"] | None:
    """R - I if R has blocks larger than 1."""
    if form.R is None or form.R.shape[-1] == 1:
        return None
    return form.R - np.eye(form.R.shape[-1], dtype=form.R.dtype)[None]


def shared_vectors(term: Term, d_out: int) -> tuple[Float[Any, "r"], Float[Any, "d_out"]]:
    """d and e of a folded term on a shared pair, ones where the term has none."""
    d = np.ones((term.rank,), np.float32) if term.d is None else term.d
    return d, np.ones((d_out,), np.float32) if term.e is None else term.e


def _pack_factors(owned: Sequence, dtype: jnp.dtype, page: int) -> LowRank:
    """Pages of each adapter's own ranks, one after the other; at least one has factors."""
    ranks = [0 if factors is None else factors[0].shape[0] for factors in owned]
    pages = [-(-rank // page) for rank in ranks]
    table = np.zeros((len(owned), max(pages)), np.int32)
    first = 0
    for k, count in enumerate(pages):
        table[k, :count] = range(first, first + count)
        first += count
    own = [f for f in owned if f is not None]
    A = jnp.concatenate([paged(A, page, dtype) for A, _ in own])
    B = jnp.concatenate([paged(B, page, dtype) for _, B in own])
    return LowRank(A=A, B=B, table=jnp.asarray(table), rank=jnp.asarray(ranks, jnp.int32))


def paged(rows: Float[Array, "r d"], page: int, dtype: jnp.dtype) -> Float[Array, "p page d"]:
    """The rows of a factor cut into pages; the last page is filled up with zeros."""
    rows = jnp.asarray(rows).astype(dtype)
    rows = jnp.pad(rows, ((0, -rows.shape[0] % page), (0, 0)))
    return jnp.reshape(rows, (-1, page, rows.shape[1]))


def _pack_vectors(vectors: Sequence, dtype: jnp.dtype) -> Vectors | None:
    return Vectors(*_pack_rows(vectors, dtype)) if _any(vectors) else None


def _pack_rotations(forms: Sequence[NormalForm], dtype: jnp.dtype) -> tuple[Rotation, ...]:
    offsets = [rotation_offset(form) for form in forms]
    sizes = sorted({R.shape[-1] for R in offsets if R is not None})
    of_size = ([R if R is not None and R.shape[-1] == m else None for R in offsets] for m in sizes)
    return tuple(Rotation(*_pack_rows(own, dtype)) for own in of_size)


def _any(parts: Sequence) -> bool:
    return any(part is not None for part in parts)


def _pack_rows(arrays: Sequence, dtype: jnp.dtype) -> tuple[Array, Int[Array, "K"]]:
    """The arrays that are there (at least one), stacked, and the row of each adapter or -1."""
    present = [array for array in arrays if array is not None]
    row = np.full((len(arrays),), -1, np.int32)
    row[[k for k, array in enumerate(arrays) if array is not None]] = range(len(present))
    values = jnp.stack([jnp.asarray(array).astype(dtype) for array in present])
    return values, jnp.asarray(row)


def _pack_shared(
    forms: Sequence[NormalForm], d_out: int, dtype: jnp.dtype, page: int
) -> Shared | None:
    terms = [[term for term in form.terms if term.pair is not None] for form in forms]
    keys = list(dict.fromkeys(term.pair for own in terms for term in own))
    if not keys:
        return None
    first = {term.pair: term for own in reversed(terms) for term in reversed(own)}
    pairs = _pack_factors([(first[k].A.T, first[k].B) for k in keys], dtype, page)
    width = pairs.table.shape[1] * page
    most = max(len(own) for own in terms)
    row, pair = np.full((len(forms), most), -1, np.int32), np.zeros((len(forms), most), np.int32)
    ds, es = [], []
    for k, own in enumerate(terms):
        for j, term in enumerate(own):
            row[k, j], pair[k, j] = len(ds), keys.index(term.pair)
            d, e = shared_vectors(term, d_out)
            ds.append(jnp.pad(jnp.asarray(d).astype(dtype), (0, width - term.rank)))
            es.append(jnp.asarray(e).astype(dtype))
    return Shared(
        pairs=pairs,
        d=jnp.stack(ds),
        e=jnp.stack(es),
        row=jnp.asarray(row),
        pair=jnp.asarray(pair),
    )

"""The slots of all adapters at one site, packed into the pools that the kernels read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from scute_jax.entries import PADDING, Entry, entries, factors_of, pass_of, turns
from scute_jax.fold import fold
from scute_jax.kernels import (
    KroneckerFactors,
    LowRank,
    Rotation,
    Shared,
    SparseEntries,
    TokenTable,
    Vectors,
    at_tiles,
)
from scute_jax.kernels.tiles import Tiles
from scute_jax.namespace import namespace
from scute_jax.normal_form import Kronecker, NormalForm

PAGE = 16  # ranks in a page: the narrowest side of a tensor-core product


@struct.dataclass
class SiteSlots:
    """What K adapters do at one site; a part that no adapter uses is None and costs nothing.

    Invariants: all tables have K rows. Rotations stand in the order in which they act; an adapter
    is in at most one pool of a stage.
    """

    factors: LowRank | None = None
    scale: Vectors | None = None  # s - 1
    shift: Vectors | None = None  # b
    input_scale: Vectors | None = None  # the vector of an R of 1x1 blocks, minus 1
    rotations: tuple[Rotation, ...] = ()  # P and R, of the input
    output_rotations: tuple[Rotation, ...] = ()  # Q
    shared: Shared | None = None
    sparse: SparseEntries | None = None
    kronecker: tuple[KroneckerFactors, ...] = ()  # one for each shape
    tokens: TokenTable | None = None


def assemble(parts: Mapping[str, Any]) -> SiteSlots:
    """The pools of a site by their kinds (see entries.py) as the struct of them all."""
    passes = sorted((pass_of(kind), kind) for kind in parts if pass_of(kind) is not None)
    by_side = {
        side: tuple(parts[kind] for place, kind in passes if place[0] == side)
        for side in ("in", "out")
    }
    return SiteSlots(
        factors=parts.get("factors"),
        scale=parts.get("scale"),
        shift=parts.get("shift"),
        input_scale=parts.get("input"),
        rotations=by_side["in"],
        output_rotations=by_side["out"],
        shared=parts.get("shared"),
        sparse=parts.get("sparse"),
        kronecker=tuple(parts[kind] for kind in sorted(parts) if factors_of(kind) is not None),
        tokens=parts.get("tokens"),
    )


def narrow(slots: SiteSlots, kinds: frozenset[str]) -> SiteSlots:
    """The slots with the parts of some kinds only."""

    def keep(kind: str, part: Any) -> Any:
        return part if kind in kinds else None

    return SiteSlots(
        factors=keep("factors", slots.factors),
        scale=keep("scale", slots.scale),
        shift=keep("shift", slots.shift),
        input_scale=keep("input", slots.input_scale),
        rotations=tuple(r for r in slots.rotations if r.kind in kinds),
        output_rotations=tuple(r for r in slots.output_rotations if r.kind in kinds),
        shared=keep("shared", slots.shared),
        sparse=keep("sparse", slots.sparse),
        kronecker=tuple(k for k in slots.kronecker if k.kind in kinds),
        tokens=keep("tokens", slots.tokens),
    )


def looked_up(slots: SiteSlots, tiles: Tiles) -> SiteSlots:
    """The slots with the tables of the segmented update at the tiles of a batch: once for all steps
    in which the batch stays the same."""
    riding = {part: getattr(slots, part) for part in ("factors", "scale", "shift")}
    return replace(slots, **{part: at_tiles(pool, tiles.slot) for part, pool in riding.items()})


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
    found = [entries(form) for form in forms]
    parts: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for own in found for kind in own):
        own = [of_form.get(kind, []) for of_form in found]
        if kind == "factors":
            parts[kind] = _factors(
                [(o[0]["A"], o[0]["B"]) if o else None for o in own], dtype, page
            )
        elif kind == "shared":
            parts[kind] = _shared(forms, own, dtype, page)
        elif kind in ("sparse", "tokens"):
            pool = SparseEntries if kind == "sparse" else TokenTable
            parts[kind] = pool(**_ragged(own, d_out, dtype))
        elif factors_of(kind) is not None:
            parts[kind] = KroneckerFactors(**_listed(own, dtype), kind=kind)
        elif pass_of(kind) is None:
            parts[kind] = Vectors(*_rows([o[0]["values"] if o else None for o in own], dtype))
        else:
            orders = {k: blocks.order for form in forms for k, blocks in turns(form)}
            values = _rows([o[0]["values"] if o else None for o in own], dtype)
            order = None if orders[kind] is None else jnp.asarray(orders[kind], jnp.int32)
            parts[kind] = Rotation(*values, order=order, kind=kind)
    return assemble(parts)


def check_form(form: NormalForm, d_in: int, d_out: int, name: str) -> None:
    """Raises ValueError if a slot of the form does not fit a site of these widths."""
    shapes: dict[str, tuple[Array | Kronecker | None, tuple[int, ...]]]
    shapes = {"s": (form.s, (d_out,)), "b": (form.b, (d_out,))}
    if form.R is not None:
        m = form.R.shape[-1]
        shapes["R"] = (form.R, (d_in // m, m, m))
    for slot, width, all_blocks in (("P", d_in, form.P), ("Q", d_out, form.Q)):
        for j, blocks in enumerate(all_blocks):
            m = blocks.values.shape[-1]
            shapes[f"{slot}[{j}].values"] = (blocks.values, (width // m, m, m))
            shapes[f"{slot}[{j}].order"] = (blocks.order, (width,))
    for j, product in enumerate(form.K):
        shapes[f"K[{j}]"] = (product, (d_in, d_out))
    for j, term in enumerate(form.terms):
        r = term.A.shape[-1]
        shapes |= {
            f"terms[{j}].A": (term.A, (d_in, r)),
            f"terms[{j}].B": (term.B, (r, d_out)),
            f"terms[{j}].d": (term.d, (r,)),
            f"terms[{j}].e": (term.e, (d_out,)),
            f"terms[{j}].u": (term.u, (d_in,)),
        }
    if form.rows is not None:  # of the embedding or of the head: d_out or d_in wide
        count, width = form.rows.rows.shape
        shapes["rows.rows"] = (form.rows.rows, (count, d_out if width == d_out else d_in))
        shapes["rows.ids"] = (form.rows.ids, (count,))
    for slot, (array, expected) in shapes.items():
        if array is not None and tuple(array.shape) != expected:
            raise ValueError(
                f"{name}.{slot} has shape {tuple(array.shape)}, but a site with d_in={d_in} and "
                f"d_out={d_out} needs {expected}; was the adapter made for another projection, "
                "or a factor not transposed to (d_in, r) and (r, d_out)?"
            )


def paged(rows: Float[Array, "r d"], page: int, dtype: jnp.dtype) -> Float[Array, "p page d"]:
    """The rows of a factor cut into pages; the last page is filled up with zeros."""
    rows = jnp.asarray(rows).astype(dtype)
    rows = jnp.pad(rows, ((0, -rows.shape[0] % page), (0, 0)))
    return jnp.reshape(rows, (-1, page, rows.shape[1]))


def filled(entry: Entry, size: int, d_out: int) -> dict[str, Any]:
    """The parts of a sparse or token entry as the pools have them, filled up to `size` with what
    names nothing or is never read."""
    full = {}
    if "cols" in entry:
        full["starts"], entry = _by_column(entry, d_out)
    for part, array in entry.items():
        pad = [(0, size - array.shape[0]), *[(0, 0)] * (array.ndim - 1)]
        full[part] = namespace(array).pad(array, pad, constant_values=PADDING[part])
    return full


def _by_column(entry: Entry, d_out: int) -> tuple[Array, Entry]:
    """Where each column of a sparse entry starts, and its rows and values sorted by column."""
    cols = entry["cols"]
    xp = namespace(cols)
    narrow = cols.astype(xp.uint16) if d_out < 1 << 16 else cols  # is sorted ten times as fast
    order = xp.argsort(narrow, stable=True)
    starts = xp.searchsorted(cols[order], xp.arange(d_out + 1, dtype=cols.dtype))
    parts = ((part, entry[part]) for part in ("rows", "values"))
    return starts, {p: namespace(array, order).take(array, order) for p, array in parts}


def _factors(owned: Sequence, dtype: jnp.dtype, page: int) -> LowRank:
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


def _rows(arrays: Sequence, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The arrays that are there (at least one), stacked, and the row of each adapter or -1."""
    present = [array for array in arrays if array is not None]
    row = np.full((len(arrays),), -1, np.int32)
    row[[k for k, array in enumerate(arrays) if array is not None]] = range(len(present))
    values = jnp.stack([jnp.asarray(array).astype(dtype) for array in present])
    return values, jnp.asarray(row)


def _listed(own: Sequence[Sequence[Entry]], dtype: jnp.dtype) -> dict[str, Array]:
    """Entries of one shape, stacked, and the rows of each adapter in them, filled up with -1."""
    row = np.full((len(own), max(map(len, own))), -1, np.int32)
    first = 0
    for k, entry_list in enumerate(own):
        row[k, : len(entry_list)] = range(first, first + len(entry_list))
        first += len(entry_list)
    present = [entry for entry_list in own for entry in entry_list]
    parts = {
        part: jnp.stack([jnp.asarray(entry[part]).astype(dtype) for entry in present])
        for part in present[0]
    }
    return parts | {"row": jnp.asarray(row)}


def _ragged(own: Sequence[Sequence[Entry]], d_out: int, dtype: jnp.dtype) -> dict[str, Array]:
    """Entries of different length (sparse, tokens), filled up to the longest."""
    present = [entry[0] for entry in own if entry]
    longest = max(next(iter(entry.values())).shape[0] for entry in present)
    full = [filled(entry, longest, d_out) for entry in present]
    row = np.full((len(own),), -1, np.int32)
    row[[k for k, entry in enumerate(own) if entry]] = range(len(present))
    stacked = {part: jnp.stack([jnp.asarray(f[part]) for f in full]) for part in full[0]}
    floats = {p for p, a in stacked.items() if jnp.issubdtype(a.dtype, jnp.floating)}
    cast = {p: a.astype(dtype if p in floats else jnp.int32) for p, a in stacked.items()}
    return cast | {"row": jnp.asarray(row)}


def _shared(
    forms: Sequence[NormalForm], own: Sequence[Sequence[Entry]], dtype: jnp.dtype, page: int
) -> Shared:
    terms = [[term for term in form.terms if term.pair is not None] for form in forms]
    first = {term.pair: term for of_form in reversed(terms) for term in reversed(of_form)}
    keys = list(first)
    pairs = _factors([(first[key].A.T, first[key].B) for key in keys], dtype, page)
    width, most = pairs.table.shape[1] * page, max(map(len, own))
    row, pair = np.full((len(forms), most), -1, np.int32), np.zeros((len(forms), most), np.int32)
    vectors: list[Entry] = []
    for k, of_form in enumerate(terms):
        for j, term in enumerate(of_form):
            row[k, j], pair[k, j] = len(vectors), keys.index(term.pair)
            vectors.append(own[k][j])

    def stacked(part: str, size: int) -> Array:
        arrays = [jnp.asarray(v.get(part, np.ones((size,), np.float32))) for v in vectors]
        return jnp.stack([jnp.pad(a.astype(dtype), (0, size - a.shape[0])) for a in arrays])

    d_in, d_out = first[keys[0]].A.shape[0], first[keys[0]].B.shape[1]
    return Shared(
        pairs=pairs,
        d=stacked("d", width),
        e=stacked("e", d_out),
        u=stacked("u", d_in) if any("u" in v for v in vectors) else None,
        row=jnp.asarray(row),
        pair=jnp.asarray(pair),
    )

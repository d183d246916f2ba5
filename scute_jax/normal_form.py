"""The normal form: what an adapter does to one linear projection (a *site*), as a pytree.

    F(x) = base(x R) * s + b + sum_k c_k (((x A_k) * d_k) B_k * e_k),     base(x) = x W + bias

`base` is the frozen projection with its own bias, if it has one; every slot that is None is the
identity. A method that replaces the base bias or leaves it unscaled says so through `b`
(`b = bias * (1 - s)` leaves it unscaled).

Few methods need more than that. In full, with every extension live:

    F(x) = (base(x P_1 .. P_p R) Q_1 .. Q_q) * s + b + x S + sum_j x K_j
           + sum_k c_k ((((x * u_k) A_k) * d_k) B_k * e_k)

P and Q are block-diagonal up to a permutation (`Blocks`), S is sparse (`Sparse`), each K a
Kronecker product (`Kronecker`), u scales the input of one term. An extension that an adapter does
not use costs nothing.

Besides projections, a site can be a norm ("layers.0.input_layernorm", "norm": x is normalised and W
the diagonal of the frozen weight; slots are s, b and S) or the token embedding ("embed_tokens": x
is the one-hot row of a token, so that A has a row for each token; slots are s, b, terms and rows).
There and at "lm_head", `rows` replaces what all other slots make of a token, and may add tokens.

Axes: d_in, d_out = input and output width of the site; r = rank; m = block size.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class Term:
    """One low-rank term c ((((x * u) A) * d) B * e).

    Invariants: A and B have the same rank r; the adapter owns A and B unless `pair` names them.
    A shared pair belongs to all adapters whose terms carry the same `pair`: equal keys promise
    equal A and equal B, so a key has to be derived from what determines the numbers.
    """

    A: Float[Array, "d_in r"]
    B: Float[Array, "r d_out"]
    c: Any = 1.0  # scalar
    d: Float[Array, "r"] | None = None
    e: Float[Array, "d_out"] | None = None
    u: Float[Array, "d_in"] | None = None
    pair: str | None = struct.field(pytree_node=False, default=None)  # key of a shared pair

    @property
    def rank(self) -> int:
        return self.A.shape[1]


@struct.dataclass
class Blocks:
    """A block-diagonal matrix, after a permutation of the coordinates if there is an `order`.

    y[order[j*m + q]] = sum_p x[order[j*m + p]] values[j, p, q]; without an order, order[i] = i.
    Invariants: order is a permutation; `key` is None exactly if order is, and equal keys promise
    equal orders.
    """

    values: Float[Array, "d/m m m"]
    order: Int[Array, "d"] | None = None
    key: str | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Sparse:
    """A sparse matrix: entry values[i] at row rows[i] (of d_in) and column cols[i] (of d_out).

    Entries at one place add up.
    """

    rows: Int[Array, "nnz"]
    cols: Int[Array, "nnz"]
    values: Float[Array, "nnz"]


@struct.dataclass
class Kronecker:
    """The matrix kron(left, right): x K is left^T X right, X the rows of x as [a_in, b_in].

    d_in = a_in b_in and d_out = a_out b_out; the result [a_out, b_out] is read row by row.
    """

    left: Float[Array, "a_in a_out"]
    right: Float[Array, "b_in b_out"]

    @property
    def shape(self) -> tuple[int, int]:
        """(d_in, d_out)."""
        (a_in, a_out), (b_in, b_out) = self.left.shape, self.right.shape
        return a_in * b_in, a_out * b_out


@struct.dataclass
class TokenRows:
    """Rows of the embedding (or of the head) that replace those of the base: token ids[i]."""

    ids: Int[Array, "k"]
    rows: Float[Array, "k d"]


@struct.dataclass
class NormalForm:
    """The slots of one adapter at one site; None (or no entry) is the identity.

    Invariants: R holds the d_in / m diagonal blocks of a matrix that x is multiplied with from the
    right: y[j*m + q] = sum_p x[j*m + p] R[j, p, q]. Blocks of size 1 are a vector that scales x.
    """

    R: Float[Array, "d_in/m m m"] | None = None
    s: Float[Array, "d_out"] | None = None
    b: Float[Array, "d_out"] | None = None
    terms: tuple[Term, ...] = ()
    P: tuple[Blocks, ...] = ()  # of the input, before R
    Q: tuple[Blocks, ...] = ()  # of the output, before s
    S: Sparse | None = None
    K: tuple[Kronecker, ...] = ()
    rows: TokenRows | None = None

    @property
    def rank(self) -> int:
        """The summed rank of the terms whose factors the adapter owns."""
        return sum(term.rank for term in self.terms if term.pair is None)

    @property
    def live(self) -> tuple[str, ...]:
        """The names of the slots that are computed for every token, in the order of `SLOTS`."""
        named = {"P": self.P, "R": self.R, "Q": self.Q, "s": self.s, "b": self.b}
        named |= {"S": self.S, "K": self.K, "rows": self.rows}
        live = {
            name
            for name, slot in named.items()
            if not (slot is None or isinstance(slot, tuple) and not slot)
        }
        live |= {n for n in "ude" if any(getattr(t, n) is not None for t in self.terms)}
        return tuple(name for name in SLOTS if name in live)


SLOTS = ("P", "R", "Q", "s", "b", "u", "d", "e", "S", "K", "rows")
SLOTS_AT = {  # the slots of sites that are no projections
    "norm": frozenset({"s", "b", "S"}),
    "embedding": frozenset({"s", "b", "rows", "terms"}),
}


def slots_beyond(form: NormalForm, place: str) -> list[str]:
    """What a folded form has that sites of this kind (a key of SLOTS_AT) do not."""
    used = {*form.live, *("terms" if t.pair is None else "shared pairs" for t in form.terms)}
    return sorted(used - SLOTS_AT[place])


@struct.dataclass
class Adapter:
    """What one adapter does to a model: site name -> NormalForm.

    Site names are the module paths of the Hugging Face Llama without the leading `model.`:
    "layers.3.self_attn.q_proj", "lm_head". `version` is derived from the content: adapters with
    equal versions compute the same function. Two adapters may share a name, never a version.
    With an `invocation` (token ids), it acts on the tokens from its last occurrence in the prompt
    on, and on none where the prompt does not have it.
    """

    sites: dict[str, NormalForm]
    method: str = struct.field(pytree_node=False)  # "LORA", "DORA", "IA3", "VERA", "OFT", ...
    version: str = struct.field(pytree_node=False)
    metadata: tuple[tuple[str, Any], ...] = struct.field(pytree_node=False, default=())
    invocation: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def __getitem__(self, site: str) -> NormalForm:
        return self.sites[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __contains__(self, site: object) -> bool:
        return site in self.sites

    @property
    def info(self) -> Mapping[str, Any]:
        """The metadata as a read-only mapping: what the checkpoint said of itself."""
        return MappingProxyType(dict(self.metadata))

    @property
    def live(self) -> tuple[str, ...]:
        """The slots that stay live at one site at least, in the order of `SLOTS`."""
        live = {name for form in self.sites.values() for name in form.live}
        return tuple(name for name in SLOTS if name in live)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays this adapter owns (shared pairs and fixed orders not counted)."""
        return sum(_owned_bytes(form) for form in self.sites.values())


def _owned_bytes(form: NormalForm) -> int:
    arrays = [form.R, form.s, form.b, *(blocks.values for blocks in (*form.P, *form.Q))]
    if form.S is not None:
        arrays += [form.S.rows, form.S.cols, form.S.values]
    arrays += [factor for product in form.K for factor in (product.left, product.right)]
    if form.rows is not None:
        arrays += [form.rows.ids, form.rows.rows]
    for term in form.terms:
        arrays += [term.d, term.e, term.u]
        arrays += [] if term.pair is not None else [term.A, term.B]
    return sum(array.nbytes for array in arrays if array is not None)

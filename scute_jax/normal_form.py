"""The normal form: what an adapter does to one linear projection (a *site*), as a pytree.

    F(x) = base(x R) * s + b + sum_k c_k (((x A_k) * d_k) B_k * e_k),     base(x) = x W + bias

`base` is the frozen projection with its own bias, if it has one; every slot that is None is the
identity. A method that replaces the base bias or leaves it unscaled says so through `b`
(`b = bias * (1 - s)` leaves it unscaled).

Axes: d_in, d_out = input and output width of the site; r = rank; m = block size of R.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from flax import struct
from jaxtyping import Array, Float


@struct.dataclass
class Term:
    """One low-rank term c (((x A) * d) B * e).

    Invariants: A and B have the same rank r; the adapter owns A and B unless `pair` names them.
    A shared pair belongs to all adapters whose terms carry the same `pair`: equal keys promise
    equal A and equal B, so a key has to be derived from what determines the numbers.
    """

    A: Float[Array, "d_in r"]
    B: Float[Array, "r d_out"]
    c: Any = 1.0  # scalar
    d: Float[Array, "r"] | None = None
    e: Float[Array, "d_out"] | None = None
    pair: str | None = struct.field(pytree_node=False, default=None)  # key of a shared pair

    @property
    def rank(self) -> int:
        return self.A.shape[1]


@struct.dataclass
class NormalForm:
    """The slots of one adapter at one site; None (or no term) is the identity.

    Invariants: R holds the d_in / m diagonal blocks of a matrix that x is multiplied with from the
    right: y[j*m + q] = sum_p x[j*m + p] R[j, p, q]. Blocks of size 1 are a vector that scales x.
    """

    R: Float[Array, "d_in/m m m"] | None = None
    s: Float[Array, "d_out"] | None = None
    b: Float[Array, "d_out"] | None = None
    terms: tuple[Term, ...] = ()

    @property
    def rank(self) -> int:
        """The summed rank of the terms whose factors the adapter owns."""
        return sum(term.rank for term in self.terms if term.pair is None)

    @property
    def live(self) -> tuple[str, ...]:
        """The names of the slots that are computed for every token, in the order R s b d e."""
        named = {"R": self.R, "s": self.s, "b": self.b}
        live = [name for name, slot in named.items() if slot is not None]
        live += [n for n in ("d", "e") if any(getattr(t, n) is not None for t in self.terms)]
        return tuple(live)


@struct.dataclass
class Adapter:
    """What one adapter does to a model: site name -> NormalForm.

    Site names are the module paths of the Hugging Face Llama without the leading `model.`:
    "layers.3.self_attn.q_proj", "lm_head". `version` is derived from the content: adapters with
    equal versions compute the same function. Two adapters may share a name, never a version.
    """

    sites: dict[str, NormalForm]
    method: str = struct.field(pytree_node=False)  # "LORA", "DORA", "IA3", "VERA", "OFT", ...
    version: str = struct.field(pytree_node=False)
    metadata: tuple[tuple[str, Any], ...] = struct.field(pytree_node=False, default=())

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
        """The slots that stay live at one site at least, in the order R s b d e."""
        live = {name for form in self.sites.values() for name in form.live}
        return tuple(name for name in "Rsbde" if name in live)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays this adapter owns (shared pairs not counted)."""
        total = 0
        for form in self.sites.values():
            slots = [form.R, form.s, form.b]
            for term in form.terms:
                slots += [term.d, term.e]
                slots += [] if term.pair is not None else [term.A, term.B]
            total += sum(slot.nbytes for slot in slots if slot is not None)
        return total

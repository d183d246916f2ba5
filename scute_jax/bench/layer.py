"""One decoder layer as the adapter kernels see it, and random pools in its shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scute_jax.byte_model import Cost, byte_cost, fused
from scute_jax.kernels import LowRank, Rotation, Shared, SparseEntries, Vectors
from scute_jax.normal_form import NormalForm, Sparse, Term
from scute_jax.segments import Segments, segments
from scute_jax.slots import PAGE


@dataclass(frozen=True)
class Layer:
    """The widths of a decoder layer: four groups of projections, each of which reads one x."""

    hidden: int
    kv: int
    ff: int

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name of a group -> d_in and the width of each projection."""
        return {
            "qkv": (self.hidden, (self.hidden, self.kv, self.kv)),
            "o": (self.hidden, (self.hidden,)),
            "gate_up": (self.hidden, (self.ff, self.ff)),
            "down": (self.ff, (self.hidden,)),
        }

    @property
    def sites(self) -> tuple[tuple[int, int], ...]:
        """d_in and d_out of each projection."""
        return tuple((d_in, d_out) for d_in, outs in self.groups.values() for d_out in outs)


LLAMA_8B = Layer(4096, 1024, 14336)
SMALL = Layer(256, 64, 512)
TINY = Layer(64, 32, 96)


@dataclass(frozen=True)
class Load:
    """What a batch holds: rows, shared out evenly among adapters, each of its own rank."""

    rows: int
    ranks: tuple[int, ...]
    layer: Layer = LLAMA_8B

    @property
    def adapters(self) -> int:
        return len(self.ranks)

    @property
    def adapter_of_row(self) -> np.ndarray:
        return np.arange(self.rows) * self.adapters // self.rows

    def segments(self) -> Segments:
        return segments(self.adapter_of_row, self.adapters, presorted=True)

    def factor_bytes(self, itemsize: int = 2) -> int:
        """Of the factors of all adapters, each of its own rank."""
        return sum(self.ranks) * sum(map(sum, self.layer.sites)) * itemsize

    def h_bytes(self, itemsize: int = 2) -> int:
        """Of h, read and written once."""
        return 2 * self.rows * sum(d_out for _, d_out in self.layer.sites) * itemsize

    def x_bytes(self, itemsize: int = 2) -> int:
        return self.rows * sum(d_in for d_in, _ in self.layer.groups.values()) * itemsize

    def cost(self, form_of) -> Cost:
        """What the byte model says of the layer; form_of(adapter, d_in, d_out) is a normal form."""
        rows = np.bincount(self.adapter_of_row, minlength=self.adapters).tolist()
        groups = [
            fused([byte_cost(list(_forms(self, form_of, d_in, d)), rows, d_in, d) for d in outs])
            for d_in, outs in self.layer.groups.values()
        ]
        return sum(groups, Cost())

    def low_rank_form(self, adapter: int, d_in: int, d_out: int, s: bool = False) -> NormalForm:
        rank = self.ranks[adapter]
        term = Term(A=_zeros(d_in, rank), B=_zeros(rank, d_out))
        return NormalForm(terms=(term,), s=_zeros(d_out) if s else None)

    def shared_form(self, adapter: int, d_in: int, d_out: int) -> NormalForm:
        rank = self.ranks[adapter]
        A, B = _zeros(d_in, rank), _zeros(rank, d_out)
        return NormalForm(terms=(Term(A, B, d=_zeros(rank), e=_zeros(d_out), pair="pair"),))

    def sparse_form(self, adapter: int, d_in: int, d_out: int) -> NormalForm:
        """A matrix with the numbers that factors of its rank would have, in full columns."""
        entries = (d_out * per_column(self.ranks[adapter], d_in, d_out),)
        index = np.broadcast_to(np.int32(0), entries)
        return NormalForm(S=Sparse(index, index, _zeros(*entries)))


def per_column(rank: int, d_in: int, d_out: int) -> int:
    """Entries of a column of a matrix with as many numbers as factors of this rank."""
    return -(-rank * (d_in + d_out) // d_out)


def turned_form(block: int):
    """form_of of adapters that rotate their input in blocks."""
    return lambda adapter, d_in, d_out: NormalForm(R=_zeros(d_in // block, block, block))


def _forms(load: Load, form_of, d_in: int, d_out: int) -> Iterator[NormalForm]:
    return (form_of(k, d_in, d_out) for k in range(load.adapters))


def _zeros(*shape: int) -> np.ndarray:
    """Zeros that take no memory: the byte model looks at shapes."""
    return np.broadcast_to(np.float32(0), shape)


def factors(key: Array, ranks: Sequence[int], d_in: int, d_out: int, dtype=jnp.bfloat16) -> LowRank:
    """Random factors of every adapter, paged one after the other."""
    pages = [-(-rank // PAGE) for rank in ranks]
    table = np.zeros((len(ranks), max(pages)), np.int32)
    for k, count in enumerate(pages):
        table[k, :count] = range(sum(pages[:k]), sum(pages[: k + 1]))
    a, b = jax.random.split(key)
    shape = (sum(pages), PAGE)
    return LowRank(
        A=_normal(a, (*shape, d_in), d_in**-0.5, dtype),
        B=_normal(b, (*shape, d_out), 0.125, dtype),
        table=jnp.asarray(table),
        rank=jnp.asarray(ranks, jnp.int32),
    )


def vectors(key: Array, count: int, d: int, dtype=jnp.bfloat16) -> Vectors:
    """A random s - 1, near zero, for each adapter."""
    return Vectors(_normal(key, (count, d), 0.002, dtype), jnp.arange(count, dtype=jnp.int32))


def rotation(key: Array, count: int, d: int, block: int, dtype=jnp.bfloat16) -> Rotation:
    """A random R - I, near zero, for each adapter."""
    values = _normal(key, (count, d // block, block, block), 0.002, dtype)
    return Rotation(values, jnp.arange(count, dtype=jnp.int32))


def shared(
    key: Array, tenants: int, rank: int, d_in: int, d_out: int, dtype=jnp.bfloat16
) -> Shared:
    """One pair of factors and the own d and e of each tenant."""
    pair, d, e = jax.random.split(key, 3)
    row = jnp.arange(tenants, dtype=jnp.int32)[:, None]
    return Shared(
        pairs=factors(pair, (rank,), d_in, d_out, dtype),
        d=_normal(d, (tenants, -(-rank // PAGE) * PAGE), 0.1, dtype),
        e=_normal(e, (tenants, d_out), 0.1, dtype),
        u=None,
        row=row,
        pair=jnp.zeros_like(row),
    )


def sparse(
    key: Array, count: int, rank: int, d_in: int, d_out: int, dtype=jnp.bfloat16
) -> SparseEntries:
    """A matrix of each adapter with as many entries in every column, see `per_column`."""
    rows, values = jax.random.split(key)
    each = per_column(rank, d_in, d_out)
    shape = (count, each * d_out)
    starts = jnp.arange(d_out + 1, dtype=jnp.int32) * each
    return SparseEntries(
        starts=jnp.broadcast_to(starts, (count, d_out + 1)),
        rows=jax.random.randint(rows, shape, 0, d_in, jnp.int32),
        values=_normal(values, shape, 0.01, dtype),
        row=jnp.arange(count, dtype=jnp.int32),
    )


def activations(key: Array, rows: int, widths: Sequence[int], dtype=jnp.bfloat16) -> list[Array]:
    keys = jax.random.split(key, len(widths))
    return [_normal(k, (rows, d), 1.0, dtype) for k, d in zip(keys, widths, strict=True)]


def _normal(key: Array, shape: tuple[int, ...], scale: float, dtype) -> Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

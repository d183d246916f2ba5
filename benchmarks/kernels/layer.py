"""One decoder layer of Llama-3.1-8B as the adapter kernels see it: four groups of projections."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from scute_jax.kernels import LowRank, Vectors
from scute_jax.kernels.tiles import Tiles
from scute_jax.segments import segments

HIDDEN, KV, FF = 4096, 1024, 14336
GROUPS = {  # name -> d_in, widths of the slices
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (FF, FF)),
    "down": (FF, (HIDDEN,)),
}
PAGE = 16


@dataclass(frozen=True)
class Load:
    """What a batch holds: rows, adapters in turn, the rank of each."""

    rows: int
    ranks: tuple[int, ...]

    @property
    def adapters(self) -> int:
        return len(self.ranks)

    def factor_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the factors of all adapters at one layer, each of its own rank."""
        widths = sum(d_in * len(outs) + sum(outs) for d_in, outs in GROUPS.values())
        return widths * sum(self.ranks) * itemsize

    def h_bytes(self, itemsize: int = 2) -> int:
        """Bytes of h, read and written once."""
        return 2 * self.rows * sum(sum(outs) for _, outs in GROUPS.values()) * itemsize

    def x_bytes(self, itemsize: int = 2) -> int:
        return self.rows * sum(d_in for d_in, _ in GROUPS.values()) * itemsize


def batch_tiles(load: Load, tile: int | None = None) -> Tiles:
    """Rows shared out evenly among the adapters."""
    ids = jnp.arange(load.rows) * load.adapters // load.rows
    return segments(ids, load.adapters, presorted=True, tile=tile).tiles


def factors(key: jax.Array, load: Load, d_in: int, d_out: int, dtype=jnp.bfloat16) -> LowRank:
    """Random factors of every adapter, paged one after the other."""
    pages = [-(-rank // PAGE) for rank in load.ranks]
    first = [sum(pages[:k]) for k in range(len(pages))]
    table = [
        [first[k] + p if p < pages[k] else 0 for p in range(max(pages))] for k in range(len(pages))
    ]
    a, b = jax.random.split(key)
    shape = (sum(pages), PAGE)
    return LowRank(
        A=(jax.random.normal(a, (*shape, d_in), jnp.float32) / d_in**0.5).astype(dtype),
        B=(jax.random.normal(b, (*shape, d_out), jnp.float32) / 8).astype(dtype),
        table=jnp.asarray(table, jnp.int32),
        rank=jnp.asarray(load.ranks, jnp.int32),
    )


def vectors(key: jax.Array, load: Load, d: int, dtype=jnp.bfloat16) -> Vectors:
    """A random vector near zero (an s minus 1) for every adapter."""
    values = 0.3 * jax.random.normal(key, (load.adapters, d), jnp.float32)
    return Vectors(values.astype(dtype), jnp.arange(load.adapters, dtype=jnp.int32))


def layers(count: int, load: Load, seed: int = 0) -> list[dict[str, tuple[LowRank, ...]]]:
    """The factors of `count` layers: enough of them that no cache holds them all."""
    keys = iter(jax.random.split(jax.random.key(seed), 8 * count))
    return [
        {
            name: tuple(factors(next(keys), load, d_in, d_out) for d_out in outs)
            for name, (d_in, outs) in GROUPS.items()
        }
        for _ in range(count)
    ]

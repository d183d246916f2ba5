"""One op over several layers, in a loop inside one jit: what the benchmarks time.

The layers have pools of their own, so that no cache holds them from one use to the next. All
activations are carried through the loop, so that nothing is hoisted out of it or left away.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scute_jax.bench import layer as pools
from scute_jax.bench.layer import Layer, Load
from scute_jax.kernels import (
    Implementation,
    at_tiles,
    block_rotate,
    segmented_linear,
    segmented_update,
    shared_factors,
    sparse_update,
)
from scute_jax.kernels.arrivals import zero_counts
from scute_jax.kernels.block_rotate.pallas import block_rotate as rotate_twin
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.segmented_expand.pallas import segmented_expand
from scute_jax.kernels.segmented_linear.pallas_triton import segmented_linear as linear_twin
from scute_jax.kernels.segmented_shrink.pallas_triton import segmented_shrink
from scute_jax.kernels.shared_factors.pallas_triton import shared_factors as shared_twin
from scute_jax.kernels.sparse_update.pallas_triton import sparse_update as sparse_twin

MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much is run: bytes of different pools, layers at most, and microseconds of one call."""

    distinct: int = 256 * MIB
    layers: int = 8
    call_us: float = 30_000.0
    repeats: int = 9


QUICK = Effort(0, 2, 0.0, 2)


@dataclass(frozen=True)
class Work:
    """A jitted step that does `per_call` layers, and the bytes that one of them has to move."""

    step: Callable
    args: tuple
    per_call: int
    nbytes: int


@dataclass(frozen=True)
class Op:
    """How an op is called: an implementation, or (for a search) the twin with tiles of its own."""

    how: Implementation | None = None
    tiles: tuple[Any, ...] = ()

    @property
    def interpret(self) -> bool:
        return jax.default_backend() != "gpu"


def update_work(load: Load, effort: Effort, op: Op = Op(), s: bool = False) -> Work:  # noqa: B008
    """Shrink and expand of all four groups; with `s`, the expand scales h as well."""
    state, stack = _update_arrays(load, _count(load.factor_bytes(), effort), s)
    nbytes = load.factor_bytes() + load.h_bytes() + load.x_bytes() + _scale_bytes(load, s)
    tiles = load.segments().tiles

    def one(h, x, parts, scale):
        none = (None,) * len(parts)
        if not op.tiles:
            return segmented_update(h, x, parts, scale, none, tiles, implementation=op.how)
        shrink, expand = op.tiles
        low = segmented_shrink(x, parts, tiles, shrink, interpret=op.interpret)
        return segmented_expand(h, low, parts, scale, none, tiles, expand, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        return xs, {name: one(hs[name], xs[name], *layer[name]) for name in hs}

    return _looped(whole, state, stack, nbytes, effort)


def expand_work(load: Load, effort: Effort, s: bool = False) -> Work:
    """The expand alone, by its twin. Its bytes: h read and written, B, and x A in float32."""
    (xs, hs), stack = _update_arrays(load, _count(load.factor_bytes(), effort), s)
    tiles, interpret = load.segments().tiles, Op().interpret
    outs = [d_out for _, d_out in load.layer.sites]
    own = 2 * sum(load.ranks) * sum(outs) + 4 * load.rows * max(load.ranks) * len(outs)

    @jax.jit
    def lows(xs, layer):
        return {
            name: segmented_shrink(x, layer[name][0], tiles, interpret=interpret)
            for name, x in xs.items()
        }

    def one(h, low, parts, scale):
        none = (None,) * len(parts)
        return segmented_expand(h, low, parts, scale, none, tiles, interpret=interpret)

    def whole(state, layer):
        low, hs = state
        return low, {name: one(hs[name], low[name], *layer[name]) for name in hs}

    nbytes = load.h_bytes() + own + _scale_bytes(load, s)
    return _looped(whole, (lows(xs, stack[0]), hs), stack, nbytes, effort)


def riding_work(
    load: Load,
    effort: Effort,
    op: Op = Op(),  # noqa: B008
    groups: Sequence[str] = (),
    adapters: bool = True,
    xla: bool = False,
) -> Work:
    """The base products of some groups (all, if none is named) with the adapters that ride on them,
    or alone: in the same launches or, with `xla`, as XLA makes them. Its bytes are those of the
    weights and the factors."""
    names, tiles = list(groups) or list(load.layer.groups), load.segments().tiles
    (xs, _), stack = _update_arrays(load, 2, False)
    weights = _weights(load.layer, 2)
    widths = [(d_in, d) for n in names for d_in, outs in [load.layer.groups[n]] for d in outs]
    nbytes = 2 * sum(
        d_in * d_out + adapters * sum(load.ranks) * (d_in + d_out) for d_in, d_out in widths
    )

    def one(x, Ws, parts, counts):
        none, same = (None,) * len(Ws), (x,) * len(Ws)
        if xla:
            return tuple(einsum("ti,io->to", x, W) for W in Ws)
        parts = tuple(at_tiles(p, tiles.slot) for p in parts) if adapters else none
        args = (same, x, Ws, parts, none, none, tiles, counts)
        if not op.tiles:
            return segmented_linear(*args, implementation=op.how)
        return linear_twin(*args, *op.tiles, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        ((key, groups),) = layer.items()
        counts = zero_counts(len(groups))  # in one launch, as in serving
        made = {
            name: one(xs[name], *own, count)
            for (name, own), count in zip(groups.items(), counts, strict=True)
        }
        return xs, hs | {key: made}

    # Each layer has results of its own: what the next one overwrote unread would not be computed.
    layers = [
        {str(i): {name: (Ws[name], own[name][0]) for name in names}}
        for i, (Ws, own) in enumerate(zip(weights, stack, strict=False))
    ]
    hs: dict = {}
    for layer in layers:
        hs |= jax.eval_shape(whole, (xs, {}), layer)[1]
    hs = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), hs)
    return _looped(whole, (xs, hs), layers, nbytes, effort)


def rotate_work(load: Load, block: int, effort: Effort, op: Op = Op()) -> Work:  # noqa: B008
    """The input transform of every projection, each with rows and rotations of its own."""
    widths = sum(d_in for d_in, _ in load.layer.sites)
    own, seg = 2 * load.adapters * block * widths, load.segments()
    state, stack = _rotate_arrays(load, block, _count(own, effort))

    def one(xs, R):
        if not op.tiles:
            return block_rotate(xs, R, seg.tiles, seg.slot, implementation=op.how)
        return rotate_twin(xs, R, seg.tiles, seg.slot, *op.tiles, interpret=op.interpret)

    def whole(xs, layer):
        return {name: one(xs[name], R) for name, R in layer.items()}

    return _looped(whole, state, stack, own + 4 * load.rows * widths, effort)


def shared_work(load: Load, effort: Effort, op: Op = Op()) -> Work:  # noqa: B008
    """Terms on one pair of factors at every projection; the adapters are its tenants."""
    sites, rank = load.layer.sites, load.ranks[0]
    pair = 2 * rank * sum(map(sum, sites))
    vectors = 2 * load.adapters * sum(rank + d_out for _, d_out in sites)
    nbytes = pair + vectors + load.h_bytes() + load.x_bytes()
    state, stack = _shared_arrays(load, _count(pair, effort))
    slot = load.segments().slot

    def one(h, x, shared):
        if not op.tiles:
            return shared_factors(h, x, shared, slot, implementation=op.how)
        return shared_twin(h, x, shared, slot, *op.tiles, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        return xs, {name: one(hs[name], xs[name], layer[name]) for name in hs}

    return _looped(whole, state, stack, nbytes, effort)


def sparse_work(load: Load, effort: Effort, op: Op = Op()) -> Work:  # noqa: B008
    """A sparse matrix of each adapter at every projection, with the numbers of a LoRA's factors."""
    (xs, hs), stack = _sparse_arrays(load, _count(3 * load.factor_bytes(), effort))
    tiles = load.segments().tiles
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(stack[0]))
    x_bytes = 2 * load.rows * sum(d_in for d_in, _ in load.layer.sites)

    def one(h, x, pool):
        if not op.tiles:
            return sparse_update(h, x, pool, tiles, implementation=op.how)
        return sparse_twin(h, x, pool, tiles, *op.tiles, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        return xs, [one(h, x, pool) for h, x, pool in zip(hs, xs, layer, strict=True)]

    return _looped(whole, (xs, hs), stack, own + x_bytes + load.h_bytes(), effort)


def _count(nbytes: int, effort: Effort) -> int:
    """How many layers hold `distinct` bytes together; two at least."""
    return max(2, min(effort.layers, -(-effort.distinct // nbytes)))


def _looped(whole: Callable, state: Any, stack: Sequence, nbytes: int, effort: Effort) -> Work:
    guess_us = 20 + 2 * nbytes / 4e6  # of a layer; only the length of the loop hangs on it
    loops = max(1, round(effort.call_us / (len(stack) * guess_us)))

    @jax.jit
    def step(state, stack):
        def body(_, state):
            for layer in stack:
                state = jax.lax.optimization_barrier(whole(state, layer))
            return state

        return jax.lax.fori_loop(0, loops, body, state)

    return Work(step, (state, stack), loops * len(stack), nbytes)


def _scale_bytes(load: Load, s: bool) -> int:
    return 2 * s * load.adapters * sum(d_out for _, d_out in load.layer.sites)


# Works of one load share their arrays: of a search, the candidates; of a comparison, both sides.


@lru_cache(maxsize=2)
def _update_arrays(load: Load, count: int, s: bool) -> tuple[tuple, list]:
    """x and h of each group; for each layer and group, factors and scales (or None), at tiles."""
    groups = load.layer.groups
    keys = iter(jax.random.split(jax.random.key(0), 16 * (count + 1)))
    slot = load.segments().tiles.slot

    def group(d_in: int, outs: Sequence[int]) -> tuple[tuple, tuple]:
        parts = tuple(pools.factors(next(keys), load.ranks, d_in, d) for d in outs)
        scale = tuple(pools.vectors(next(keys), load.adapters, d) if s else None for d in outs)
        return tuple(at_tiles(p, slot) for p in parts), tuple(at_tiles(v, slot) for v in scale)

    state = _rows_of_groups(keys, load)
    return state, [{name: group(*widths) for name, widths in groups.items()} for _ in range(count)]


@lru_cache(maxsize=1)
def _weights(layer: Layer, count: int) -> list[dict[str, tuple[Array, ...]]]:
    """Frozen weights of each group of several layers."""
    keys = iter(jax.random.split(jax.random.key(1), 16 * count))

    def own(d_in: int, outs: Sequence[int]) -> tuple[Array, ...]:
        return tuple(pools.activations(next(keys), d_in, [d])[0] for d in outs)

    return [{name: own(*widths) for name, widths in layer.groups.items()} for _ in range(count)]


def _rows_of_groups(keys: Iterator[Array], load: Load) -> tuple[dict, dict]:
    """x of each group, and h of each of its projections."""
    groups = load.layer.groups
    xs = pools.activations(next(keys), load.rows, [d_in for d_in, _ in groups.values()])
    hs = {
        name: tuple(pools.activations(next(keys), load.rows, outs))
        for name, (_, outs) in groups.items()
    }
    return dict(zip(groups, xs, strict=True)), hs


@lru_cache(maxsize=1)
def _rotate_arrays(load: Load, block: int, count: int) -> tuple[dict, list]:
    groups = load.layer.groups.items()
    keys = iter(jax.random.split(jax.random.key(0), 16 * (count + 1)))

    def xs(d_in: int, outs: Sequence[int]) -> tuple[Array, ...]:
        return tuple(pools.activations(next(keys), load.rows, [d_in] * len(outs)))

    def group(d_in: int, outs: Sequence[int]) -> tuple:
        return tuple(pools.rotation(next(keys), load.adapters, d_in, block) for _ in outs)

    state = {name: xs(*widths) for name, widths in groups}
    return state, [{name: group(*widths) for name, widths in groups} for _ in range(count)]


@lru_cache(maxsize=2)
def _shared_arrays(load: Load, count: int) -> tuple[tuple, list]:
    groups, rank = load.layer.groups, load.ranks[0]
    keys = iter(jax.random.split(jax.random.key(0), 16 * (count + 1)))

    def group(d_in: int, outs: Sequence[int]) -> tuple:
        return tuple(pools.shared(next(keys), load.adapters, rank, d_in, d) for d in outs)

    state = _rows_of_groups(keys, load)
    return state, [{name: group(*widths) for name, widths in groups.items()} for _ in range(count)]


@lru_cache(maxsize=1)
def _sparse_arrays(load: Load, count: int) -> tuple[tuple, list]:
    sites, rank = load.layer.sites, load.ranks[0]
    keys = iter(jax.random.split(jax.random.key(0), len(sites) * (count + 1)))
    state = tuple(
        pools.activations(next(keys), load.rows, widths) for widths in zip(*sites, strict=True)
    )
    stack = [
        [pools.sparse(next(keys), load.adapters, rank, *site) for site in sites]
        for _ in range(count)
    ]
    return state, stack

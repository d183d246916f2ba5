"""One op over several layers, in a loop inside one jit: what the benchmarks time.

The layers have pools of their own, so that no cache holds them from one use to the next. All
activations are carried through the loop, so that nothing is hoisted out of it or left away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from scute_jax.bench import layer as pools
from scute_jax.bench.layer import Load
from scute_jax.kernels import Implementation, block_rotate, segmented_update, shared_factors
from scute_jax.kernels.block_rotate.pallas_triton import block_rotate as rotate_twin
from scute_jax.kernels.segmented_expand.pallas_triton import segmented_expand
from scute_jax.kernels.segmented_shrink.pallas_triton import segmented_shrink
from scute_jax.kernels.shared_factors.pallas_triton import shared_factors as shared_twin

MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much is run: bytes of different pools, layers at most, and microseconds of one call."""

    distinct: int = 256 * MIB
    layers: int = 8
    call_us: float = 10_000.0
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
    nbytes = load.factor_bytes() + load.h_bytes() + load.x_bytes()
    groups, stack = load.layer.groups, _factors(load, _count(load.factor_bytes(), effort), s)
    tiles = load.segments().tiles

    def one(h, x, layer):
        parts, scale = layer
        none = (None,) * len(parts)
        if not op.tiles:
            return segmented_update(h, x, parts, scale, none, tiles, implementation=op.how)
        shrink, expand = op.tiles
        low = segmented_shrink(x, parts, tiles, shrink, interpret=op.interpret)
        return segmented_expand(h, low, parts, scale, none, tiles, expand, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        return xs, {name: one(hs[name], xs[name], layer[name]) for name in groups}

    state = _inputs(load), _outputs(load)
    return _looped(whole, state, stack, nbytes + _scale_bytes(load, s), effort)


def expand_work(load: Load, effort: Effort, s: bool = False) -> Work:
    """The expand alone, by its twin. Its bytes: h read and written, B, and x A in float32."""
    stack = _factors(load, _count(load.factor_bytes(), effort), s)
    tiles, interpret = load.segments().tiles, Op().interpret
    outs = sum(d_out for _, d_out in load.layer.sites)
    low_bytes = 4 * load.rows * max(load.ranks) * len(load.layer.sites)
    nbytes = load.h_bytes() + 2 * sum(load.ranks) * outs + low_bytes

    @jax.jit
    def lows(xs, layer):
        return {
            name: segmented_shrink(x, layer[name][0], tiles, interpret=interpret)
            for name, x in xs.items()
        }

    def one(h, low, layer):
        parts, scale = layer
        none = (None,) * len(parts)
        return segmented_expand(h, low, parts, scale, none, tiles, interpret=interpret)

    def whole(state, layer):
        low, hs = state
        return low, {name: one(hs[name], low[name], layer[name]) for name in hs}

    state = lows(_inputs(load), stack[0]), _outputs(load)
    return _looped(whole, state, stack, nbytes + _scale_bytes(load, s), effort)


def rotate_work(load: Load, block: int, effort: Effort, op: Op = Op()) -> Work:  # noqa: B008
    """The input transform of every projection, each with rows and rotations of its own."""
    widths = [d_in for d_in, _ in load.layer.sites]
    own = 2 * load.adapters * block * sum(widths)
    seg = load.segments()
    keys = iter(jax.random.split(jax.random.key(0), 8 * len(widths)))
    stack = [
        [pools.rotation(next(keys), load.adapters, d, block) for d in widths]
        for _ in range(_count(own, effort))
    ]

    def one(x, R):
        if not op.tiles:
            return block_rotate(x, R, seg.tiles, seg.slot, implementation=op.how)
        return rotate_twin(x, R, seg.tiles, seg.slot, *op.tiles, interpret=op.interpret)

    def whole(xs, layer):
        return [one(x, R) for x, R in zip(xs, layer, strict=True)]

    state = pools.activations(jax.random.key(1), load.rows, widths)
    return _looped(whole, state, stack, own + 4 * load.rows * sum(widths), effort)


def shared_work(load: Load, effort: Effort, op: Op = Op()) -> Work:  # noqa: B008
    """Terms on one pair of factors at every projection; the adapters are its tenants."""
    sites, rank = load.layer.sites, load.ranks[0]
    pair = 2 * rank * sum(map(sum, sites))
    vectors = 2 * load.adapters * sum(rank + d_out for _, d_out in sites)
    nbytes = pair + vectors + load.h_bytes() + 2 * load.rows * sum(d_in for d_in, _ in sites)
    slot = load.segments().slot
    keys = iter(jax.random.split(jax.random.key(0), 8 * len(sites)))
    stack = [
        [pools.shared(next(keys), load.adapters, rank, *site) for site in sites]
        for _ in range(_count(pair, effort))
    ]

    def one(h, x, shared):
        if not op.tiles:
            return shared_factors(h, x, shared, slot, implementation=op.how)
        return shared_twin(h, x, shared, slot, *op.tiles, interpret=op.interpret)

    def whole(state, layer):
        xs, hs = state
        return xs, [one(h, x, pool) for h, x, pool in zip(hs, xs, layer, strict=True)]

    widths = zip(*sites, strict=True)
    keys = jax.random.split(jax.random.key(1))
    state = tuple(pools.activations(k, load.rows, d) for k, d in zip(keys, widths, strict=True))
    return _looped(whole, state, stack, nbytes, effort)


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


def _factors(load: Load, count: int, s: bool) -> list[dict[str, tuple[tuple, tuple]]]:
    """For each layer and group, factors and (or None) scales of its projections."""
    keys = iter(jax.random.split(jax.random.key(0), 16 * count))

    def group(d_in: int, outs: Sequence[int]) -> tuple[tuple, tuple]:
        parts = tuple(pools.factors(next(keys), load.ranks, d_in, d) for d in outs)
        scale = tuple(pools.vectors(next(keys), load.adapters, d) if s else None for d in outs)
        return parts, scale

    groups = load.layer.groups
    return [{name: group(*widths) for name, widths in groups.items()} for _ in range(count)]


def _scale_bytes(load: Load, s: bool) -> int:
    return 2 * s * load.adapters * sum(d_out for _, d_out in load.layer.sites)


def _inputs(load: Load) -> dict[str, Array]:
    widths = [d_in for d_in, _ in load.layer.groups.values()]
    found = pools.activations(jax.random.key(1), load.rows, widths)
    return dict(zip(load.layer.groups, found, strict=True))


def _outputs(load: Load) -> dict[str, tuple[Array, ...]]:
    keys = jax.random.split(jax.random.key(2), len(load.layer.groups))
    return {
        name: tuple(pools.activations(key, load.rows, outs))
        for key, (name, (_, outs)) in zip(keys, load.layer.groups.items(), strict=True)
    }

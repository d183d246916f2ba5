"""Every Pallas kernel once, compiled, on small odd shapes: a pass for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m benchmarks.kernels.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m benchmarks.kernels.sanitize

Each array is an allocation of its own (no pool of XLA's), so that a read past its end is seen. The
numbers are compared with the reference; exit code 1 if they differ. It also runs by itself, and
where there is no GPU interpreted.
"""

import argparse
import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"

from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from scute_jax.bench import layer as pools  # noqa: E402
from scute_jax.kernels import (  # noqa: E402
    Shared,
    SparseEntries,
    Vectors,
    block_rotate,
    paged_attention,
    residual_norm,
    rope_attention,
    scale_input,
    segmented_linear,
    segmented_update,
    shared_factors,
    sparse_update,
)
from scute_jax.kernels.precision import einsum  # noqa: E402
from scute_jax.kernels.segmented_linear.api import MOST_ROWS  # noqa: E402
from scute_jax.segments import segments  # noqa: E402

RANKS = (3, 33, 1, 17, 70)
SHAPES = {  # d_in, widths of the slices, rows, rows of a tile, dtype
    "one row": (24, (10,), 1, 16, "float32"),
    "narrow": (24, (10, 6), 45, 16, "float32"),
    "SmolLM2": (576, (576, 192, 192), 70, 16, "bfloat16"),
    "half": (96, (130,), 70, 32, "float16"),
    "long tiles": (40, (48, 33), 200, 64, "bfloat16"),
}
DEEP = {  # of a base product with what rides on it: x A and low B in parts; low B in the midst
    "deep": (1200, (40,), 60, 4, "bfloat16"),
    "many columns": (200, (20_000,), 20, 16, "bfloat16"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-6, "float16": 2**-8}  # of the largest number


def cases() -> Iterator[tuple[str, Callable]]:
    """A name and a call that takes the implementation."""
    for name, (d_in, outs, rows, size, dtype) in SHAPES.items():
        keys = iter(jax.random.split(jax.random.key(0), 32))
        ids = np.sort(np.random.default_rng(0).integers(-1, len(RANKS), rows))
        seg = segments(ids, len(RANKS), presorted=True, tile=size)
        (x,) = pools.activations(next(keys), rows, [d_in], dtype)
        h = tuple(pools.activations(next(keys), rows, outs, dtype))
        parts = tuple(pools.factors(next(keys), RANKS, d_in, d, dtype) for d in outs)
        scale = tuple(_some(pools.vectors(next(keys), len(RANKS), d, dtype)) for d in outs)
        none = (None,) * len(outs)
        yield f"low rank, {name}", partial(segmented_update, h, x, parts, none, none, seg.tiles)
        yield f"all slots, {name}", partial(segmented_update, h, x, parts, scale, scale, seg.tiles)
        yield f"vectors, {name}", partial(segmented_update, h, x, none, scale, none, seg.tiles)
        Ws = tuple(pools.activations(next(keys), d_in, [d], dtype)[0] for d in outs)
        base = tuple(einsum("ti,io->to", x, W).astype(dtype) for W in Ws)
        few = ((none, ""), (scale, " with s and b")) if rows <= 2 * MOST_ROWS else ()
        for vectors, what in few:
            call = partial(_riding, base, x, Ws, parts, vectors, seg.tiles)
            yield f"low rank{what} on the base product, {name}", call
        vector = _some(pools.vectors(next(keys), len(RANKS), d_in, dtype))
        yield (
            f"scale input, {name}",
            partial(scale_input, (x,) * 2, (vector,) * 2, seg.tiles, seg.slot),
        )
        for block in (b for b in (2, 8, 24) if d_in % b == 0):
            R = _strong(pools.rotation(next(keys), len(RANKS), d_in, block, dtype))
            R = R.replace(row=jnp.where(R.row == 1, -1, R.row))
            call = partial(block_rotate, (x,) * 2, (R,) * 2, seg.tiles, seg.slot)
            yield f"rotate {block}, {name}", call
            ordered = R.replace(order=jax.random.permutation(next(keys), d_in).astype(jnp.int32))
            call = partial(block_rotate, (x,), (ordered,), seg.tiles, seg.slot)
            yield f"rotate {block} in an order, {name}", call
        shared = _tenants(next(keys), d_in, outs[0], dtype)
        yield f"shared, {name}", partial(shared_factors, (h[0],) * 2, x, (shared,) * 2, seg.slot)
        sparse = _sparse(d_in, outs[0], dtype)
        yield f"sparse, {name}", partial(sparse_update, h[0], x, sparse, seg.tiles)
    for name, (d_in, outs, rows, size, dtype) in DEEP.items():
        keys = iter(jax.random.split(jax.random.key(0), 8))
        ids = np.sort(np.random.default_rng(0).integers(-1, len(RANKS), rows))
        tiles = segments(ids, len(RANKS), presorted=True, tile=size).tiles
        (x,) = pools.activations(next(keys), rows, [d_in], dtype)
        parts = tuple(pools.factors(next(keys), RANKS, d_in, d, dtype) for d in outs)
        Ws = tuple(pools.activations(next(keys), d_in, [d], dtype)[0] for d in outs)
        base = tuple(einsum("ti,io->to", x, W).astype(dtype) for W in Ws)
        none = (None,) * len(outs)
        yield (
            f"low rank on the base product, {name}",
            partial(_riding, base, x, Ws, parts, none, tiles),
        )
    for size, dtype in ((1, "bfloat16"), (32, "float32"), (64, "bfloat16")):
        yield f"attention, blocks of {size}, {dtype}", _attention(size, dtype)
        yield f"rope and attention, blocks of {size}, {dtype}", _rope_attention(size, dtype)
    for d, parts, dtype in ((576, 1, "bfloat16"), (40, 8, "float16")):
        yield f"residual norm, {parts} parts, {dtype}", _residual_norm(d, parts, dtype)


def _riding(base, x, Ws, factors, vectors, tiles, implementation):
    """Besides base, the arguments of `segmented_linear`; of its result the sum of the parts."""
    xs = (x,) * len(Ws)
    parts = segmented_linear(
        xs, x, Ws, factors, vectors, vectors, tiles, implementation=implementation
    )
    return tuple(jnp.sum(own, axis=0).astype(x.dtype) for own in parts)


def _some(vectors: Vectors) -> Vectors:
    """The vectors of all adapters but the second, which has none."""
    return _strong(vectors).replace(row=jnp.where(vectors.row == 1, -1, vectors.row))


def _strong(pool: Any) -> Any:
    """The pool with values that show in half precision: those to be timed are near zero."""
    return pool.replace(values=pool.values * jnp.asarray(250, pool.values.dtype))


def _tenants(key: jax.Array, d_in: int, d_out: int, dtype: str) -> Shared:
    """Two pairs; tenants of each, of both, and of none. With a u in half precision."""
    shared = pools.shared(key, 5, 20, d_in, d_out, dtype)
    u = _strong(pools.vectors(key, 5, d_in, dtype)).values
    return shared.replace(
        pairs=pools.factors(key, (20, 5), d_in, d_out, dtype),
        u=None if dtype == "float32" else u,
        e=shared.e * jnp.asarray(20, dtype),
        row=jnp.asarray([[0, -1], [-1, -1], [2, 3], [1, -1], [4, -1]], jnp.int32),
        pair=jnp.asarray([[0, 0], [0, 0], [0, 1], [1, 0], [0, 0]], jnp.int32),
        d=(shared.d * jnp.asarray(20, dtype)).at[jnp.asarray([1, 3]), 5:].set(0),
    )


def _sparse(d_in: int, d_out: int, dtype: str) -> SparseEntries:
    """Three matrices, two of them full to the last place; the last column has no entry."""
    rng, z = np.random.default_rng(0), 9 * d_out
    columns = np.sort(rng.integers(0, d_out - 1, (3, z)))
    starts = [np.searchsorted(own, np.arange(d_out + 1)) for own in columns]
    starts[1] = np.minimum(starts[1], z // 2)
    return SparseEntries(
        starts=jnp.asarray(np.stack(starts), jnp.int32),
        rows=jnp.asarray(rng.integers(0, d_in, (3, z)), jnp.int32),
        values=jnp.asarray(rng.normal(size=(3, z)), dtype),
        row=jnp.asarray([2, -1, 0, -1, 1], jnp.int32),
    )


def _attention(size: int, dtype: str) -> Callable:
    rng, n, hq, hkv, dh, page, width = np.random.default_rng(0), 3, 9, 3, 20, 16, 8
    start = rng.integers(0, width * page - size, n)
    numbers = (start, np.full(n, size))
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((n, size, hq, dh), *[(n * width, hkv, page, dh)] * 2)
    )
    table = rng.permutation(n * width).reshape(n, width)
    return partial(paged_attention, q, k, v, *(jnp.asarray(a, "int32") for a in (table, *numbers)))


def _rope_attention(size: int, dtype: str) -> Callable:
    """All blocks are full: what is attended by others is not defined."""
    rng, n, hq, hkv, dh, page, width = np.random.default_rng(0), 3, 9, 3, 20, 16, 8
    start = rng.integers(0, width * page - size, n)
    t, pages = n * size, (n * width, hkv, page, dh)
    heads = tuple(
        jnp.asarray(rng.normal(size=(parts, t, h, dh)), "float32")
        for parts, h in ((2, hq), (1, hkv), (1, hkv))
    )
    k, v = (jnp.asarray(rng.normal(size=pages), dtype) for _ in range(2))
    angle = jnp.asarray(rng.normal(size=(t, dh // 2)), "float32")
    where = rng.permutation(n * width).reshape(n, width), start, np.full(n, size)
    rest = jnp.cos(angle), jnp.sin(angle), *(jnp.asarray(a, "int32") for a in where)

    def call(before, implementation):
        return rope_attention(heads, *before[1:], *rest, implementation=implementation)

    return partial(call, (jnp.sum(heads[0], axis=0).astype(dtype), k, v))


def _residual_norm(d: int, parts: int, dtype: str) -> Callable:
    x, *added = pools.activations(jax.random.key(0), 5, [d] * (1 + parts), "float32")
    weight = jnp.full((d,), 2, dtype)

    def call(before, implementation):
        args = before.astype(jnp.float32), jnp.stack(added), weight, 1e-5, weight.dtype
        return residual_norm(*args, implementation=implementation)[1]

    return partial(call, x.astype(dtype))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="cases whose names have one of these in them")
    args = parser.parse_args()
    print(f"on {jax.devices()[0].device_kind}", flush=True)
    worst, names = 0.0, []
    for name, call in cases():
        if args.only and not any(part in name for part in args.only):
            continue
        ours, expected = (
            [np.asarray(a, np.float32) for a in jax.tree.leaves(call(implementation=how))]
            for how in ("pallas", "reference")
        )
        before = jax.tree.leaves(call.args[0])
        dtype, effect = str(before[0].dtype), _most(before, expected)
        error = _most(ours, expected) / max(np.abs(b).max() for b in expected)
        worst = max(worst, error / TOLERANCE[dtype])
        if not (error <= TOLERANCE[dtype] and effect > 0.1):
            names.append(name)
        print(f"{name}: moves by {effect:.1f}, off by {error:.1e}", flush=True)
    print(f"largest error {worst:.2f} of what is allowed; wrong: {', '.join(names) or 'none'}")
    return int(bool(names))


def _most(first: Sequence, second: Sequence) -> float:
    pairs = zip(first, second, strict=True)
    return max(np.abs(np.asarray(a, np.float32) - b).max() for a, b in pairs)


if __name__ == "__main__":
    raise SystemExit(main())

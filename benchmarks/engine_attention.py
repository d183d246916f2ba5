"""Attention of a decode step at the shapes of Llama-3.1-8B with other tiles, on one GPU.

    python -m benchmarks.engine_attention [--rows 64 --keys 256] [--block 64]

Each of a few layers has a cache of its own, past what the GPU's cache holds, and pages in no order.
Microseconds are those of the kernel by the profiler; the bandwidth is that of keys and values. With
`--block`, blocks of so many queries at the end of their prompts: prefill.
"""

import argparse
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from scute_jax.bench.timing import kernel_us
from scute_jax.kernels.paged_attention.pallas_triton import AttentionTile, paged_attention

HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 32, 8, 128, 16, 4
KEYS, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (1, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="rows, or blocks of queries")
    parser.add_argument("--keys", type=int, default=256, help="that each row looks at")
    parser.add_argument("--block", type=int, default=1, help="queries of a block")
    args = parser.parse_args()
    q, caches, where = inputs(args.rows, args.keys, args.block)
    moved = 2 * args.rows * args.keys * KV_HEADS * WIDTH * 2
    expected, default = None, AttentionTile()
    tiles = [
        AttentionTile(keys=k, num_warps=w, num_stages=s) for k, w, s in product(KEYS, WARPS, STAGES)
    ]
    for tile in [default, *(tile for tile in tiles if tile != default)]:
        step = jax.jit(partial(layers, tile=tile))
        try:
            out = np.asarray(step(q, caches, where), np.float32)
            expected = out if expected is None else expected
            assert np.abs(out - expected).max() <= 2**-6 * np.abs(expected).max(), tile
            times = kernel_us(step, q, caches, where)
        except Exception as error:  # a tile may need more of the GPU than it has
            print(f"{tile}: {type(error).__name__}", flush=True)
            continue
        us = sum(us for name, (_, us) in times.items() if "paged_attention" in name) / LAYERS
        print(f"{tile}: {us:.1f} us, {moved / (us or np.inf) / 1e6:.2f} TB/s", flush=True)


def layers(q, caches, where, *, tile):
    """Layer after layer; each one's queries wait for the result of the last."""
    interpret = jax.default_backend() != "gpu"
    for k, v in caches:
        q = paged_attention(q, k, v, *where, tile=tile, interpret=interpret)
    return q


def inputs(rows: int, keys: int, block: int):
    """Queries, the pages of each layer, and (table, start, rows)."""
    rng, width = np.random.default_rng(0), -(-keys // PAGE)
    table = rng.permutation(rows * width).reshape(rows, width)
    pages = (rows * width, KV_HEADS, PAGE, WIDTH)
    made = iter(jax.random.split(jax.random.key(0), 2 * LAYERS + 1))

    def normal(*shape):
        return jax.random.normal(next(made), shape, jnp.bfloat16)

    caches = [(normal(*pages), normal(*pages)) for _ in range(LAYERS)]
    numbers = (table, np.full(rows, keys - block), np.full(rows, block))
    where = tuple(jnp.asarray(a, jnp.int32) for a in numbers)
    return normal(rows, block, HEADS, WIDTH), caches, where


if __name__ == "__main__":
    main()

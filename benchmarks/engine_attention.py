"""Rope and attention of a decode step at the shapes of Llama-3.1-8B with other tiles, on one GPU.

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
from scute_jax.kernels.paged_attention.pallas_triton import AttentionTile
from scute_jax.kernels.rope_attention.pallas_triton import rope_attention

HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 32, 8, 128, 16, 4
KEYS, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (1, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64, help="rows, or blocks of queries")
    parser.add_argument("--keys", type=int, default=256, help="that each row looks at")
    parser.add_argument("--block", type=int, default=1, help="queries of a block")
    args = parser.parse_args()
    qkv, caches, where = inputs(args.rows, args.keys, args.block)
    moved = 2 * args.rows * args.keys * KV_HEADS * WIDTH * 2
    expected, default = None, AttentionTile()
    tiles = [
        AttentionTile(keys=k, num_warps=w, num_stages=s) for k, w, s in product(KEYS, WARPS, STAGES)
    ]
    for tile in [default, *(tile for tile in tiles if tile != default)]:
        run = Layers(qkv, jax.tree.map(jnp.copy, caches), where, tile)
        try:
            out = np.asarray(run(), np.float32)
            expected = out if expected is None else expected
            assert np.abs(out - expected).max() <= 2**-6 * np.abs(expected).max(), tile
            times = kernel_us(run)
        except Exception as error:  # a tile may need more of the GPU than it has
            print(f"{tile}: {type(error).__name__}", flush=True)
            continue
        us = sum(us for name, (_, us) in times.items() if "attention" in name) / LAYERS
        print(f"{tile}: {us:.1f} us, {moved / (us or np.inf) / 1e6:.2f} TB/s", flush=True)


class Layers:
    """Layer after layer, each with its pages, which are written in place."""

    def __init__(self, qkv, caches, where, tile: AttentionTile):
        self.qkv, self.caches, self.where = qkv, caches, where
        self.step = jax.jit(partial(layers, tile=tile), donate_argnums=0)

    def __call__(self):
        out, self.caches = self.step(self.caches, self.qkv, self.where)
        return out


def layers(caches, qkv, where, *, tile):
    out, after, interpret = 0, [], jax.default_backend() != "gpu"
    for pages in caches:
        attended, *pages = rope_attention(qkv, *pages, *where, tile=tile, interpret=interpret)
        out, after = out + attended, [*after, pages]
    return out, after


def inputs(rows: int, keys: int, block: int):
    """Queries, keys and values of the last tokens; the pages of each layer; and where they are."""
    rng, width = np.random.default_rng(0), -(-keys // PAGE)
    table = rng.permutation(rows * width).reshape(rows, width)
    made = iter(jax.random.split(jax.random.key(0), 2 * LAYERS + 1))
    pages = (rows * width, KV_HEADS, PAGE, WIDTH)
    caches = [
        [jax.random.normal(next(made), pages, jnp.bfloat16) for _ in range(2)]
        for _ in range(LAYERS)
    ]
    qkv = jax.random.normal(next(made), (1, rows * block, HEADS + 2 * KV_HEADS, WIDTH))
    wave = jnp.full((rows * block, WIDTH // 2), 0.5**0.5)
    numbers = (table, np.full(rows, keys - block), np.full(rows, block))
    where = (wave, wave, *(jnp.asarray(a, jnp.int32) for a in numbers))
    return (qkv,), caches, where


if __name__ == "__main__":
    main()

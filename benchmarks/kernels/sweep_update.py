"""Device times of shrink and expand over one layer for many tile configurations.

python -m benchmarks.kernels.sweep_update --rows 16,64 --rank 16 --out sweep.json
"""

import argparse
import itertools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.kernels.layer import GROUPS, Load, batch_tiles, layers
from benchmarks.kernels.timing import kernel_us
from scute_jax.calibrate import MIB, copy_bandwidth, median_us
from scute_jax.kernels.segmented_expand.pallas_triton import ExpandTile, segmented_expand
from scute_jax.kernels.segmented_shrink.pallas_triton import ShrinkTile, segmented_shrink

LAYERS, LOOPS = 8, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--tile", type=int, default=None)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"flags {os.environ.get('XLA_FLAGS', '')!r} jax {jax.__version__}", flush=True)
    bandwidth = copy_bandwidth(256 * MIB)
    results = [{"copy": bandwidth}]
    for rows in map(int, args.rows.split(",")):
        load = Load(rows, (args.rank,) * args.adapters)
        stack, tiles = layers(LAYERS, load), batch_tiles(load, args.tile)
        floor = (load.factor_bytes() + load.h_bytes() + load.x_bytes()) / bandwidth * 1e6
        print(
            f"rows {rows} rank {args.rank}: copy {bandwidth / 1e12:.2f} TB/s, bytes {floor:.1f} us"
        )
        grid = [(ShrinkTile(), ExpandTile())]
        if args.sweep:
            shrinks = itertools.product((512, 1024), (4, 8), (256, 512, 1024))
            grid += [(ShrinkTile(block_k=k, num_warps=w, programs=p), None) for k, w, p in shrinks]
            expands = itertools.product((128, 256, 512), (4, 8), (2,))
            grid += [
                (None, ExpandTile(block_n=n, num_warps=w, num_stages=s)) for n, w, s in expands
            ]
        for shrink, expand in grid:
            results.append(one(load, stack, tiles, shrink or ShrinkTile(), expand or ExpandTile()))
    if args.out:
        args.out.write_text(json.dumps(results))


def one(load, stack, tiles, shrink, expand):
    """Wall time per layer inside a loop, and the device time of each kernel of a layer."""
    xs = {n: jnp.ones((load.rows, d), jnp.bfloat16) * 0.5 for n, (d, _) in GROUPS.items()}
    hs = {
        n: tuple(jnp.ones((load.rows, d), jnp.bfloat16) * 0.5 for d in outs)
        for n, (_, outs) in GROUPS.items()
    }

    @jax.jit
    def run(stack, xs, hs):
        def body(_, carry):
            xs, hs = carry
            for layer in stack:
                for name, parts in layer.items():
                    none = (None,) * len(parts)
                    low = segmented_shrink(xs[name], parts, tiles, shrink)
                    hs[name] = segmented_expand(hs[name], low, parts, none, none, tiles, expand)
                xs, hs = jax.lax.optimization_barrier((xs, hs))
            return xs, hs

        return jax.lax.fori_loop(0, LOOPS, body, (xs, hs))

    record = {"rows": load.rows, "shrink": vars(shrink), "expand": vars(expand)}
    try:
        wall, _ = median_us(run, stack, xs, hs, repeats=5, per_call=LAYERS * LOOPS)
        kernels = kernel_us(run, stack, xs, hs)
    except Exception as error:  # a configuration that does not compile is a result, too
        print(f"  {shrink} {expand} failed: {str(error)[:150]}", flush=True)
        return record | {"error": str(error)[:300]}
    named = {
        part: sum(c * us for n, (c, us) in kernels.items() if part in n) / (LAYERS * LOOPS)
        for part in ("shrink", "expand")
    }
    print(
        f"  wall {wall:6.2f} shrink {named['shrink']:6.2f} expand {named['expand']:6.2f} us a layer"
        f"  k{shrink.block_k} w{shrink.num_warps} p{shrink.programs}"
        f" | n{expand.block_n} w{expand.num_warps} s{expand.num_stages}",
        flush=True,
    )
    return record | {"wall": wall, **named, "kernels": kernels}


if __name__ == "__main__":
    main()

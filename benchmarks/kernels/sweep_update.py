"""Device times of shrink and expand over one layer for many tile configurations.

python -m benchmarks.kernels.sweep_update --rows 16,64 --rank 16 --out sweep.json
"""

import argparse
import itertools
import json
import os
from pathlib import Path

import jax

from scute_jax.bench.layer import Load
from scute_jax.bench.timing import time_work
from scute_jax.bench.work import Effort, Op, update_work
from scute_jax.calibrate import MIB, copy_bandwidth
from scute_jax.kernels.segmented_expand.pallas_triton import ExpandTile
from scute_jax.kernels.segmented_shrink.pallas_triton import ShrinkTile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"flags {os.environ.get('XLA_FLAGS', '')!r} jax {jax.__version__}", flush=True)
    bandwidth = copy_bandwidth(256 * MIB)
    results = [{"copy": bandwidth}]
    for rows in map(int, args.rows.split(",")):
        load = Load(rows, (args.rank,) * args.adapters)
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
            results.append(one(load, shrink or ShrinkTile(), expand or ExpandTile()))
    if args.out:
        args.out.write_text(json.dumps(results))


def one(load, shrink, expand):
    """Wall time per layer inside a loop, and the device time of each kernel of a layer."""
    record = {"rows": load.rows, "shrink": vars(shrink), "expand": vars(expand)}
    try:
        times = time_work(update_work(load, Effort(), Op(tiles=(shrink, expand))), repeats=5)
    except Exception as error:  # a configuration that does not compile is a result, too
        print(f"  {shrink} {expand} failed: {str(error)[:150]}", flush=True)
        return record | {"error": str(error)[:300]}
    kernels = " ".join(f"{name} {us:.2f}" for name, us in times.kernels.items())
    print(f"  wall {times.wall:6.2f} us a layer: {kernels} | {shrink} {expand}", flush=True)
    return record | {"wall": times.wall, "kernels": times.kernels}


if __name__ == "__main__":
    main()

"""The kernels that one layer of a step launches on an H200, compiled where there is no GPU.

    python -m benchmarks.step_kernels --pool base lora16 five [--kind prefill]

XLA compiles for a device that it is only told of; jax needs its CUDA plugin for that (jax-cuda12-
plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, of jax's own version), but no driver. No product
is tuned without a GPU: XLA may choose other GEMM kernels there, and cuBLAS. What it merges, copies
and leaves in place is the same. The pools are those of `engine_8b`, the shapes of Llama-3.1-8B.
"""

import argparse
import os
import re
from collections import Counter
from functools import cache

os.environ["JAX_PLATFORMS"] = "cpu"  # what is not compiled here runs there
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc

from benchmarks.engine_measures import POOLS
from benchmarks.llama_8b import adapter, config, random_params
from scute_jax.models.cache import KVCache
from scute_jax.peft.base import Base
from scute_jax.serving import EngineOptions
from scute_jax.serving.launch import decode_plan, prefill_plan
from scute_jax.serving.registry import Registry
from scute_jax.serving.residency import Residency
from scute_jax.serving.runner import programs
from scute_jax.serving.scheduler import DecodeWork, PrefillWork
from scute_jax.serving.steps import Rows

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  device_memory_size: 150000000000
}
runtime_version { major: 12 minor: 8 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H200"
"""
ROWS, PAGES = 64, 1536
STILL = {"get-tuple-element", "bitcast", "parameter", "tuple", "constant"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pool", nargs="+", choices=POOLS, default=["base", "lora16", "five"])
    parser.add_argument("--kind", choices=("decode", "prefill"), default="decode")
    args = parser.parse_args()
    jax.default_backend = lambda: "gpu"  # the kernels are those of a GPU
    for pool in args.pool:
        one, two = (launches(compiled(pool, args.kind, layers)) for layers in (1, 2))
        layer = two - one
        print(f"\n{pool}, {args.kind}: {layer.total()} kernels a layer, {one.total()} with one")
        for name, count in sorted(layer.items(), key=lambda item: (-item[1], item[0])):
            print(f"{count:4}  {name}", flush=True)


def compiled(pool: str, kind: str, layers: int) -> str:
    """The step of 64 rows or blocks, as XLA would run it."""
    shape = config(layers, tiny=False)
    adapters = [adapter(shape, m, i, rank) for m, rank, count in POOLS[pool] for i in range(count)]
    slots = max(1, len(adapters))
    residency, registry = Residency(Base.from_config(shape).widths, slots, jnp.bfloat16), Registry()
    for each in adapters:
        residency.expect(registry.add(each.version, each)[0])
    residency.prepare()
    options = EngineOptions(block=64, prefill_blocks=(ROWS,), decode_rows=(ROWS,), steps=16)
    prefills, decodes = programs()
    how = {"config": shape, "num_slots": slots, "sampled": False, "top": 0}
    if kind == "decode":
        step, plan = decodes, decode_plan(DecodeWork(ROWS, [], []), PAGES)
        how["steps"] = options.steps
    else:
        step, plan = prefills, prefill_plan(PrefillWork(), options.limits(), PAGES)
    args = (
        jax.eval_shape(lambda: random_params(shape)),
        residency.slots(residency.routes),
        jax.eval_shape(lambda: KVCache.create(shape, PAGES, options.page_size, jnp.bfloat16)),
        jax.eval_shape(lambda: Rows.create(ROWS)),
        plan,
    )
    place = on_h200()
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
    with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):  # kernels ask it for the device
        lowered = step.trace(*args, **how).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


@cache
def on_h200() -> jax.sharding.NamedSharding:
    topology = get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def launches(module: str) -> Counter[str]:
    """The instructions of the longest computation that runs one by one, by kind and shape."""
    runs = ["main", *re.findall(r"body=%([\w.\-]+)", module)]
    bodies = [
        match.group(1)
        for name in runs
        for match in re.finditer(rf"\n(?:ENTRY )?%{name}[\w.\-]* (.*?)\n}}", module, re.DOTALL)
    ]
    found: Counter[str] = Counter()
    for line in max(bodies, key=len).splitlines():
        match = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if match is None or match.group(3) in STILL:
            continue
        name = re.sub(r"[.\d]+$", "", match.group(1))
        if kernel := re.search(r"jit\((\w+)\)/(\w+)/pallas_call", line):
            name = kernel.group(2)
        shape = re.sub(r"\{[\d,]*\}|/\*.*?\*/", "", match.group(2))
        found[f"{name} -> {shape}"] += 1
    return found


if __name__ == "__main__":
    main()

"""What a tenant of each method costs: bytes, live slots, time per token predicted and measured.

    python -m benchmarks.method_costs --out benchmarks/method_costs.json

One decoder layer of Llama-3.1-8B in bfloat16, 16 tenants of one method with a row each, random
numbers in the shapes of `method_shapes.json`. Measured: the layer's projections and norms with the
adapters minus without them, both inside a loop of one jit. "pool" is a tenant of every method at
once, and "LoRA pool" as many of LoRA. Predicted: the byte model with this machine's constants,
measured in the same run; nothing is fitted. A token passes 32 such layers. `method_table.py` makes
a table of the results.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import scute_jax as sj
from benchmarks.command import command
from scute_jax.apply import SiteParams, apply_fused
from scute_jax.apply_norm import apply_norm
from scute_jax.bench.layer import LLAMA_8B
from scute_jax.byte_model import Cost, Machine, Place, byte_cost, fused
from scute_jax.calibrate import measure, median_us
from scute_jax.kernels.residual_norm import normalised
from scute_jax.models.params import NORM_SITES
from scute_jax.normal_form import Blocks, Kronecker, Sparse
from scute_jax.slots import SiteSlots, pack_site

TENANTS, LOOPS, LAYERS = 16, 40, 32
GROUPS, HIDDEN = LLAMA_8B.groups, LLAMA_8B.hidden
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=Path, default=Path("benchmarks/method_shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    shapes = json.loads(args.shapes.read_text())
    machine = measure()
    print(
        f"{machine.name}: copy {machine.bandwidth / 1e12:.2f} TB/s, cache "
        f"{machine.cache_bandwidth / 1e12:.2f} TB/s, launch {machine.launch * 1e6:.2f} us",
        flush=True,
    )
    methods = {n: s for n, s in shapes.items() if not args.only or n in args.only}
    methods = dict(sorted(methods.items(), key=lambda item: most_terms(item[1])))
    weights = base_weights(jax.random.key(0))
    about = {"command": command(), "machine": asdict(machine), "jax": jax.__version__}
    report = about | {"methods": []}
    alike: dict[str, list[str]] = {}  # methods whose forms have the same shapes cost the same
    for name, shape in methods.items():
        alike.setdefault(json.dumps(shape["sites"]), []).append(name)
    print(f"{len(methods)} methods of {len(alike)} shapes", flush=True)
    pools = [(names, [methods[names[0]]] * TENANTS) for names in alike.values()]
    if not args.only:
        pools += [(["LoRA pool"], [methods["LoRA"]] * len(methods))]
        pools += [(["pool"], list(methods.values()))]

    def measure_all(jobs, plain) -> None:
        print(f"{'method':12} {'bytes a tenant':>15} {'live':>8} {'predicted':>10} {'measured':>9}")
        report["methods"] = []
        base = {count: microseconds(run, weights, {}, count) for count, run in plain.items()}
        for (names, tenants), job in zip(pools, jobs, strict=True):
            report["methods"] += measured(names, tenants, methods, machine, base, weights, job)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n")

    with ThreadPoolExecutor(12) as threads:
        jobs = [threads.submit(prepare, weights, tenants) for _, tenants in pools]
        plain = {n: compiled(weights, {}, n) for n in {len(tenants) for _, tenants in pools}}
        print("us added to a layer, measured while others are compiled:", flush=True)
        measure_all(jobs, plain)
    print("us added to a layer, with nothing beside it:", flush=True)
    measure_all(jobs, plain)


def measured(names, tenants, methods, machine, plain, weights, job) -> list[dict]:
    """The rows of methods that have the same shapes, printed as soon as they are compiled."""
    cost, slots, run = job.result()
    base = plain[len(tenants)]
    added = microseconds(run, weights, slots, len(tenants)) - base
    predicted = cost.seconds(machine) * 1e6
    rows = []
    for name in names:
        shape = methods.get(name, {"bytes": 0, "elsewhere": 0, "live": []})
        size = LAYERS * shape["bytes"] + shape["elsewhere"]
        row = {"method": name, "tenants": len(tenants), "live": shape["live"]}
        row |= {"bytes_per_tenant": size, "base_us": base}
        rows.append(row | {"predicted_us": predicted, "measured_us": added})
        print(
            f"{name:12} {size:15,} {','.join(shape['live']) or '-':>8} "
            f"{predicted:10.1f} {added:9.1f}",
            flush=True,
        )
    return rows


def most_terms(shape: dict) -> int:
    """What takes longest to compile comes last."""
    return max(len(site["terms"]) for site in shape["sites"].values())


def base_weights(key: jax.Array) -> dict[str, Any]:
    """The projections of the layer, random, and its norms."""
    keys = iter(jax.random.split(key, 7))
    norms = {site: jnp.ones((HIDDEN,), jnp.bfloat16) for site in NORM_SITES}
    return norms | {
        group: tuple(
            jax.random.normal(next(keys), (d_in, d_out), jnp.bfloat16) / d_in**0.5 for d_out in outs
        )
        for group, (d_in, outs) in GROUPS.items()
    }


def prepare(weights, tenants: list[dict]):
    """The predicted cost of a layer, the pools of its sites, and the compiled loop."""
    cost, slots = pools_of(tenants)
    return cost, slots, compiled(weights, slots, len(tenants))


def predicted_us(tenants: list[dict], machine: Machine) -> float:
    """What the byte model says of a layer, without making a number of the tenants."""
    costs: list[Cost] = []
    jax.eval_shape(lambda: costs.append(pools_of(tenants)[0]))
    return costs[0].seconds(machine) * 1e6


def pools_of(tenants: list[dict]) -> tuple[Cost, dict[str, SiteSlots]]:
    """The predicted cost of a layer, and the pools of its sites."""
    key, slots, costs = jax.random.key(1), {}, []

    def site_cost(site: str, d_in: int, d_out: int, place: Place = "projection"):
        found = [tenant["sites"].get(f"layers.0.{site}") for tenant in tenants]
        keys = jax.random.split(jax.random.fold_in(key, len(slots)), len(found))
        forms = [
            random_form(own, shape, d_in, d_out) if shape else sj.NormalForm()
            for own, shape in zip(keys, found, strict=True)
        ]
        slots[site] = pack_site(forms, d_in, d_out, jnp.bfloat16)
        return byte_cost(forms, [1] * len(forms), d_in, d_out, place=place)

    for group, (d_in, outs) in GROUPS.items():
        modules = zip(MODULES[group], outs, strict=True)
        costs.append(fused([site_cost(module, d_in, d_out) for module, d_out in modules]))
    costs += [fused([site_cost(site, HIDDEN, HIDDEN, "norm")]) for site in NORM_SITES]
    return sum(costs[1:], costs[0]), slots


def random_form(key: jax.Array, site: dict, d_in: int, d_out: int) -> sj.NormalForm:
    """A form of these shapes near the identity; shared factors are the same for all tenants."""
    keys = iter(jax.random.split(key, 1024))

    def normal(*shape, scale=0.01):
        return (scale * jax.random.normal(next(keys), shape, jnp.float32)).astype(jnp.bfloat16)

    def blocks(d, m):
        return jnp.eye(m, dtype=jnp.bfloat16) + normal(d // m, m, m)

    def permuted(d, m, key):
        order = jax.random.permutation(jax.random.key(d), d)
        return Blocks(blocks(d, m), order, f"{key}-{d}-{m}")

    def term(at, spec):
        rank = spec["rank"]
        if not spec["shared"]:
            return sj.Term(A=normal(d_in, rank), B=normal(rank, d_out))
        a, b = jax.random.split(jax.random.key(at))
        A = jax.random.normal(a, (d_in, rank), jnp.bfloat16)
        B = jax.random.normal(b, (rank, d_out), jnp.bfloat16)
        u = normal(d_in) if spec["u"] else None
        return sj.Term(A=A, B=B, d=normal(rank), e=normal(d_out), u=u, pair=f"pair-{at}-{rank}")

    S = None
    if site["S"]:
        rows, cols = (
            jax.random.randint(next(keys), (site["S"],), 0, d, jnp.int32) for d in (d_in, d_out)
        )
        S = Sparse(rows, cols, normal(site["S"]))
    return sj.NormalForm(
        R=blocks(d_in, site["R"]) if site["R"] else None,
        s=1 + normal(d_out) if site["s"] else None,
        b=normal(d_out) if site["b"] else None,
        terms=tuple(term(at, spec) for at, spec in enumerate(site["terms"])),
        P=tuple(permuted(d_in, m, f"P{j}") for j, m in enumerate(site["P"])),
        Q=tuple(permuted(d_out, m, f"Q{j}") for j, m in enumerate(site["Q"])),
        S=S,
        K=tuple(
            Kronecker(normal(a_in, a_out), normal(b_in, b_out))
            for a_in, a_out, b_in, b_out in site.get("K", ())
        ),
    )


def compiled(weights, slots, tenants: int):
    """`LOOPS` layers in one jit, compiled."""

    def run(weights, slots, x):
        seg = sj.segments(jnp.arange(tenants), tenants, presorted=True)

        def apply(group, x):
            sites = zip(weights[group], MODULES[group], strict=True)
            params = tuple(SiteParams(W, None, slots.get(m, SiteSlots())) for W, m in sites)
            return apply_fused(params, x, seg)

        def norm(site, x):
            own = slots.get(site, SiteSlots())
            return apply_norm(normalised(x, 1e-5), weights[site], own, seg).astype(jnp.bfloat16)

        def layer(_, x):
            q, k, v = apply("qkv", norm("input_layernorm", x))
            (o,) = apply("o", q + jnp.sum(k + v).astype(q.dtype))
            gate, up = apply("gate_up", norm("post_attention_layernorm", o))
            (down,) = apply("down", gate * up)
            return down

        return jax.lax.fori_loop(0, LOOPS, layer, x)

    x = jnp.ones((tenants, HIDDEN), jnp.bfloat16)
    return jax.jit(run).lower(weights, slots, x).compile()


def microseconds(run, weights, slots, tenants: int) -> float:
    x = jnp.ones((tenants, HIDDEN), jnp.bfloat16)
    return median_us(run, weights, slots, x, repeats=7, per_call=LOOPS)[0]


if __name__ == "__main__":
    main()

"""The serving engine at the shapes of Llama-3.1-8B: bfloat16, random weights, one GPU.

    python -m benchmarks.engine_8b --out benchmarks/engine_8b.json [--only decode lora]

Steps are those of the engine, jitted and called as it calls them; a decode call is 16 steps of rows
that look at 256 keys. Bandwidths are measured in the same run. The figures of vLLM 0.25.1 are those
of the whole server on the same machine and shapes. `--layers` keeps the first layers of the model:
shorter to compile, for ratios. `--tiny` is a dry run of every measurement on a CPU.
"""

import argparse
import json
import os
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax

from benchmarks import engine_cold
from benchmarks.command import command
from benchmarks.engine_measures import Lab, Result, measurements, say

KERNELS = "lists the kernels of a step, as base:decode five:prefill"


def main() -> None:
    names = [*measurements(64), "cold"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON, written after each result")
    parser.add_argument("--only", nargs="+", choices=names, help="cold is measured only if named")
    parser.add_argument("--layers", type=int, help="layers that the model has; 32")
    parser.add_argument("--block", type=int, default=64, help="tokens of a prefill block")
    parser.add_argument("--cache-mib", type=int, default=3072, help="KV cache of each pool")
    parser.add_argument("--threads", type=int, default=8, help="programs compiled at a time")
    parser.add_argument("--compiled", type=Path, help="folder of jax's persistent cache")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="POOL:KIND", help=KERNELS)
    parser.add_argument("--tiny", action="store_true", help="a dry run with a tiny model")
    args = parser.parse_args()
    args.layers = args.layers or (2 if args.tiny else 32)
    results: list[Result] = []
    facts = {"command": command(), "layers": args.layers, "jax": jax.__version__}
    if args.only and "cold" in args.only:  # its processes need the device for themselves
        seconds, note = engine_cold.seconds(args.layers, args.tiny)
        results.append(Result("cold start, weights aside", seconds, "s", "<= 20", note))
        say(str(results[-1]))
    if args.compiled:
        jax.config.update("jax_compilation_cache_dir", str(args.compiled))
    wanted = [name for name in names if name != "cold" and (not args.only or name in args.only)]
    if wanted:
        lab = Lab(args)
        bandwidths = {"copy_tb_s": lab.copy / 1e12, "read_tb_s": lab.read / 1e12}
        facts |= {"device": jax.devices()[0].device_kind, **bandwidths}
        facts["block"] = lab.options.block
        say(json.dumps(facts))
        run(lab, wanted, results, facts)
        for step in args.kernels:
            pool, kind = step.split(":")
            facts.setdefault("kernels", {})[step] = table = lab.steps(pool).kernels(kind, lab.rows)
            print(f"\n{step}, {lab.rows} rows or blocks; us a step, launches a step")
            for name, us, launches in table[:20]:
                print(f"{us:10.1f} {launches:8.1f}  {name[:100]}", flush=True)
    write(args.out, facts, results)
    shown = {name: fact for name, fact in facts.items() if name != "kernels"}
    print(f"\n{shown}\n{'':34} {'value':>10} {'':8} {'target':>9} met")
    print("\n".join(map(str, results)))


def run(lab: Lab, wanted: list[str], results: list[Result], facts: dict) -> None:
    """Compiles and measures group by group: nothing compiles while something is measured."""
    table, queue = measurements(lab.rows), list(wanted)
    while queue:
        group, programs = [], {}
        while queue and (not group or len(programs) < lab.args.threads):
            group.append(queue.pop(0))
            programs |= dict.fromkeys(table[group[-1]][1])
        later = {pool for name in (*group, *queue) for pool, _, _ in table[name][1]}
        lab.keep(later)
        compile_all(lab, list(programs))
        for name in group:
            try:
                for result in table[name][0](lab):
                    results.append(result)
                    say(str(result))
                    write(lab.args.out, facts, results)
            except Exception:  # the others go on
                results.append(Result(f"{name}: FAILED", float("nan"), "", note=last_line()))
                traceback.print_exc()


def compile_all(lab: Lab, programs: list[tuple[str, str, int]]) -> None:
    """Compiles programs side by side; one that fails is said, and compiled again when it runs."""

    def one(program: tuple[str, str, int]) -> None:
        pool, kind, size = program
        say(f"compiled {pool} {kind} {size} {made[pool].compile(kind, size)}")

    made = {}
    for pool in dict.fromkeys(pool for pool, _, _ in programs):
        try:
            made[pool] = lab.steps(pool)
        except Exception:
            traceback.print_exc()
    with ThreadPoolExecutor(lab.args.threads) as threads:
        for job in [threads.submit(one, p) for p in programs if p[0] in made]:
            if job.exception() is not None:
                say(f"not compiled: {job.exception()!r:.300}")


def write(out: Path | None, facts: dict, results: list[Result]) -> None:
    if out is not None:
        rows = [asdict(result) | {"met": result.met} for result in results]
        out.write_text(json.dumps({"facts": facts, "results": rows}, indent=1) + "\n")


def last_line() -> str:
    return traceback.format_exc().strip().rpartition("\n")[2][:200]


if __name__ == "__main__":
    main()

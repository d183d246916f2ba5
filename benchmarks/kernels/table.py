"""Every figure of the adapter kernels on one GPU, in one run: the table of the README.

    python -m benchmarks.kernels.table --out benchmarks/kernels.json [--only layer carry_s ...]

One layer of Llama-3.1-8B in bfloat16 with 16 adapters, each timed inside a jit loop over several
layers' own pools (scute_jax/bench/work.py). A figure is stored as soon as it is there; one that
fails prints its error, and the others go on. With --only, the other figures of the file are kept.
`--tiny` tries the script on any machine: small widths, two layers, kernels interpreted.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import jax

from benchmarks.command import command
from scute_jax.bench.layer import LLAMA_8B, TINY, Layer, Load, turned_form
from scute_jax.bench.timing import time_work, walls_in_turn
from scute_jax.bench.work import (
    QUICK,
    Effort,
    Op,
    expand_work,
    riding_work,
    rotate_work,
    shared_work,
    sparse_work,
    update_work,
)
from scute_jax.byte_model import Cost, Machine
from scute_jax.calibrate import measure

ADAPTERS, BLOCK, VERA_RANK = 16, 32, 256
VLLM_US = {1024: 499.0, 8192: 3483.0}  # shrink and expand of vLLM 0.19.1, rank 16, same shapes
MIXED = (8, 16, 64, 256)


@dataclass
class Bench:
    """Where and how it is measured, and what has been measured so far."""

    machine: Machine
    layer: Layer
    effort: Effort
    op: Op
    shrunk: int = 1  # rows and ranks are divided by it
    found: dict[str, dict] = field(default_factory=dict)

    def load(self, rows: int, ranks: tuple[int, ...]) -> Load:
        small = tuple(max(1, rank // self.shrunk) for rank in ranks)
        return Load(max(1, rows // self.shrunk), small, self.layer)

    def uniform(self, rows: int, rank: int) -> Load:
        return self.load(rows, (rank,) * ADAPTERS)

    def update(self, rows: int, *ranks: int) -> dict:
        """Of adapters of these ranks, as many of each."""
        load = self.load(rows, tuple(r for r in ranks for _ in range(ADAPTERS // len(ranks))))
        name = f"update, rank {', '.join(map(str, ranks))}, {rows} rows"
        make = partial(update_work, load, self.effort, self.op)
        return self._timed(name, "low rank", make, load.cost(load.low_rank_form))

    def expand(self, rows: int) -> dict:
        load = self.uniform(rows, 16)
        name = f"expand, rank 16, {rows} rows"
        return self._timed(name, None, partial(expand_work, load, self.effort), None)

    def rotate(self, rows: int, block: int) -> dict:
        load, block = self.uniform(rows, 16), min(block, self.layer.kv)
        make = partial(rotate_work, load, block, self.effort, self.op)
        name = f"rotate, blocks of {block}, {rows} rows"
        return self._timed(name, "input transform", make, load.cost(turned_form(block)))

    def shared(self, rows: int, tenants: int) -> dict:
        load = self.load(rows, (VERA_RANK,) * tenants)
        make = partial(shared_work, load, self.effort, self.op)
        name = f"shared, {tenants} tenants, {rows} rows"
        return self._timed(name, "shared factors", make, load.cost(load.shared_form))

    def sparse(self, rows: int) -> dict:
        load = self.uniform(rows, 16)
        make = partial(sparse_work, load, self.effort, self.op)
        return self._timed(f"sparse, {rows} rows", "sparse", make, load.cost(load.sparse_form))

    def _timed(self, name: str, route: str | None, make: Callable, cost: Cost | None) -> dict:
        if name in self.found:
            return self.found[name]
        work = make()
        times = time_work(work, self.effort.repeats)
        record = {"what": name, "wall_us": times.wall, "spread_us": times.spread}
        record |= {"busy_us": times.busy, "launches": times.launches, "kernels": times.kernels}
        record |= {"bytes": work.nbytes, "bytes_us": 1e6 * work.nbytes / self.machine.bandwidth}
        if cost is not None:
            launch_us = 1e6 * cost.launches * self.machine.launch
            record |= {"route": route, "predicted_us": 1e6 * cost.seconds(self.machine)}
            record |= {"predicted_launch_us": launch_us}
        self.found[name] = record
        parts = ", ".join(f"{n} {us:.1f}" for n, us in times.kernels.items() if us > 0.2)
        predicted = f", predicted {record['predicted_us']:.1f}" if cost else ""
        print(
            f"  {name}: wall {times.wall:.1f} us (+-{times.spread / 2:.1f}), "
            f"bytes {record['bytes_us']:.1f}{predicted}; {times.launches:.1f} launches: "
            f"{parts or 'no kernels seen'}",
            flush=True,
        )
        return record


@dataclass(frozen=True)
class Figure:
    """One line of the table: `measured` must be at most (or, if not `most`, at least) `target`."""

    row: str
    what: str
    measured: Callable[[Bench], tuple[float, dict]]  # and the details
    target: float
    unit: str
    most: bool = True


def _call(method: Callable, *args: int) -> Callable[[Bench], dict]:
    return lambda bench: method(bench, *args)


MODELED = {  # route -> what is measured for it besides what the other rows have
    "low rank": [
        *(_call(Bench.update, rows, rank) for rank in (64, 256) for rows in (16, 64, 1024)),
        *(_call(Bench.update, rows, 16) for rows in (1024, 8192)),
    ],
    "shared factors": [_call(Bench.shared, r, ADAPTERS) for r in (256, 1024, 4096)],
    "input transform": [
        *(_call(Bench.rotate, rows, BLOCK) for rows in (64, 1024, 4096, 8192)),
        _call(Bench.rotate, 1024, 64),
    ],
    "sparse": [_call(Bench.sparse, rows) for rows in (16, 64, 1024)],
}


def figures() -> Iterator[Figure]:
    for rank, target in ((16, 20), (64, 55), (256, 190)):
        for rows in (16, 64):
            what = f"a layer, rank {rank}, {rows} rows"
            yield Figure("layer", what, partial(_wall, rows=rows, rank=rank), target, "us")
    for rank, target in ((16, 20), (64, 55), (256, 190)):
        for rows in (16, 64):
            what = f"a layer riding on its base products, rank {rank}, {rows} rows"
            yield Figure("riding", what, partial(_riding, rows=rows, rank=rank), target, "us")
    for rows in (1024, 8192):
        what = f"expand, rank 16, {rows} rows, of copy bandwidth"
        share = partial(_bandwidth, of=_call(Bench.expand, rows))
        yield Figure("expand", what, share, 85, "%", most=False)
        what = f"a layer, rank 16, {rows} rows, faster than vLLM"
        yield Figure("expand", what, partial(_faster, rows=rows), 5, "x", most=False)
    for rows in (16, 64, 1024, 8192):
        what = f"s carried over plain expand, {rows} rows"
        yield Figure("carry_s", what, partial(_carried, rows=rows), 1.02, "x")
    for rows in (64, 1024):
        what = f"ranks {MIXED} mixed over their own, {rows} rows"
        yield Figure("mixed", what, partial(_mixed, rows=rows), 1.15, "x")
    what = f"16 VeRA tenants over one, rank {VERA_RANK}, 64 rows"
    yield Figure("shared", what, partial(_tenants, rows=64), 1.03, "x")
    for rows in (1024, 8192):
        what = f"OFT blocks of {BLOCK}, {rows} rows, of copy bandwidth"
        share = partial(_bandwidth, of=_call(Bench.rotate, rows, BLOCK))
        yield Figure("rotate", what, share, 80, "%", most=False)
    for route, more in MODELED.items():
        what = f"byte model, {route}, median error"
        yield Figure("byte_model", what, partial(_error, route=route, more=more), 5, "%")


def _wall(bench: Bench, rows: int, rank: int) -> tuple[float, dict]:
    found = bench.update(rows, rank)
    return found["wall_us"], found


def _riding(bench: Bench, rows: int, rank: int) -> tuple[float, dict]:
    """What adapters add to the base products of a layer, in one launch with them."""
    load = bench.uniform(rows, rank)
    work = partial(riding_work, load, bench.effort, bench.op)
    over_xla, _ = _ratio(bench, work(adapters=False, xla=True), work())
    ratio, walls = _ratio(bench, work(adapters=False), work())
    base, whole = walls["walls_us"]
    return whole - base, walls | {"over_base": ratio, "over_xla": over_xla}


def _faster(bench: Bench, rows: int) -> tuple[float, dict]:
    found = bench.update(rows, 16)
    return VLLM_US[rows] / found["wall_us"], found


def _bandwidth(bench: Bench, of: Callable[[Bench], dict]) -> tuple[float, dict]:
    found = of(bench)
    return 100 * found["bytes_us"] / found["wall_us"], found


def _carried(bench: Bench, rows: int) -> tuple[float, dict]:
    load = bench.uniform(rows, 16)
    plain, carried = (expand_work(load, bench.effort, s=s) for s in (False, True))
    details = {"bytes_ratio": carried.nbytes / plain.nbytes}
    whole = (update_work(load, bench.effort, bench.op, s=s) for s in (False, True))
    details["ratio_of_shrink_and_expand"] = _ratio(bench, *whole)[0]
    ratio, walls = _ratio(bench, plain, carried)
    return ratio, details | walls


def _tenants(bench: Bench, rows: int) -> tuple[float, dict]:
    loads = (bench.load(rows, (VERA_RANK,) * tenants) for tenants in (1, ADAPTERS))
    one, many = (shared_work(load, bench.effort, bench.op) for load in loads)
    ratio, walls = _ratio(bench, one, many)
    details = {tenants: bench.shared(rows, tenants) for tenants in (1, ADAPTERS)}
    return ratio, walls | {"bytes_ratio": many.nbytes / one.nbytes, "tenants": details}


def _ratio(bench: Bench, first, second) -> tuple[float, dict]:
    """The second over the first, timed in turn: the median over the rounds."""
    walls = walls_in_turn([first, second], 2 * bench.effort.repeats)
    ratios = [b / a for a, b in zip(*walls, strict=True)]
    low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-1 - len(ratios) // 4]
    medians = [statistics.median(own) for own in walls]
    return statistics.median(ratios), {"walls_us": medians, "middle_half": [low, high]}


def _mixed(bench: Bench, rows: int) -> tuple[float, dict]:
    """Time of the mixed batch over the mean of those of batches of one rank each."""
    own = [bench.update(rows, rank)["wall_us"] for rank in MIXED]
    mixed = bench.update(rows, *MIXED)
    details = {"uniform_us": own, "over_bytes": mixed["wall_us"] / mixed["bytes_us"]}
    return mixed["wall_us"] / statistics.mean(own), mixed | details


def _error(bench: Bench, route: str, more) -> tuple[float, dict]:
    """Median error of the predictions of a route, of those loads whose bytes take longest."""
    for call in more:
        call(bench)
    found = [r for r in bench.found.values() if r.get("route") == route]
    dominated = [r for r in found if r["predicted_us"] > 2 * r["predicted_launch_us"]]
    errors = {r["what"]: 100 * (r["predicted_us"] / r["wall_us"] - 1) for r in dominated}
    if not errors:
        raise ValueError(
            f"{route}: at none of {len(found)} loads do bytes take longer than launches"
        )
    return statistics.median(map(abs, errors.values())), {"errors_percent": errors}


def main() -> None:
    args = _arguments()
    everything = list(figures())
    wanted = [f for f in everything if not args.only or f.row in args.only]
    machine = measure()
    print(
        f"{machine.name}, jax {jax.__version__}: copy {machine.bandwidth / 1e12:.3f} TB/s, cache "
        f"{machine.cache_bandwidth / 1e12:.2f} TB/s, launch {machine.launch * 1e6:.2f} us",
        flush=True,
    )
    if args.tiny:
        bench = Bench(machine, TINY, QUICK, Op("pallas"), shrunk=16)
    else:
        bench = Bench(machine, LLAMA_8B, Effort(), Op())
    lines = {}
    if args.only and args.out and args.out.exists():
        lines = {(r["row"], r["what"]): r for r in json.loads(args.out.read_text())["figures"]}
    began = time.monotonic()
    for figure in wanted:
        line = _line(figure, bench)
        lines[figure.row, figure.what] = line
        print(f"{time.monotonic() - began:5.0f} s  {_shown(line)}", flush=True)
        if args.out:
            report = {"machine": asdict(machine), "jax": jax.__version__}
            report |= {"figures": list(lines.values())}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\nfigure | measured | target | met")
    for line in lines.values():
        print(_shown(line))


def _line(figure: Figure, bench: Bench) -> dict:
    line = {"row": figure.row, "what": figure.what, "unit": figure.unit, "target": figure.target}
    line["bound"] = "<=" if figure.most else ">="
    try:
        measured, details = figure.measured(bench)
    except Exception as error:  # a figure that cannot be had is a result, too
        return line | {"error": f"{type(error).__name__}: {str(error)[:600]}"}
    met = measured <= figure.target if figure.most else measured >= figure.target
    line |= {"command": command(), "commit": _commit(), "copy_tb_s": bench.machine.bandwidth / 1e12}
    return line | {"measured": measured, "met": met, "details": details}


def _shown(line: dict) -> str:
    bound = f"{line['bound']} {line['target']:g} {line['unit']}"
    if "error" in line:
        return f"{line['what']} | {line['error']} | {bound} | no"
    met = "yes" if line["met"] else "NO"
    return f"{line['what']} | {line['measured']:.4g} {line['unit']} | {bound} | {met}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    rows = list(dict.fromkeys(figure.row for figure in figures()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=rows)
    parser.add_argument("--tiny", action="store_true", help="try the script, on any machine")
    return parser.parse_args()


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()


if __name__ == "__main__":
    main()

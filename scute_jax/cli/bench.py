"""Measures the adapter kernels, or a model with its adapters, on this machine."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from scute_jax.bench.layer import LLAMA_8B, SMALL, Layer, Load
from scute_jax.bench.timing import time_work
from scute_jax.bench.tune import ADAPTERS, BLOCK, changes, tasks, tune, write
from scute_jax.bench.work import Effort, rotate_work, shared_work, sparse_work, update_work
from scute_jax.calibrate import MIB, copy_bandwidth
from scute_jax.cli.generate import adapter_paths
from scute_jax.cli.progress import say
from scute_jax.kernels import tuning
from scute_jax.serving import Engine, Request, SamplingParams

OPS = ("update", "rotate", "shared", "sparse")
REFERENCE = Effort(distinct=0, layers=2, call_us=0, repeats=5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True)
    kernels = what.add_parser("kernels", help="16 adapters on one layer of Llama-3.1-8B")
    kernels.add_argument("--tune", action="store_true", help="search tiles for this GPU, keep them")
    kernels.add_argument("--table", type=Path, help="where to keep them (default: the one in use)")
    kernels.add_argument("--only", nargs="*", choices=OPS)
    kernels.add_argument("--rows", nargs="*", type=int, help="with --tune: these rows only")
    engine = what.add_parser("engine", help="tokens a second of a model and adapters in one batch")
    engine.add_argument("--model", required=True, help="model folder, GGUF file or hub id")
    engine.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH")
    engine.add_argument("--adapters", type=Path, metavar="DIR", help="each subfolder is one")
    engine.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    engine.add_argument("--requests", type=int, default=16, help="in one batch (default 16)")
    engine.add_argument("--prompt-tokens", type=int, default=32)
    engine.add_argument("--max-tokens", type=int, default=64)
    for command in (kernels, engine):
        command.add_argument("--out", type=Path, help="the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if args.what == "engine":
        report["runs"] = _engine(args)
    elif args.tune:
        report["tuned"] = _tune(args)
    else:
        report["kernels"] = _kernels(args)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _kernels(args: argparse.Namespace) -> list[dict]:
    """Each op, timed by the clock, beside the time that its bytes take at copy bandwidth."""
    layer, effort, size = LLAMA_8B, Effort(), 256 * MIB
    if jax.default_backend() != "gpu":
        say("there is no GPU here: this measures the reference in plain jax, on a small layer")
        layer, effort, size = SMALL, REFERENCE, 16 * MIB
    bandwidth = copy_bandwidth(size)
    say(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for name, make in _works(layer, effort, args.only):
        work = make()
        times = time_work(work, effort.repeats)
        bytes_us = work.nbytes / bandwidth * 1e6
        say(f"{name}: {times.wall:.1f} us")
        rows.append({"what": name, "wall_us": times.wall, "spread_us": times.spread})
        rows[-1] |= {"bytes_us": bytes_us, "kernels": times.kernels}
    table = Table("a layer", "us", "bytes, us", "of copy bandwidth", "kernels, us")
    for row in rows:
        kernels = ", ".join(f"{n} {us:.1f}" for n, us in row["kernels"].items() if us > 0.2)
        share = f"{100 * row['bytes_us'] / row['wall_us']:.0f} %"
        wall, moved = f"{row['wall_us']:.1f}", f"{row['bytes_us']:.1f}"
        table.add_row(row["what"], wall, moved, share, kernels or "-")
    _console().print(table)
    return rows


def _works(layer: Layer, effort: Effort, only: Sequence[str] | None) -> Iterator[tuple]:
    """Name and maker of what is measured."""

    def load(rows: int, rank: int) -> Load:
        return Load(rows, (rank,) * ADAPTERS, layer)

    def wanted(op: str) -> bool:
        return not only or op in only

    for rank, rows in ((16, 16), (16, 64), (16, 1024), (64, 64), (256, 64)):
        if wanted("update"):
            yield f"LoRA, rank {rank}, {rows} rows", partial(update_work, load(rows, rank), effort)
    if wanted("update"):
        scaled = partial(update_work, load(64, 16), effort, s=True)
        yield "LoRA with s, rank 16, 64 rows", scaled
    for rows in (64, 1024):
        if wanted("rotate"):
            name = f"OFT, blocks of {BLOCK}, {rows} rows"
            yield name, partial(rotate_work, load(rows, 1), BLOCK, effort)
        if wanted("shared"):
            yield f"VeRA, rank 256, {rows} rows", partial(shared_work, load(rows, 256), effort)
        if wanted("sparse"):
            yield f"SHiRA, {rows} rows", partial(sparse_work, load(rows, 16), effort)


def _tune(args: argparse.Namespace) -> list[dict]:
    """Searches the tiles of each op and bucket; the table is written after each of them."""
    if jax.default_backend() != "gpu":
        raise ValueError("--tune needs an NVIDIA GPU: the kernels are not compiled elsewhere.")
    path = args.table or tuning.table_path()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name another file with --table.") from None
    device, found = jax.devices()[0].device_kind, []
    chosen = [
        task
        for task in tasks()
        if (not args.only or task.op in args.only) and (not args.rows or task.rows in args.rows)
    ]
    for number, task in enumerate(chosen, 1):
        say(f"{number} of {len(chosen)}: {task.name}")
        best = tune(task, Effort().repeats, say)
        write(path, device, best)
        found.append({"what": task.name, "default_us": best.default_us, "best_us": best.best_us})
        found[-1]["changes"] = changes(best.tiles)
    table = Table("a layer", "defaults, us", "best, us", "changes")
    for row in found:
        before, after = f"{row['default_us']:.1f}", f"{row['best_us']:.1f}"
        table.add_row(row["what"], before, after, row["changes"] or "-")
    console = _console()
    console.print(table)
    if path.resolve() != tuning.table_path().resolve():
        console.print(f"set {tuning.VARIABLE}={path} to use this table")
    return found


def _engine(args: argparse.Namespace) -> list[dict]:
    """Batches of base rows and, if there are adapters, of rows of all of them in turn."""
    paths = adapter_paths(args.adapter, args.adapters)
    if args.max_tokens < 2:
        raise ValueError(f"--max-tokens {args.max_tokens}: a step is the time between two tokens.")
    for name in ("requests", "prompt_tokens"):
        if (count := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: give at least 1.")
    say(f"loading {args.model}")
    engine = Engine.from_pretrained(args.model, dtype=args.dtype, max_adapters=max(1, len(paths)))
    for name, path in paths.items():
        say(f"adapter {name}: {engine.add_adapter(name, path).method}")
    if (whole := args.prompt_tokens + args.max_tokens) > engine.max_context:
        raise ValueError(
            f"--prompt-tokens and --max-tokens are {whole} together, but prompt and text may have "
            f"{engine.max_context}."
        )
    batches: dict[str, list[str | None]] = {"base": [None]}
    if paths:
        batches["base and adapters"] = [None, *paths]
    runs = []
    for name, tenants in batches.items():
        say(f"{name}: compiling and measuring {args.requests} requests")
        runs.append({"batch": name} | _generated(engine, tenants, args))
    table = Table("batch", "requests", "tokens/s", "ms a step", "ms of the prompts")
    for row in runs:
        numbers = (row["tokens_per_s"], row["step_ms"], row["prompts_ms"])
        table.add_row(row["batch"], str(args.requests), *(f"{n:.1f}" for n in numbers))
    _console().print(table)
    return runs


def _generated(engine: Engine, tenants: list[str | None], args: argparse.Namespace) -> dict:
    """Tokens a second, and the milliseconds of a step: those between the first and last token."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.config.vocab_size, (args.requests, args.prompt_tokens))

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [
            Request(
                prompt_token_ids=prompt.tolist(),
                adapter=tenants[i % len(tenants)],
                sampling=sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        for done in engine.generate(requests):
            if done.error is not None:
                raise ValueError(f"a request of {done.adapter or 'the base'}: {done.error}")
        return time.perf_counter() - began

    for tokens in (args.max_tokens, 1):
        seconds(tokens)  # compiles
    whole, first = seconds(args.max_tokens), seconds(1)
    return {
        "requests": args.requests,
        "tokens_per_s": args.requests * args.max_tokens / whole,
        "step_ms": 1e3 * (whole - first) / (args.max_tokens - 1),
        "prompts_ms": 1e3 * first,
    }


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)

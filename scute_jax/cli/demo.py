"""Serves trained adapters of five methods and the base in one batch, on a real model."""

import argparse
import textwrap
import time
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from scute_jax.cli.progress import say
from scute_jax.demo_adapters import demo_adapters
from scute_jax.demo_model import DemoModelUnavailable, demo_model_path
from scute_jax.serving import Completion, Engine, Request, SamplingParams

REVIEW = "Is the sentiment of this movie review positive or negative?\n\n"


@dataclass(frozen=True)
class Row:
    """One request of the demo."""

    adapter: tuple[str, ...]
    question: str
    max_tokens: int = 40


ROWS = (
    Row((), "What is the capital of France?"),
    Row((), f"{REVIEW}the plot is thin , but the cast has a wonderful time"),
    Row(("sst2-lora",), f"{REVIEW}the plot is thin , but the cast has a wonderful time"),
    Row(("sst2-dora",), f"{REVIEW}two hours that feel like five"),
    Row(("sst2-ia3",), f"{REVIEW}a warm , funny and honest little film"),
    Row(("sst2-vera",), f"{REVIEW}it never finds a reason to exist"),
    Row(("sst2-oft",), f"{REVIEW}the best thing on screen this year"),
    Row(("gsm8k-lora",), "A box holds 12 eggs. How many eggs are in 3 boxes?"),
    Row(("gsm8k-vera",), "Tom had 15 apples and gave away 6. How many are left?"),
    Row(("gsm8k-oft",), "A ticket costs $8. How much do 5 tickets cost?"),
    Row(("gsm8k-ia3",), "Anna reads 20 pages a day. How many pages does she read in a week?"),
    Row(
        ("gsm8k-lora", "gsm8k-ia3-on-lora"),
        "A pencil costs $2 and a pen costs $3. How much do 2 pencils and a pen cost?",
    ),
    Row((), "Name three colors."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by the device")
    parser.add_argument("--max-tokens", type=int, default=40, help="per text")


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 if the model cannot be had."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    began = time.monotonic()
    try:
        model = demo_model_path(progress=_download)
    except DemoModelUnavailable as error:
        say(str(error))
        return 1
    on_gpu = jax.default_backend() == "gpu"
    say(f"loading SmolLM2-135M-Instruct on {jax.devices()[0].device_kind}")
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    engine = Engine.from_pretrained(model, dtype=dtype, max_adapters=16)
    methods = {}
    for name, folder in demo_adapters().items():
        methods[name] = engine.add_adapter(name, folder).method
    say(f"{len(methods)} adapters of {len(set(methods.values()))} methods registered")
    requests = [_request(row, args.max_tokens) for row in ROWS]
    say(f"compiling the steps for {len(ROWS)} rows in one batch (once; about a minute on a CPU)")
    compiling = time.monotonic()
    engine.generate(requests[:1] + [_request(row, 2) for row in ROWS[1:]])
    say(f"compiled in {time.monotonic() - compiling:.0f} s; generating")
    generating = time.monotonic()
    completions, seconds = _timed(engine, requests)
    console.print(_table(completions, seconds, methods))
    total = sum(len(c.token_ids) for c in completions)
    took = time.monotonic() - generating
    kernels = "Pallas kernels" if on_gpu else "the plain jax route"
    console.print(
        f"{len(ROWS)} texts, {len(methods)} adapters and the base in one batch: {total} tokens in "
        f"{took:.1f} s, {total / took:.0f} tokens/s by {kernels} in {dtype}; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 0


def _download(what: str, done: int, total: int) -> None:
    say(f"downloading {what}: {done >> 20} of {total >> 20} MiB")


def _request(row: Row, max_tokens: int) -> Request:
    return Request(
        messages=[{"role": "user", "content": row.question}],
        adapter=list(row.adapter) or None,
        sampling=SamplingParams(max_tokens=min(max_tokens, row.max_tokens)),
    )


def _timed(engine: Engine, requests: list[Request]) -> tuple[list[Completion], list[float]]:
    """The completions, and the seconds until each was there."""
    began = time.monotonic()
    named = [
        Request(messages=r.messages, adapter=r.adapter, sampling=r.sampling, id=str(i))
        for i, r in enumerate(requests)
    ]
    found: dict[int, tuple[Completion, float]] = {}
    for chunk in engine.stream(named):
        if chunk.completion is not None:
            found[int(chunk.id)] = (chunk.completion, time.monotonic() - began)
    ordered = [found[i] for i in range(len(requests))]
    return [c for c, _ in ordered], [s for _, s in ordered]


def _table(completions: list[Completion], seconds: list[float], methods: dict[str, str]) -> Table:
    table = Table("adapter", "method", "prompt", "text", "tokens/s", show_lines=True)
    for row, completion, took in zip(ROWS, completions, seconds, strict=True):
        names = " + ".join(row.adapter) or "base"
        method = " + ".join(methods[name] for name in row.adapter) or "-"
        prompt = textwrap.shorten(row.question.removeprefix(REVIEW), 70, placeholder=" ...")
        text = completion.text if completion.error is None else f"error: {completion.error}"
        rate = f"{len(completion.token_ids) / took:.1f}"
        table.add_row(names, method, prompt, text.strip(), rate)
    return table

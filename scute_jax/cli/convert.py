"""Writes an adapter of any method as a LoRA that PEFT loads, and says what it leaves out."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scute_jax.cli.convert_data import Data, Effect, InputMoments, Merged
from scute_jax.cli.progress import Status, say
from scute_jax.convert import Report, SiteReport, deltas_of, lora_of
from scute_jax.delta import Delta
from scute_jax.dense import dense_deltas
from scute_jax.errors import AdapterError
from scute_jax.low_rank import Fit
from scute_jax.models.checkpoint import gguf_file, load_model
from scute_jax.models.config import LlamaConfig
from scute_jax.models.hub import local_path
from scute_jax.models.observe import num_steps
from scute_jax.models.params import LlamaParams
from scute_jax.peft import load_peft, save_peft
from scute_jax.peft.checkpoint import open_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("adapter", type=Path, help="the folder of an adapter")
    add("--base", required=True, help="the model that it is for: folder, GGUF file or hub id")
    add("--rank", required=True, type=int, help="of the LoRA; less at sites where less is exact")
    add(
        "--method",
        choices=("svd", "asvd"),
        default="svd",
        help="closest in the weights (default), or in what they make of the activations on --data",
    )
    add("--data", type=Path, help="text or JSON lines; also measures the log-probabilities")
    add("--data-tokens", type=int, default=32768, help="tokens of it that are used (32768)")
    add("--out", required=True, type=Path, help="the folder that the LoRA is written to")
    add("--json", action="store_true", help="for machines, on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if the LoRA was written."""
    _check(args)
    say(f"loading {args.base}")
    config, params = load_model(args.base, "float32")
    weigh = args.method == "asvd"
    data = args.data and Data.read(args.data, args.base, config, args.data_tokens, weigh)
    source = _source(args.adapter, args.base, config, params)
    moments = InputMoments(params, config, data.weigh) if weigh else None
    total = source.count and source.count + (moments.steps if moments else 0)
    merged = Merged(params) if data else None
    with Status("convert", total, "steps") as status:
        if moments:
            moments.on_step = lambda: status.step(1)

        def on_site(site: str, delta: Delta, found: Fit) -> None:
            if merged:
                merged.add(site, delta, found)
            status.step(1)

        lora, report = lora_of(
            source.deltas,
            args.rank,
            method=source.method,
            base=source.base,
            moments=moments,
            on_site=on_site,
        )
    save_peft(lora, args.out)
    effect = None
    if merged:
        with Status("measure", 3 * num_steps(data.measure), "steps") as status:
            effect = merged.effect(config, data.measure, lambda: status.step(1))
    if args.json:
        print(json.dumps(_as_json(source.method, report, effect), indent=2))
    else:
        show(report, effect, source.method, args.out)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.rank < 1:
        raise ValueError(f"--rank {args.rank}: needed 1 or more.")
    if args.method == "asvd" and args.data is None:
        raise ValueError("--method asvd weighs the error by activations: give --data.")
    if args.data is not None and not args.data.is_file():
        raise ValueError(f"--data {args.data}: there is no such file.")
    if args.out.exists() and args.adapter.exists() and args.out.samefile(args.adapter):
        raise ValueError(f"--out {args.out} is the adapter itself; name another folder.")


@dataclass(frozen=True)
class Source:
    """What is converted: the deltas, one at a time, and where they come from."""

    deltas: Iterator[tuple[str, Delta]]
    method: str
    base: str | None  # as the checkpoint calls it
    count: int | None  # of sites, if it is known


def _source(path: Path, model: str, config: LlamaConfig, params: LlamaParams) -> Source:
    """The adapter as it is served; else what the PEFT library makes of it."""
    options = open_checkpoint(path)[0]
    named, kind = (options.get(name) for name in ("base_model_name_or_path", "peft_type"))
    try:
        adapter = load_peft(path, config, params=params)
    except AdapterError as refusal:
        say(f"not served, so PEFT has to say what it adds. {refusal}")
        place = local_path(model)
        place = gguf_file(place) or place
        return Source(_by_peft(path, place, config, params, refusal), str(kind), named, None)
    deltas = deltas_of(adapter, config, params)
    return Source(deltas, adapter.method, named, len(adapter))


def _by_peft(
    path: Path, model: Path, config: LlamaConfig, params: LlamaParams, refusal: AdapterError
) -> Iterator[tuple[str, Delta]]:
    try:
        yield from dense_deltas(path, model, config, params)
    except AdapterError as error:
        raise AdapterError(f"{error}\nIt is not served: {refusal}") from error


def _as_json(method: str, report: Report, effect: Effect | None) -> dict[str, Any]:
    return {
        "method": method,
        "share": report.share,
        "log_probabilities": None if effect is None else asdict(effect),
        "sites": [asdict(site) for site in report.sites],
    }


def show(report: Report, effect: Effect | None, method: str, out: Path) -> None:
    """The report as a person reads it."""
    console = Console()
    weighted = any(site.weighted_share is not None for site in report.sites)
    table = Table("site", "rank", "norm left out", *["on the data"] * weighted, "shift")
    for site in report.sites:
        table.add_row(*_cells(site, weighted))
    console.print(table)
    line = f"{out}: {method} as a LoRA leaves out {report.share:.3%} of the squared norm"
    if effect is not None:
        line += (
            f", and misses {effect.share:.3%} of the effect on the log-probabilities of "
            f"{effect.tokens} tokens (effect: {effect.rms:.4f} nats rms)"
        )
    console.print(line, highlight=False, soft_wrap=True)


def _cells(site: SiteReport, weighted: bool) -> list[str]:
    on_data = [] if not weighted else [f"{site.weighted_share or 0:.3%}"]
    shift = "lora_bias" if site.shifted else "-"
    return [site.site, str(site.rank), f"{site.share:.3%}", *on_data, shift]

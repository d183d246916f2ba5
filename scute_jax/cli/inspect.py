"""Says what is in an adapter checkpoint: method, sites, slots, ranks, bytes, problems."""

import argparse
import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scute_jax.errors import AdapterError
from scute_jax.models.checkpoint import gguf_file, load_model, open_model
from scute_jax.models.hub import local_path
from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.peft import load_peft
from scute_jax.peft.checkpoint import open_checkpoint
from scute_jax.peft.registry import Method, method_of

MODULE = re.compile(r"^(?:base_model\.)?(?:model\.)*(.*?(?:\w+_proj|lm_head|embed_tokens))\.(.+)$")
FOLDS = {"LORA": "c", "DORA": "c e", "VERA": "c"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, help="the folder of an adapter")
    add("--model", help="the base it is for: checks everything and shows the slots of every site")
    add("--json", action="store_true", help="for machines, on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if nothing speaks against serving the adapter, 1 if something does."""
    report = describe(args.path, args.model)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return int(bool(report["problems"]))


def describe(path: Path, model: str | None = None) -> dict[str, Any]:
    """What a person or a program wants to know of an adapter before serving it.

    Without a model, only what the files say by themselves; with one, what `load_peft` makes of
    them. `problems` is empty if nothing was found.
    """
    report: dict[str, Any] = {"path": str(path), "checked_against": model, "problems": []}
    try:
        options, tensors = open_checkpoint(path)
        method = method_of(options)
        report |= _of_files(dict(options.fields), method, tensors.shapes, path)
        if model is not None:
            report |= _of_adapter(_load(path, model))
        else:
            _check_finite(tensors)
    except AdapterError as error:
        report["problems"].append(str(error))
    return report


def _check_finite(tensors) -> None:
    """Raises: AdapterError naming a tensor that holds NaN or infinity, or that cannot be read."""
    for key in tensors.shapes:
        if not np.isfinite(tensors.read(key).astype(np.float32)).all():
            raise AdapterError(f"{tensors.path}: tensor {key!r} holds NaN or infinity.")


def _of_files(fields: dict, method: Method, shapes: dict, path: Path) -> dict[str, Any]:
    modules: dict[str, list[str]] = {}
    for key, shape in shapes.items():
        found = MODULE.match(key)
        name, tensor = found.groups() if found else ("(whole adapter)", key)
        modules.setdefault(name, []).append(f"{tensor} {list(shape)}")
    files = [f for f in path.iterdir() if f.name.startswith("adapter_model")]
    return {
        "method": method.name,
        "equation": method.equation,
        "base": fields.get("base_model_name_or_path"),
        "peft_version": fields.get("peft_version"),
        "file_bytes": sum(f.stat().st_size for f in files),
        "parameters": sum(prod(shape) for shape in shapes.values()),
        "folded": FOLDS.get(method.name, "").split(),
        "live": list(method.live),
        "modules": {name: sorted(parts) for name, parts in modules.items()},
    }


def _of_adapter(adapter: Adapter) -> dict[str, Any]:
    return {
        "version": adapter.version,
        "live": list(adapter.live),
        "served_bytes": adapter.nbytes,
        "notes": list(adapter.info.get("notes", ())),
        "sites": {site: _of_form(form) for site, form in adapter.sites.items()},
    }


def _of_form(form: NormalForm) -> dict[str, Any]:
    return {
        "rank": form.rank,
        "shared_ranks": [term.rank for term in form.terms if term.pair is not None],
        "live": list(form.live),
        "block": None if form.R is None else int(form.R.shape[-1]),
    }


def _load(path: Path, model: str) -> Adapter:
    local = local_path(model)
    if gguf_file(local) is None:
        return load_peft(path, open_model(local)[0], params=local)
    return load_peft(path, *load_model(local, "float32"))


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """The report as a person reads it: similar sites in one row."""
    console = console or Console()
    if "method" in report:
        console.print(f"[bold]{report['method']}[/bold]  {report['equation']}", highlight=False)
        size = report.get("served_bytes", report["file_bytes"])
        console.print(
            f"{report['parameters']:,} numbers, {size / 1e6:.2f} MB"
            f"{' as served' if 'served_bytes' in report else ' on disk'}; "
            f"folded: {' '.join(report['folded']) or 'none'}; "
            f"live: {' '.join(report['live']) or 'none'}"
        )
        base = escape(report["base"] or "a base it does not name")
        console.print(f"made for {base}", highlight=False)
        console.print(_table(report))
        for note in report.get("notes", ()):
            console.print(f"note: {escape(note)}", highlight=False)
    for problem in report["problems"]:
        console.print(f"[red]refused[/red]: {escape(problem)}", highlight=False)
    if not report["problems"]:
        checked = report["checked_against"]
        console.print(
            f"can be served over {escape(checked)}"
            if checked
            else "readable; give --model to check it all"
        )


def _table(report: dict[str, Any]) -> Table:
    if "sites" in report:
        table = Table("sites", "projection", "rank", "shared rank", "R blocks", "live")
        rows = Counter(
            (
                _projection(site),
                str(s["rank"] or "-"),
                "+".join(map(str, s["shared_ranks"])) or "-",
                str(s["block"] or "-"),
                " ".join(s["live"]) or "-",
            )
            for site, s in report["sites"].items()
        )
    else:
        table = Table("modules", "projection", "tensors")
        modules = report["modules"].items()
        rows = Counter((_projection(name), "\n".join(parts)) for name, parts in modules)
    for row, count in rows.items():
        table.add_row(str(count), *row)
    return table


def _projection(site: str) -> str:
    """The site without its layer number."""
    return re.sub(r"^.*layers\.\d+\.", "", site)

"""Answers a file of requests that name adapters, all in one batch."""

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path

from scute_jax.cli.progress import Status, say
from scute_jax.cli.requests import Line, parse_line
from scute_jax.cli.responses import refusal, to_json
from scute_jax.cli.results_file import ResultsFile
from scute_jax.errors import AdapterError
from scute_jax.serving import Completion, Engine, Request

BASE_NAMES = ("base",)  # names of the base model in OpenAI bodies, besides its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="model folder, GGUF file or hub id")
    add("--adapter", action="append", default=[], metavar="NAME=PATH", help="one adapter")
    add("--adapters", type=Path, metavar="DIR", help="each subfolder is an adapter of that name")
    add("--requests", required=True, type=Path, help="JSON lines, see the README")
    add("--output", required=True, type=Path, help="JSON lines, appended")
    add("--resume", action="store_true", help="go on with an output that a stopped run left")
    add(
        "--order",
        choices=("finished", "requests"),
        default="finished",
        help="write results as they finish (default), or in the order of the requests",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
    add("--max-adapters", type=int, help="adapters on the device at a time (default 16)")
    add("--compilation-cache", type=Path, metavar="DIR", help="keeps compiled steps for later runs")
    add("--memory", type=_memory, help="for the KV cache: bytes, or a share of the device as 0.5")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 if every request got a text, 1 if some got an error, 130 if stopped."""
    paths = adapter_paths(args.adapter, args.adapters)
    if not args.requests.exists() or args.requests.is_dir():
        kind = "is a folder" if args.requests.is_dir() else "there is no such file"
        raise ValueError(f"--requests {args.requests}: {kind}.")
    if args.output.exists() and args.output.samefile(args.requests):
        raise ValueError(f"--output {args.output} is the file of the requests; give another one.")
    results = ResultsFile(args.output, args.resume)
    say(f"loading {args.model}")
    engine = Engine.from_pretrained(
        args.model,
        max_adapters=args.max_adapters,
        memory=args.memory,
        dtype=args.dtype,
        compilation_cache=args.compilation_cache,
    )
    refused = add_adapters(engine, paths)
    names = (*BASE_NAMES, args.model, Path(args.model).name)
    with args.requests.open("rb") as file:
        lines = list(_lines(file, set(paths), names, results.done))
    if results.done:
        say(f"{args.output}: {len(results.done)} results are there, {len(lines)} to go")
    stop = _StopSignals()
    failed = 0
    with results, Status("generate", len(lines)) as status, stop:
        for line, completion in _answers(engine, lines, refused, stop, args.order == "requests"):
            results.append(to_json(line, completion))
            failed += completion.finish_reason == "error"
            status.step(1, len(completion.token_ids))
    if stop.asked:
        behind = "" if args.order == "finished" else " as far as its turn had come"
        say(
            f"stopped; what was begun is finished{behind}. "
            f"Go on with --resume --output {args.output}"
        )
        return 130
    if failed:
        say(f"{failed} of {len(lines)} requests have an error in place of a text")
    return int(failed > 0)


def adapter_paths(named: list[str], folder: Path | None) -> dict[str, Path]:
    """Name -> folder of each adapter. Raises: ValueError for what names no folder."""
    paths: dict[str, Path] = {}
    if folder is not None:
        if not folder.is_dir():
            raise ValueError(f"--adapters {folder}: there is no such folder.")
        paths |= {child.name: child for child in sorted(folder.iterdir()) if child.is_dir()}
    for pair in named:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--adapter {pair}: write NAME=PATH.")
        paths[name] = Path(path)
    return paths


def add_adapters(engine: Engine, paths: dict[str, Path]) -> dict[str, str]:
    """Registers the adapters; name -> reason of those that are refused."""
    refused = {}
    for name, path in paths.items():
        try:
            info = engine.add_adapter(name, path)
            say(f"adapter {name}: {info.method}, {info.nbytes / 1e6:.1f} MB")
        except AdapterError as error:
            refused[name] = str(error)
            say(f"adapter {name} is refused: {error}")
    return refused


def _lines(file, adapters: set[str], base: tuple[str, ...], done: set[str]) -> Iterator[Line]:
    """The lines of a file of bytes that have no result yet; of lines with one id, the first holds
    it."""
    seen: dict[str, int] = {}
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        line = parse_line(text, number, adapters, base)
        if line.id in seen:
            message = f"line {number}: id {line.id!r} is that of line {seen[line.id]} already."
            name = f"line-{number}"
            while name in seen:
                name += "-again"
            line = Line(name, None, message, line.model, line.url)
        seen[line.id] = number
        if line.id not in done:
            yield line


def _answers(
    engine: Engine,
    lines: list[Line],
    refused: dict[str, str],
    stop: "_StopSignals",
    in_order: bool,
) -> Iterator[tuple[Line, Completion]]:
    """Each line with its completion, as they finish or in the order of the lines."""
    by_id = {line.id: line for line in lines}
    ready: dict[str, Completion] = {}
    order = iter(lines)
    head = next(order, None)
    for completion in _completions(engine, lines, refused, stop):
        if not in_order:
            yield by_id[completion.id], completion
            continue
        ready[completion.id] = completion
        while head is not None and head.id in ready:
            yield head, ready.pop(head.id)
            head = next(order, None)


def _completions(
    engine: Engine, lines: list[Line], refused: dict[str, str], stop: "_StopSignals"
) -> Iterator[Completion]:
    served: list[Request] = []
    for line in lines:
        reason = next((refused[n] for n in _adapters_of(line) if n in refused), None)
        if line.request is None:
            yield refusal(line)
        elif reason is not None:
            yield Completion(line.id, line.request.adapter, "", (), "error", error=reason)
        else:
            served.append(line.request)
    for chunk in engine.stream(stop.until(served)):
        if stop.asked:
            engine.cancel_waiting()
        if chunk.completion is not None and chunk.completion.finish_reason != "cancelled":
            yield chunk.completion


def _adapters_of(line: Line) -> tuple[str, ...]:
    return () if line.request is None else line.request.adapter_names


class _StopSignals:
    """While active, the first SIGINT or SIGTERM lets what was begun finish; a second one kills."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "_StopSignals":
        self._before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def until(self, requests: list[Request]) -> Iterator[Request]:
        """The requests, as long as nobody asks to stop."""
        for request in requests:
            if self.asked:
                return
            yield request

    def _stop(self, number: int, _frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        say(f"{signal.Signals(number).name}: finishing what was begun; once more to stop at once")


def _memory(text: str) -> int | float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is neither bytes nor a share up to 1")
    return value if value <= 1 else int(value)

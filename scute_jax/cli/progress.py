"""What is going on, on stderr: a bar where somebody looks, else a line now and then."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY_S = 10.0  # between lines where stderr is no terminal


class Status:
    """`with Status("generate", total) as status: status.step(tokens=8)`."""

    def __init__(self, what: str, total: int | None, unit: str = "requests"):
        self._what, self._total, self._unit = what, total, unit
        self._console = Console(stderr=True)
        self._done = self._tokens = 0
        self._began = self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, rate="")

    def __enter__(self) -> "Status":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if not self._console.is_terminal:
            self._say()

    def step(self, units: int = 0, tokens: int = 0) -> None:
        """Counts what was finished."""
        self._done += units
        self._tokens += tokens
        self._bar.update(self._task, completed=self._done, rate=self._rate())
        if not self._console.is_terminal and time.monotonic() - self._said > EVERY_S:
            self._say()

    def _rate(self) -> str:
        if not self._tokens:
            return ""
        return f"{self._tokens / max(time.monotonic() - self._began, 1e-9):.0f} tokens/s"

    def _say(self) -> None:
        self._said = time.monotonic()
        total = "" if self._total is None else f" of {self._total}"
        rate = f", {self._rate()}" if self._tokens else ""
        print(f"{self._what}: {self._done}{total} {self._unit}{rate}", file=sys.stderr)


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)

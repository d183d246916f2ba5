"""Counts what an engine compiles, whatever it is: steps, writes to the bank, single operations."""

import threading
from collections import Counter
from types import TracebackType

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_active = threading.local()  # the counters of the engines that work in a thread, innermost last


class Compilations:
    """`with compilations: ...` counts the XLA programs that are compiled meanwhile in this thread.

    A program that comes from jax's persistent cache counts, too: it is not there when it is needed.
    """

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_name.total()

    def __enter__(self) -> "Compilations":
        _stack().append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _stack().pop()


def _stack() -> list[Compilations]:
    if not hasattr(_active, "stack"):
        _active.stack = []
    return _active.stack


def _on_event(event: str, duration: float, **names: str | int) -> None:
    del duration
    if event == _EVENT and _stack():
        _stack()[-1].by_name[str(names.get("fun_name", "?"))] += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)

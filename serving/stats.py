"""What the engine has done and holds, as figures."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scute_jax.serving.request import FinishReason
from scute_jax.serving.sequence import Sequence

Key = str | tuple[str, ...] | None  # the adapter of a request: a name, stacked names, or the base
MAX_STACKS = 1024  # stacks whose figures are kept, the latest


@dataclass(frozen=True)
class AdapterStats:
    """Figures of one adapter. Times are means over the requests that have ended or run."""

    resident: Literal["device", "host"]
    slot: int | None  # of the bank
    running: int
    waiting: int
    finished: int  # requests that got their text
    failed: int  # requests that ended with an error; what was refused at once is in none of these
    tokens: int  # generated
    seconds_to_first_token: float | None  # from submission
    seconds_per_token: float | None  # after the first


@dataclass(frozen=True)
class EngineStats:
    """`adapters` has every registered name, the stacks that were asked for, and None = the base.

    pages_free + pages_idle + pages_used is the whole cache; idle pages hold prefixes that later
    prompts may share, and count as free when room is needed.
    """

    adapters: Mapping[Key, AdapterStats]
    running: int
    waiting: int
    pages_free: int
    pages_idle: int
    pages_used: int
    slots_free: int
    slots_used: int
    loads: int  # copies of an adapter to the device
    compilations: int  # XLA programs that the engine compiled, warm-up included
    preemptions: int  # sequences taken off the device to be computed again
    out_of_memory: int  # times that the device ran out of memory


@dataclass
class Counts:
    """What has added up for one adapter."""

    finished: int = 0
    failed: int = 0
    tokens: int = 0
    firsts: int = 0
    first_seconds: float = 0.0
    nexts: int = 0
    next_seconds: float = 0.0

    def stats(self, slot: int | None, running: int, waiting: int, everywhere: bool) -> AdapterStats:
        """`everywhere`: the base model, or an adapter that does nothing."""
        return AdapterStats(
            resident="host" if slot is None and not everywhere else "device",
            slot=slot,
            running=running,
            waiting=waiting,
            finished=self.finished,
            failed=self.failed,
            tokens=self.tokens,
            seconds_to_first_token=self.first_seconds / self.firsts if self.firsts else None,
            seconds_per_token=self.next_seconds / self.nexts if self.nexts else None,
        )


class Meter:
    """Adds up figures by adapter; memory is bounded by the registered names."""

    def __init__(self) -> None:
        self._counts: dict[Key, Counts] = {}
        self._stacks: OrderedDict[tuple[str, ...], Counts] = OrderedDict()

    def of(self, key: Key) -> Counts:
        """The figures of an adapter so far."""
        if not isinstance(key, tuple):
            return self._counts.setdefault(key, Counts())
        counts = self._stacks.setdefault(key, Counts())
        self._stacks.move_to_end(key)
        if len(self._stacks) > MAX_STACKS:
            self._stacks.popitem(last=False)
        return counts

    @property
    def stacks(self) -> list[tuple[str, ...]]:
        return list(self._stacks)

    def forget(self, name: str) -> None:
        """Drops the figures of a name that is gone, and of stacks with it."""
        self._counts.pop(name, None)
        for stack in [stack for stack in self._stacks if name in stack]:
            del self._stacks[stack]

    def generated(self, sequence: Sequence, count: int, now: float) -> None:
        """`count` tokens of a sequence became known at time `now`."""
        counts = self.of(sequence.request.adapter)
        counts.tokens += count
        if sequence.first_at is None:
            sequence.first_at = sequence.last_at = now
            counts.firsts += 1
            counts.first_seconds += now - sequence.arrived_at
            count -= 1
        counts.nexts += count
        counts.next_seconds += now - sequence.last_at
        sequence.last_at = now

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence ended."""
        counts = self.of(sequence.request.adapter)
        counts.failed += reason == "error"
        counts.finished += reason in ("stop", "length")

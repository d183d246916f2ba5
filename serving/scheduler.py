"""Who runs next: admission, prefill under a token budget, decode rows, preemption.

Host only, numpy only, no device. The engine calls

    schedule_prefill() -> PrefillWork | None      which prompt tokens to compute now
    schedule_decode()  -> DecodeWork | None       which rows generate, in which order
    finish(sequence)                              when a sequence has ended

and launches what it gets, in that order.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scute_jax.serving.device_memory import OutOfDeviceMemory
from scute_jax.serving.pages import PagePool, page_digests
from scute_jax.serving.registry import BASE
from scute_jax.serving.residency import Residency
from scute_jax.serving.sequence import Sequence

PATIENCE = 64  # how often a request may be overtaken before nothing is admitted ahead of it


@dataclass(frozen=True)
class Limits:
    """The shapes and budgets that a step may have."""

    rows: int  # decode rows
    steps: int  # tokens per decode call
    block: int  # tokens per prefill block
    prefill_blocks: tuple[int, ...]  # blocks per prefill call, ascending: the compiled shapes
    decode_rows: tuple[int, ...]  # decode rows, ascending; the last one equals `rows`


@dataclass
class PrefillWork:
    """Blocks of prompts: each is (sequence, first position, token count).

    `complete` holds the sequences whose prompt ends with this step, `resumed` those of them that
    were preempted before and know their next token.
    """

    blocks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    complete: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)


@dataclass
class DecodeWork:
    """A decode call of `size` rows: its last rows are these sequences, sorted by slot.

    `source` is the row that each of them had before.
    """

    size: int
    sequences: list[Sequence]
    source: list[int]


class Scheduler:
    """The waiting, prefilling and decoding sequences, and what they hold.

    `settle` is called before a sequence is preempted: it has to hand in the results of everything
    that was launched, so that the tokens of the sequence are known. `refuse` ends a waiting
    sequence whose adapter finds no room on the device.
    """

    def __init__(
        self,
        limits: Limits,
        pages: PagePool,
        residency: Residency,
        settle: Callable[[], None],
        refuse: Callable[[Sequence, str], None],
    ):
        self.limits, self.pages, self.residency = limits, pages, residency
        self.settle, self.refuse = settle, refuse
        self.allowed = limits.rows  # sequences that may run at a time
        self.blocks = limits.prefill_blocks[-1]  # blocks that a prefill call may have
        self.waiting: dict[str, deque[Sequence]] = {}  # by tenant version, oldest first
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.preemptions = 0
        self._served: dict[str, int] = {}  # tokens given to each tenant

    @property
    def running(self) -> list[Sequence]:
        return self.prefilling + self.decoding

    @property
    def busy(self) -> bool:
        return bool(self.prefilling or self.decoding or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a request. A tenant that was away starts level with the least served one."""
        version = sequence.tenant.version
        active = {s.tenant.version for s in self.running} | set(self.waiting)
        if version not in active:
            floor = min((self._served.get(v, 0) for v in active), default=0)
            kept = {v: n for v, n in self._served.items() if v in active or n > floor}
            self._served = kept | {version: max(kept.get(version, 0), floor)}
        self.waiting.setdefault(version, deque()).append(sequence)

    def queued(self) -> list[Sequence]:
        """The sequences that wait and have not begun: no token of theirs is generated."""
        waiting = (sequence for queue in self.waiting.values() for sequence in queue)
        return [sequence for sequence in waiting if not sequence.tokens]

    def schedule_prefill(self) -> PrefillWork | None:
        """Admits what fits and fills a step with prompt tokens, oldest sequences first."""
        self._admit()
        work = PrefillWork()
        for sequence in sorted(self.prefilling, key=_age):
            total = len(sequence.known)
            while sequence.scheduled < total and len(work.blocks) < self.blocks:
                end = total
                if sequence.scheduled < sequence.active_from:  # no block of both kinds of rows
                    end = sequence.active_from
                count = min(self.limits.block, end - sequence.scheduled)
                work.blocks.append((sequence, sequence.scheduled, count))
                self._schedule(sequence, sequence.scheduled + count)
            if sequence.scheduled == total:
                work.complete.append(sequence)
        work.resumed = [sequence for sequence in work.complete if sequence.tokens]
        for sequence in work.complete:
            sequence.row = self._free_row()
            self.prefilling.remove(sequence)
            self.decoding.append(sequence)
            for digest, page in zip(sequence.digests, sequence.pages, strict=False):
                self.pages.publish(digest, page)
        return work if work.blocks else None

    def schedule_decode(self) -> DecodeWork | None:
        """The rows that may still generate, each with pages for the tokens of the next call."""
        for sequence in sorted(self.decoding, key=_age):
            if sequence in self.decoding:  # not preempted or finished meanwhile
                self._extend(sequence)
        rows = sorted(filter(_generates, self.decoding), key=lambda s: (s.slot, s.number))
        size = next(size for size in self.limits.decode_rows if size >= len(rows))
        work = DecodeWork(size, rows, [s.row for s in rows])
        for sequence in self.decoding:
            sequence.row = None
        for row, sequence in enumerate(rows, size - len(rows)):
            sequence.row = row
            self._schedule(sequence, self._ahead(sequence))
        return work if rows else None

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds."""
        sequence.finished = True
        if sequence in self.running:
            (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
            self._let_go(sequence)
        else:
            self._unqueue(sequence)

    def preempt_all(self) -> None:
        """Takes every sequence off the device; all are computed again."""
        for sequence in sorted(self.running, key=_age, reverse=True):
            self._preempt(sequence)

    def shrink(self) -> None:
        """Half as many sequences at a time from now on, and short prefill calls."""
        self.allowed = max(1, self.allowed // 2)
        self.blocks = self.limits.prefill_blocks[0]

    def recover(self) -> None:
        """One sequence more at a time, until the limits are reached."""
        self.allowed = min(self.limits.rows, self.allowed + 1)
        if self.allowed == self.limits.rows:
            self.blocks = self.limits.prefill_blocks[-1]

    def _schedule(self, sequence: Sequence, position: int) -> None:
        self._served[sequence.tenant.version] += position - sequence.scheduled
        sequence.scheduled = position

    def _ahead(self, sequence: Sequence) -> int:
        """The position up to which the next decode call may write keys."""
        return min(sequence.limit - 1, sequence.scheduled + self.limits.steps)

    def _free_row(self) -> int:
        used = {s.row for s in self.decoding}
        return next(row for row in range(self.limits.rows) if row not in used)

    def _admit(self) -> None:
        """Admits requests: of the least served tenant first, of one tenant in order of arrival.

        A request whose adapter finds no slot is overtaken, but only PATIENCE times.
        """
        blocked: list[Sequence] = []
        given: Counter[str] = Counter()  # prompt tokens that this call admits
        heads = [self._head(queue[0], 0) for queue in self.waiting.values()]
        heapq.heapify(heads)
        while heads and len(self.running) < self.allowed:
            *_, head = heapq.heappop(heads)
            try:
                slot = self.residency.acquire(head.tenant)
            except OutOfDeviceMemory as error:
                self.refuse(head, str(error))
                slot = None
            else:
                if slot is None:
                    blocked.append(head)
                    if head.overtaken >= PATIENCE:
                        return
                    continue
                if not self._take_pages(head):
                    self.residency.release(head.tenant)
                    return
                head.slot = slot
                self._unqueue(head)
                self.prefilling.append(head)
                given[head.tenant.version] += len(head.known)
                for sequence in blocked:
                    sequence.overtaken += 1
            if queue := self.waiting.get(head.tenant.version):
                heapq.heappush(heads, self._head(queue[0], given[head.tenant.version]))

    def _head(self, sequence: Sequence, given: int) -> tuple[int, int, Sequence]:
        return self._served[sequence.tenant.version] + given, sequence.number, sequence

    def _take_pages(self, sequence: Sequence) -> bool:
        """Pages for all tokens to prefill, shared as far as their keys are there already."""
        known, page_size = sequence.known, self.pages.page_size
        version, since = sequence.tenant.version, sequence.active_from
        sequence.digests = page_digests(version, known, page_size, since, BASE.version)
        shareable = [] if sequence.wants_prompt_logprobs else sequence.digests
        shared = self.pages.share(shareable[: (len(known) - 1) // page_size])
        needed = -(-(len(known) + 1) // page_size) - len(shared)
        # Leave a page for each running sequence, or they would soon preempt the newcomer.
        enough = needed + len(self.running) <= self.pages.available
        taken = self.pages.take(needed) if enough or not self.running else None
        if taken is None:
            self.pages.give_back(shared)
            return False
        sequence.pages = shared + taken
        sequence.scheduled = len(shared) * page_size
        return True

    def _extend(self, sequence: Sequence) -> None:
        """Pages for the next decode call; while there are none, the youngest gives way."""
        while sequence in self.decoding:
            missing = -(-self._ahead(sequence) // self.pages.page_size) - len(sequence.pages)
            if missing <= 0:
                return
            taken = self.pages.take(missing)
            if taken is not None:
                sequence.pages += taken
                return
            self.settle()
            if self.pages.available < missing and sequence in self.decoding:
                self._preempt(max(self.running, key=_age))

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence off the device; it is computed again, from its known tokens, later."""
        self.preemptions += 1
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)
        self._let_go(sequence)
        self.waiting.setdefault(sequence.tenant.version, deque()).appendleft(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        self.residency.release(sequence.tenant)
        sequence.pages, sequence.slot, sequence.row, sequence.scheduled = [], None, None, 0

    def _unqueue(self, sequence: Sequence) -> None:
        queue = self.waiting.get(sequence.tenant.version, deque())
        if sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self.waiting[sequence.tenant.version]


def _age(sequence: Sequence) -> int:
    return sequence.number


def _generates(sequence: Sequence) -> bool:
    return sequence.scheduled < sequence.limit - 1

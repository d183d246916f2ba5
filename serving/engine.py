"""The engine: requests in, texts out, many adapters at once.

    submit -> [schedule -> launch prefill, launch decode -> read results -> retire]*

The loop is `step`; `generate` and `stream` call it until their own requests are done, and
AsyncEngine on a thread of its own.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import jax

from scute_jax.errors import AdapterError
from scute_jax.models.checkpoint import load_model
from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.models.params import LlamaParams
from scute_jax.models.tokenizer import Tokenizer, load_tokenizer
from scute_jax.normal_form import Adapter
from scute_jax.peft import load_peft
from scute_jax.peft.base import Base
from scute_jax.serving.compilations import Compilations
from scute_jax.serving.device_memory import OutOfDeviceMemory, out_of_memory
from scute_jax.serving.intake import Intake
from scute_jax.serving.mailbox import Mailbox
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.pages import PagePool
from scute_jax.serving.parts import Parts
from scute_jax.serving.registry import Registry, check_finite
from scute_jax.serving.request import Chunk, Completion, FinishReason, Request, RequestError
from scute_jax.serving.residency import Residency
from scute_jax.serving.results import Launched, generated, prompt_scores
from scute_jax.serving.runner import Progress, Runner
from scute_jax.serving.scheduler import DecodeWork, Scheduler
from scute_jax.serving.sequence import Sequence
from scute_jax.serving.stats import EngineStats, Key, Meter
from scute_jax.serving.turns import FairLock


@dataclass(frozen=True)
class AdapterInfo:
    """One registered adapter. `version` follows from its content."""

    name: str
    method: str
    version: str
    resident: bool
    nbytes: int


@dataclass(frozen=True)
class Ticket:
    """A submitted request: where its pieces arrive, and its sequence unless it was refused."""

    sink: Mailbox
    sequence: Sequence | None


class Engine:
    """One base model with many adapters. Methods may be called from several threads."""

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
    ):
        self.config, self.params, self.tokenizer, self.options = config, params, tokenizer, options
        options.use_compilation_cache()
        options.num_pages(config, params.embed_tokens.dtype)  # raises where no cache fits at all
        self._lock = FairLock()
        self._compilations = Compilations()
        self._registry = Registry()
        self._residency = Residency(
            Base.from_config(config).widths,
            options.max_adapters,
            params.embed_tokens.dtype,
            self._registry.wanted,
        )
        self._opened: Parts | None = None
        self._meter = Meter()
        # What other threads ask for is taken in at the next step: they never wait for one.
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Sequence] = deque()
        self._launched: deque[Launched] = deque()
        self._torn = False  # a step began and did not end: less may be computed than was noted
        self._failures = 0  # out of memory, since a decode call went well
        self._out_of_memory = 0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        max_adapters: int | None = None,
        memory: int | float | None = None,
        dtype: str | None = None,
        **options,
    ) -> "Engine":
        """The engine of a model folder, a GGUF file or a hub id.

        `max_adapters` is how many adapters are on the device at a time (any number can be
        registered), `memory` what the KV cache may take (see EngineOptions), `dtype` that of
        weights and activations ("float32", "bfloat16", "float16"; None = as stored).
        Raises: ModelError naming file and field.
        """
        config, params = load_model(model, dtype)
        given = EngineOptions.defaults(max_adapters=max_adapters, memory=memory, **options)
        return cls(config, params, load_tokenizer(model), given)

    def add_adapter(self, name: str, adapter: str | Path | Adapter) -> AdapterInfo:
        """Registers a PEFT checkpoint (or an adapter in normal form) under a name.

        The checkpoint is read and checked here, whole. Under a name that is taken, it replaces the
        adapter for requests to come; those submitted before finish on the old one.
        Raises: AdapterError; then the engine is as it was.
        """
        if not isinstance(name, str) or not name:
            raise AdapterError(f"an adapter needs a name, not {name!r}.")
        if isinstance(adapter, Adapter):
            check_finite(adapter, name)
        else:
            adapter = load_peft(adapter, self.config, params=self.params)
        tenant, before = self._registry.add(name, adapter)
        with self._lock:
            self._residency.expect(tenant)
            if before is not None:
                self._residency.tidy()
        return AdapterInfo(name, adapter.method, adapter.version, False, adapter.nbytes)

    def remove_adapter(self, name: str) -> None:
        """Forgets a name; requests submitted before still finish.

        Raises: AdapterError if there is no such name.
        """
        self._registry.remove(name)
        with self._lock:
            self._meter.forget(name)
            self._residency.tidy()

    def adapters(self) -> list[AdapterInfo]:
        """The registered adapters."""
        with self._lock:
            resident = self._residency.resident()
            return [
                AdapterInfo(name, a.method, a.version, a.version in resident, a.nbytes)
                for name, a in self._registry.adapters().items()
            ]

    def warm_up(
        self, progress: Progress | None = None, stacks: Iterable[tuple[str, ...]] = ()
    ) -> None:
        """Compiles every step that requests for the registered adapters can need.

        After it nothing compiles, whatever the requests; nor does an adapter that comes later, if
        its slots, sizes and sites are among those of the adapters before it. A stack can need more
        than its adapters: those that will be asked for can be named in `stacks`. `progress` is
        called before each step with (steps done, steps in all, what comes next). Requests in flight
        stand still meanwhile.
        Raises: AdapterError if a stack cannot be made; OutOfDeviceMemory if the device has no room,
        which leaves the requests in flight as they are.
        """
        planned = [self._registry.resolve(names) for names in stacks]
        with self._lock, self._compilations:
            for tenant in planned:
                self._residency.expect(tenant)
            failed = None
            with self._whole():
                try:
                    self._residency.warm_up()
                    self._parts.runner.warm_up(progress or (lambda done, total, what: None))
                except jax.errors.JaxRuntimeError as error:
                    if not out_of_memory(error):
                        raise
                    self._recover(error)
                    failed = error
            if failed is not None:
                raise OutOfDeviceMemory(
                    "the device has no memory left for the steps; give the KV cache less (memory=) "
                    "or have smaller steps (prefill_blocks=, decode_rows=)."
                ) from failed

    def stats(self) -> EngineStats:
        """What the engine has done and holds; see EngineStats."""
        with self._lock:
            running, waiting = Counter[Key](), Counter[Key]()
            parts = self._opened  # None as long as nobody has asked for anything
            for sequence in parts.scheduler.running if parts else ():
                running[sequence.request.adapter] += 1
            queues = parts.scheduler.waiting.values() if parts else ()
            queued = (s for queue in queues for s in queue)
            for sequence in (*queued, *self._arrived.copy()):
                waiting[sequence.request.adapter] += 1
            slots = self._residency.resident()
            tenants = self._registry.tenants()
            places: dict[Key, tuple[int | None, bool]] = {None: (None, True)}
            for name, tenant in tenants.items():
                places[name] = (slots.get(tenant.version), tenant.adapter is None)
            # Stacks, and names that are gone but still run.
            by_names = {self._residency.names(version): slot for version, slot in slots.items()}
            for key in {*self._meter.stacks, *running, *waiting} - set(places):
                places[key] = (by_names.get(key if isinstance(key, tuple) else (key,)), False)
            return EngineStats(
                adapters={
                    key: self._meter.of(key).stats(slot, running[key], waiting[key], everywhere)
                    for key, (slot, everywhere) in places.items()
                },
                running=running.total(),
                waiting=waiting.total(),
                pages_free=parts.pages.available - parts.pages.idle if parts else 0,
                pages_idle=parts.pages.idle if parts else 0,
                pages_used=parts.pages.held if parts else 0,
                slots_free=self.options.max_adapters - len(slots),
                slots_used=len(slots),
                loads=self._residency.loads,
                compilations=self._compilations.total,
                preemptions=parts.scheduler.preemptions if parts else 0,
                out_of_memory=self._out_of_memory,
            )

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """The completions of all requests, in their order. A request that cannot be served has
        finish_reason "error" and says why in `error`; the others are not affected."""
        done: dict[int, Completion] = {}
        for place, chunk in self._run(requests):
            if chunk.completion is not None:
                done[place] = chunk.completion
        return [done[place] for place in range(len(done))]

    def stream(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """Pieces of the texts as they are generated; the last one of each request carries its
        completion. Requests are taken from the iterable as there is room for them. Closing the
        iterator cancels what is left."""
        for _, chunk in self._run(requests):
            yield chunk

    def _run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Chunk]]:
        """(place of the request, piece of its text) until all requests are done."""
        source = enumerate(requests)
        tickets: dict[int, Ticket] = {}
        try:
            while True:
                room = self.options.window - len(tickets)
                for place, request in islice(source, room):
                    tickets[place] = self.submit(request)
                if not tickets:
                    return
                pieces = [(place, ticket.sink.take()) for place, ticket in tickets.items()]
                ready = [(place, chunk) for place, chunk in pieces if chunk is not None]
                if not ready:
                    self.step()
                for place, chunk in ready:
                    if chunk.completion is not None:
                        del tickets[place]
                    yield place, chunk
        finally:
            if tickets:
                for ticket in tickets.values():
                    self.cancel(ticket)
                with self._lock:
                    self._take_in()

    def submit(self, request: Request, sink: Mailbox | None = None) -> Ticket:
        """Queues a request for the steps to come; its pieces go to the sink of the ticket.

        One that cannot be served is answered at once. Never waits for a step that runs, but the
        first one of all has the device divided.
        Raises: ModelError or OutOfDeviceMemory if the device has no room for a KV cache.
        """
        sink = Mailbox() if sink is None else sink
        number = self._parts.intake.number()
        name = request.id if request.id is not None else f"request-{number}"
        try:
            sequence = self._parts.intake.sequence(request, number, name, sink)
        except (RequestError, AdapterError, ModelError) as error:
            refused = Completion(name, request.adapter, "", (), "error", error=str(error))
            sink.put(Chunk(name, "", (), refused))
            return Ticket(sink, None)
        self._arrived.append(sequence)
        return Ticket(sink, sequence)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request at the next step as it is then, with finish_reason "cancelled"."""
        if ticket.sequence is not None and not ticket.sequence.finished:
            self._cancelled.append(ticket.sequence)

    def cancel_waiting(self) -> None:
        """Cancels every request that has not begun to run; those that have go on to their end."""
        with self._lock:
            self._take_in()
            for sequence in self._opened.scheduler.queued() if self._opened else ():
                self._retire(sequence, "cancelled")

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        running = self._opened is not None and self._opened.scheduler.busy
        return bool(self._arrived or self._cancelled or self._launched or running)

    def step(self) -> None:
        """One round: launches what the scheduler gives and reads the oldest results.

        If it raises (a KeyboardInterrupt, say), the next one computes again what ran.
        """
        with self._lock, self._compilations:
            self._take_in()
            if self._opened is None:  # nobody has asked for anything yet
                return
            with self._whole():
                try:
                    self._round()
                except RuntimeError as error:
                    if not out_of_memory(error) or not self._parts.scheduler.running:
                        raise
                    self._recover(error)

    # How the device is divided.

    @property
    def max_context(self) -> int:
        """How many tokens prompt and text may have together."""
        return self._parts.max_context

    @property
    def _parts(self) -> Parts:
        """Made when they are first needed: the bank of the adapters registered until then comes
        first, and the cache takes what it leaves."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = self._open()
        return self._opened

    def _open(self) -> Parts:
        config, options, residency = self.config, self.options, self._residency
        try:
            residency.prepare()
        except OutOfDeviceMemory:
            pass  # whoever asks for one of these adapters is told
        dtype = self.params.embed_tokens.dtype
        try:
            num_pages = options.num_pages(config, dtype, residency.nbytes)
        except ModelError:
            if not residency.nbytes:
                raise
            residency.give_up()
            num_pages = options.num_pages(config, dtype)
        max_context = min(config.max_context, num_pages * options.page_size)
        pages = PagePool(num_pages, options.page_size)
        try:
            runner = Runner(config, self.params, residency, options, num_pages)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise OutOfDeviceMemory(
                f"the device has no memory left for a KV cache of {num_pages} pages; give it less "
                "(memory=), or have fewer adapters at a time (max_adapters=)."
            ) from error
        return Parts(
            max_context=max_context,
            intake=Intake(config, self.tokenizer, self._registry, max_context),
            pages=pages,
            runner=runner,
            scheduler=Scheduler(options.limits(), pages, residency, self._settle, self._refuse),
        )

    # The steps of the loop.

    def _take_in(self) -> None:
        """Queues what was submitted and ends what was cancelled since the last step."""
        while self._arrived:
            self._parts.scheduler.add(self._arrived.popleft())
        while self._cancelled:
            sequence = self._cancelled.popleft()
            if not sequence.finished:
                self._retire(sequence, "cancelled")

    def _round(self) -> None:
        launched = False
        if work := self._parts.scheduler.schedule_prefill():
            self._launched.append(Launched(work, *self._parts.runner.prefill(work)))
            launched = True
        if work := self._parts.scheduler.schedule_decode():
            self._launched.append(Launched(work, self._parts.runner.decode(work)))
            launched = True
        ahead = self.options.ahead if launched else 0
        while len(self._launched) > ahead:
            self._read()

    def _recover(self, error: RuntimeError) -> None:
        """Goes on after the device ran out of memory, with half as many sequences at a time.

        What ran is computed again. If a second try runs out of memory, too, the youngest running
        request ends with an error, and so on until a step goes well.
        """
        self._out_of_memory += 1
        self._failures += 1
        try:
            self._settle()
        except jax.errors.JaxRuntimeError:  # of a step that was launched before
            self._launched.clear()
        running = self._parts.scheduler.running
        if self._failures > 1 and running:
            youngest = max(running, key=lambda sequence: sequence.number)
            reason = str(error).strip().partition("\n")[0]
            self._refuse(
                youngest,
                "the device ran out of memory while this request ran, the last to arrive; give the "
                f"KV cache less (memory=), or have fewer rows or adapters at a time. {reason}",
            )
        self._parts.scheduler.shrink()
        self._start_over()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is launched within counts once it is left; after an exception all is started over
        before anything else is launched."""
        if self._torn:
            self._start_over()
        self._torn = True
        yield
        self._torn = False

    def _start_over(self) -> None:
        """Takes what runs off the device, to be computed again on an empty cache."""
        self._launched.clear()
        for sequence in self._parts.scheduler.running:
            if sequence.ended is not None:  # its last token was read, and no more
                self._retire(sequence, sequence.ended)
        self._parts.scheduler.preempt_all()
        if self._residency.lost:
            self._residency.forget()
        self._parts.pages.forget()
        self._parts.runner.reset()

    def _settle(self) -> None:
        """Reads the results of everything that was launched."""
        while self._launched:
            self._read()

    def _read(self) -> None:
        """Hands the tokens of the oldest step to their sequences, and ends those that are done."""
        launched = self._launched.popleft()
        for sequence, position, token in prompt_scores(launched):
            if position == len(sequence.prompt_scores):  # not computed before a preemption
                sequence.prompt_scores.append(token)
        fresh: dict[Sequence, list[int]] = {}
        ends: dict[Sequence, tuple[FinishReason, str | None]] = {}
        for sequence, token in list(generated(launched)):  # waits here, before anything is noted
            if sequence.finished or sequence in ends:
                continue
            if math.isnan(token.logprob):
                names = " + ".join(sequence.tenant.names) or "the base model"
                ends[sequence] = ("error", f"{names} gave logits that are not numbers.")
                continue
            reason = sequence.add(token)
            fresh.setdefault(sequence, []).append(token.token)
            if reason is not None:
                ends[sequence] = (reason, None)
        now = time.monotonic()
        for sequence, tokens in fresh.items():
            self._meter.generated(sequence, len(tokens), now)
            if sequence not in ends:
                sequence.sink.put(Chunk(sequence.id, sequence.text.take(), tuple(tokens)))
        for sequence, (reason, error) in ends.items():
            self._retire(sequence, reason, error, fresh.get(sequence, ()))
        if isinstance(launched.work, DecodeWork):
            self._failures = 0
            self._parts.scheduler.recover()

    def _refuse(self, sequence: Sequence, error: str) -> None:
        self._retire(sequence, "error", error)

    def _retire(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        tokens: Iterable[int] = (),
    ) -> None:
        self._parts.scheduler.finish(sequence)
        self._meter.ended(sequence, reason)
        sequence.text.finish()
        completion = sequence.completion(reason, error)
        new = sequence.text.take(final=True)
        sequence.sink.put(Chunk(sequence.id, new, tuple(tokens), completion))

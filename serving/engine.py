"""The engine: requests in, texts out, many adapters at once.

    submit -> [schedule -> launch prefill, launch decode -> read results -> retire]*

The loop is `step`; `generate` and `stream` call it until their own requests are done.
"""

import math
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from scute_jax.errors import AdapterError
from scute_jax.models.checkpoint import load_model
from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.models.params import LlamaParams
from scute_jax.models.tokenizer import Tokenizer, load_tokenizer
from scute_jax.normal_form import Adapter
from scute_jax.peft import load_peft
from scute_jax.peft.base import Base
from scute_jax.serving.launch import MAX_STOP_TOKENS
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.pages import PagePool
from scute_jax.serving.registry import Registry, Tenant
from scute_jax.serving.request import Chunk, Completion, FinishReason, Request, RequestError
from scute_jax.serving.residency import Residency
from scute_jax.serving.results import Launched, generated, prompt_scores
from scute_jax.serving.runner import Runner
from scute_jax.serving.scheduler import Scheduler
from scute_jax.serving.sequence import Sequence
from scute_jax.serving.text import TextStream


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

    sink: deque[Chunk]
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
        dtype = params.embed_tokens.dtype
        num_pages = options.num_pages(config, dtype)
        self.max_context = min(config.max_context, num_pages * options.page_size)
        self._lock = threading.RLock()
        self._registry = Registry()
        self._pages = PagePool(num_pages, options.page_size)
        widths = {p.site: (p.d_in, p.d_out) for p in Base.from_config(config).projections}
        self._residency = Residency(widths, options.max_adapters, dtype)
        self._runner = Runner(config, params, self._residency, options, num_pages)
        self._scheduler = Scheduler(options.limits(), self._pages, self._residency, self._settle)
        self._launched: deque[Launched] = deque()
        self._arrivals = 0

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
        if not name:
            raise AdapterError("an adapter needs a name.")
        if not isinstance(adapter, Adapter):
            adapter = load_peft(adapter, self.config, params=self.params)
        with self._lock:
            before = self._registry.add(name, adapter)
            if before is not None and before.version != adapter.version:
                self._drop(before)
        return AdapterInfo(name, adapter.method, adapter.version, False, adapter.nbytes)

    def remove_adapter(self, name: str) -> None:
        """Forgets a name; requests submitted before still finish.

        Raises: AdapterError if there is no such name.
        """
        with self._lock:
            self._drop(self._registry.remove(name))

    def adapters(self) -> list[AdapterInfo]:
        """The registered adapters."""
        with self._lock:
            resident = set(self._residency.resident())
            return [
                AdapterInfo(name, a.method, a.version, a.version in resident, a.nbytes)
                for name, a in self._registry.adapters().items()
            ]

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
        with self._lock:
            self._residency.reserve(self._registry.tenants())
        try:
            while True:
                room = self.options.window - len(tickets)
                for place, request in islice(source, room):
                    with self._lock:
                        tickets[place] = self._submit(request)
                if not tickets:
                    return
                ready = [place for place, ticket in tickets.items() if ticket.sink]
                if not ready:
                    self.step()
                for place in ready:
                    sink = tickets[place].sink
                    while sink:
                        chunk = sink.popleft()
                        if chunk.completion is not None:
                            del tickets[place]
                        yield place, chunk
        finally:
            for ticket in tickets.values():
                if ticket.sequence is not None:
                    self.cancel(ticket.sequence)

    def step(self) -> None:
        """One round: launches what the scheduler gives and reads the oldest results."""
        with self._lock:
            launched = False
            if work := self._scheduler.schedule_prefill():
                self._launched.append(Launched(work, *self._runner.prefill(work)))
                launched = True
            if work := self._scheduler.schedule_decode():
                self._launched.append(Launched(work, self._runner.decode(work)))
                launched = True
            ahead = self.options.ahead if launched else 0
            while len(self._launched) > ahead:
                self._read()

    def cancel_waiting(self) -> None:
        """Cancels every request that has not begun to run; those that have go on to their end."""
        with self._lock:
            for sequence in self._scheduler.queued():
                self._retire(sequence, "cancelled")

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request as it is, with finish_reason "cancelled"."""
        with self._lock:
            if not sequence.finished:
                self._retire(sequence, "cancelled")

    # The steps of the loop.

    def _submit(self, request: Request) -> "Ticket":
        """Queues a request. One that cannot be served is answered at once."""
        self._arrivals += 1
        name = request.id if request.id is not None else f"request-{self._arrivals}"
        try:
            sequence = self._sequence(request, name)
        except (RequestError, AdapterError, ModelError) as error:
            refused = Completion(name, request.adapter, "", (), "error", error=str(error))
            return Ticket(deque([Chunk(name, "", (), refused)]), None)
        self._scheduler.add(sequence)
        return Ticket(sequence.sink, sequence)

    def _sequence(self, request: Request, name: str) -> Sequence:
        sampling = request.sampling
        tenant = self._registry.resolve(request.adapter_names)
        prompt = self._prompt(request)
        eos = () if sampling.ignore_eos else self.config.eos_token_id[:MAX_STOP_TOKENS]
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed % (1 << 32)
        decoder = None if self.tokenizer is None else self.tokenizer.stream()
        return Sequence(
            id=name,
            number=self._arrivals,
            request=request,
            tenant=tenant,
            prompt=prompt,
            limit=min(self.max_context, len(prompt) + sampling.max_tokens),
            stop_tokens=tuple(eos),
            seed=seed,
            text=TextStream(decoder, sampling.stop),
        )

    def _prompt(self, request: Request) -> tuple[int, ...]:
        """The token ids of a request. Raises: RequestError if there are none, or too many."""
        if request.prompt_token_ids is not None:
            ids = tuple(request.prompt_token_ids)
            vocab = self.config.vocab_size
            wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i < vocab]
            if wrong:
                raise RequestError(
                    f"prompt_token_ids holds {wrong[0]!r}; ids run from 0 to {vocab - 1}."
                )
        elif self.tokenizer is None:
            raise RequestError(
                "the model folder has no tokenizer: give prompt_token_ids in place of "
                f"{'prompt' if request.prompt is not None else 'messages'}."
            )
        elif request.prompt is not None:
            ids = tuple(self.tokenizer.encode(request.prompt))
        else:
            ids = tuple(self.tokenizer.encode_chat(request.messages))
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one.")
        if len(ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but prompt and text together may have "
                f"{self.max_context}; shorten it or give the cache more memory."
            )
        return ids

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
        for sequence, token in generated(launched):
            if sequence.finished:
                continue
            reason = sequence.add(token)
            fresh.setdefault(sequence, []).append(token.token)
            if math.isnan(token.logprob):
                names = " + ".join(sequence.tenant.names) or "the base model"
                self._retire(sequence, "error", f"{names} gave logits that are not numbers.")
            elif reason is not None:
                self._retire(sequence, reason, tokens=fresh.pop(sequence))
        for sequence, tokens in fresh.items():
            if not sequence.finished:
                sequence.sink.append(Chunk(sequence.id, sequence.text.take(), tuple(tokens)))

    def _retire(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        tokens: Iterable[int] = (),
    ) -> None:
        self._scheduler.finish(sequence)
        sequence.text.finish()
        completion = sequence.completion(reason, error)
        new = sequence.text.take(final=True)
        sequence.sink.append(Chunk(sequence.id, new, tuple(tokens), completion))

    def _drop(self, tenant: Tenant) -> None:
        """Frees the slot of a tenant that no name leads to any more."""
        if all(other.version != tenant.version for other in self._registry.tenants()):
            self._residency.drop(tenant)

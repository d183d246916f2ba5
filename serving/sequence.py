"""One request on its way through the engine: what the host knows of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from scute_jax.serving.mailbox import Mailbox
from scute_jax.serving.registry import Tenant
from scute_jax.serving.request import Completion, FinishReason, Request
from scute_jax.serving.text import TextStream


@dataclass(frozen=True)
class Token:
    """A token with the log-probability the model gave it, and the most likely ones beside it."""

    token: int
    logprob: float
    top: Mapping[int, float]


@dataclass(eq=False)
class Sequence:
    """A request with its tokens, its place on the device and its text so far.

    `scheduled` counts the positions whose keys are written once everything launched so far has
    run; results may lag behind. A sequence that was preempted starts over with scheduled == 0 and
    keeps its tokens.
    """

    id: str
    number: int  # order of arrival
    request: Request
    tenant: Tenant
    prompt: tuple[int, ...]
    limit: int  # tokens of prompt and text together at most
    stop_tokens: tuple[int, ...]
    seed: int
    text: TextStream
    active_from: int = 0  # the position from which its adapter acts; before it, rows are base rows
    sink: Mailbox = field(default_factory=Mailbox)  # what its requester has not taken yet
    tokens: list[Token] = field(default_factory=list)  # generated
    prompt_scores: list[Token | None] = field(default_factory=lambda: [None])

    slot: int | None = None  # of the bank, while it runs; -1 = base model
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    row: int | None = None  # its row in the decode state, once its prompt is complete
    scheduled: int = 0
    overtaken: int = 0  # how often a later request was admitted before it
    ended: FinishReason | None = None  # why its text ends with its last token
    finished: bool = False

    arrived_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None  # when its first token was known
    last_at: float = 0.0

    def add(self, token: Token) -> FinishReason | None:
        """Adds a generated token; the reason to finish if the text ends with it."""
        self.tokens.append(token)
        if token.token in self.stop_tokens or self.text.push(token.token):
            self.ended = "stop"
        elif len(self.prompt) + len(self.tokens) >= self.limit:
            self.ended = "length"
        return self.ended

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """What the requester gets in the end."""
        sampling = self.request.sampling
        scores, prompt = self.tokens, self.prompt_scores
        with_logprobs = sampling.logprobs is not None
        with_prompt = self.wants_prompt_logprobs
        return Completion(
            id=self.id,
            adapter=self.request.adapter,
            text=self.text.text,
            token_ids=tuple(t.token for t in scores),
            finish_reason=reason,
            logprobs=tuple(t.logprob for t in scores) if with_logprobs else None,
            top_logprobs=tuple(t.top for t in scores) if sampling.logprobs else None,
            prompt_logprobs=tuple(t and t.logprob for t in prompt) if with_prompt else None,
            prompt_top_logprobs=(
                tuple(t and t.top for t in prompt) if sampling.prompt_logprobs else None
            ),
            prompt_tokens=len(self.prompt),
            error=error,
        )

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens to prefill: the prompt, and after a preemption all but the last generated."""
        return self.prompt + tuple(token.token for token in self.tokens[:-1])

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

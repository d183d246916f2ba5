"""What goes into the engine and what comes out of it: plain values, checked where they are made."""

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_FLOAT = sys.float_info.max  # a whole number can be larger
MAX_TOP_K = 2**31 - 1
MAX_TEMPERATURE = 1e6


class RequestError(ValueError):
    """A request that cannot be served; the message names the field and what it needs."""


@dataclass(frozen=True)
class SamplingParams:
    """How the text of one request is drawn.

    temperature 0 is greedy decoding. top_k 0 and top_p 1 keep the whole vocabulary; top_k is
    applied before top_p. With a seed, the same request gives the same text whatever else is in the
    batch; without one, a seed is drawn. `logprobs` and `prompt_logprobs`: None = not wanted, k >= 0
    = log-probabilities of the tokens, with the k most likely alternatives beside them.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", tuple(stop) if isinstance(stop, list | tuple) else stop)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, 0 if getattr(self, name) else None)
        _check_sampling(self)


@dataclass(frozen=True)
class Request:
    """One text to generate: exactly one of prompt, messages and prompt_token_ids.

    `adapter` is None for the base model, a name, or several names stacked in order: the second is
    applied to the output of the first. `scale` is how strong the effect of the adapter is at every
    site, 1 as it was trained and 0 the base model: one number, or one for each stacked adapter.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    adapter: str | Sequence[str] | None = None
    scale: float | Sequence[float] = 1.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str | None = None

    def __post_init__(self) -> None:
        given = [
            n for n in ("prompt", "messages", "prompt_token_ids") if getattr(self, n) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                "a request needs exactly one of prompt, messages and prompt_token_ids; "
                f"this one has {' and '.join(given) or 'none of them'}."
            )
        _check_prompt(self)
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling must be SamplingParams, not {self.sampling!r}.")
        if not isinstance(self.adapter, str | None):
            names = tuple(self.adapter) if isinstance(self.adapter, list | tuple) else ()
            if not names or not all(isinstance(name, str) and name for name in names):
                raise RequestError(
                    f"adapter must be a name or a list of names, not {self.adapter!r}."
                )
            adapter = names if len(names) > 1 else next(iter(names))
            object.__setattr__(self, "adapter", adapter)
        if self.adapter == "":
            raise RequestError("adapter must be a name; leave the field out for the base model.")
        _check_scale(self)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters to stack, in order; empty for the base model."""
        if self.adapter is None:
            return ()
        return (self.adapter,) if isinstance(self.adapter, str) else tuple(self.adapter)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale of each adapter."""
        if isinstance(self.scale, int | float):
            return (float(self.scale),) * len(self.adapter_names)
        return tuple(self.scale)


@dataclass(frozen=True)
class Completion:
    """What became of one request.

    `token_ids` holds every generated token, an end-of-text token included; `text` leaves special
    tokens and the stop string out. Log-probabilities are those of the model, before temperature
    and filters, natural logarithm; one per token, None for the first prompt token.
    """

    id: str
    adapter: str | tuple[str, ...] | None
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    prompt_top_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    prompt_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a text as it grows; the last one of a request carries the completion."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


def _check_prompt(request: Request) -> None:
    """Ids become a tuple of whole numbers, whatever kind of array they come in."""
    prompt, messages, ids = request.prompt, request.messages, request.prompt_token_ids
    if not isinstance(prompt, str | None):
        raise RequestError(f"prompt has to be a string, not {prompt!r}.")
    if messages is not None and not (
        isinstance(messages, list | tuple)
        and messages
        and all(isinstance(message, Mapping) for message in messages)
    ):
        raise RequestError("messages has to be a list of objects with role and content.")
    if ids is None:
        return
    try:
        whole = tuple(map(_index, ids))
    except TypeError:
        message = f"prompt_token_ids has to be a list of whole numbers, not {ids!r:.80}."
        raise RequestError(message) from None
    object.__setattr__(request, "prompt_token_ids", whole)


def _index(value: Any) -> int:
    """A whole number of any kind. Raises: TypeError for anything else, a bool too."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _check_scale(request: Request) -> None:
    scale, count = request.scale, len(request.adapter_names)
    numbers = scale if isinstance(scale, list | tuple) else (scale,)
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, int | float) or not abs(n) <= MAX_FLOAT:
            raise RequestError(f"scale must be a finite number, or a list of them, not {n!r:.50}.")
    if not count and any(n != 1 for n in numbers):
        raise RequestError("scale needs an adapter: the base model has no effect to scale.")
    if isinstance(scale, list | tuple):
        if len(scale) != count:
            raise RequestError(
                f"scale has {len(scale)} numbers, but the request names {count} adapters; give "
                "one number for all, or one for each."
            )
        object.__setattr__(request, "scale", tuple(map(float, scale)))


def _check_sampling(p: SamplingParams) -> None:
    def need(ok: bool, name: str, what: str) -> None:
        if not ok:
            raise RequestError(f"{name} must be {what}, not {getattr(p, name)!r:.50}.")

    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    need(whole(p.max_tokens) and p.max_tokens >= 1, "max_tokens", "a whole number from 1 up")
    need(
        number(p.temperature) and 0 <= p.temperature <= MAX_TEMPERATURE,
        "temperature",
        f"a number from 0 to {MAX_TEMPERATURE:,.0f}",
    )
    need(number(p.top_p) and 0 < p.top_p <= 1, "top_p", "a number above 0 and up to 1")
    need(
        whole(p.top_k) and 0 <= p.top_k <= MAX_TOP_K,
        "top_k",
        f"a whole number up to {MAX_TOP_K}, 0 for no limit",
    )
    need(p.seed is None or whole(p.seed), "seed", "a whole number or null")
    need(
        isinstance(p.stop, tuple)
        and all(isinstance(s, str) and s for s in p.stop)
        and len(p.stop) <= MAX_STOP_STRINGS,
        "stop",
        f"a string or up to {MAX_STOP_STRINGS} strings, none empty",
    )
    need(isinstance(p.ignore_eos, bool), "ignore_eos", "true or false")
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(p, name)
        need(
            k is None or (whole(k) and 0 <= k <= MAX_TOP_LOGPROBS),
            name,
            f"null or a whole number from 0 to {MAX_TOP_LOGPROBS}",
        )

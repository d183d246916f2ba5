"""From a request to a sequence that can be scheduled, or to the reason why it cannot be."""

import itertools
import secrets

from scute_jax.models.adapters import invoked_at, vocabulary
from scute_jax.models.config import LlamaConfig
from scute_jax.models.tokenizer import Tokenizer
from scute_jax.serving.launch import MAX_STOP_TOKENS
from scute_jax.serving.mailbox import Mailbox
from scute_jax.serving.registry import BASE, Registry, Tenant
from scute_jax.serving.request import Request, RequestError
from scute_jax.serving.sequence import Sequence
from scute_jax.serving.text import TextStream


class Intake:
    """Tokenizes and checks requests. Safe to use from several threads."""

    def __init__(
        self,
        config: LlamaConfig,
        tokenizer: Tokenizer | None,
        registry: Registry,
        max_context: int,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._registry, self._max_context = registry, max_context
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """The place of the next request in the order of arrival."""
        return next(self._numbers)

    def sequence(self, request: Request, number: int, name: str, sink: Mailbox) -> Sequence:
        """The sequence of a request.

        Raises: RequestError, AdapterError or ModelError if it cannot be served.
        """
        sampling = request.sampling
        tenant = self._registry.resolve(request.adapter_names, request.scales)
        prompt = self._prompt(request, tenant)
        active_from = invoked_at(tenant.adapter, prompt)
        if active_from is None:
            tenant, active_from = BASE, 0
        eos = () if sampling.ignore_eos else self._config.eos_token_id[:MAX_STOP_TOKENS]
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed % (1 << 32)
        decoder = None if self._tokenizer is None else self._tokenizer.stream()
        return Sequence(
            id=name,
            number=number,
            request=request,
            tenant=tenant,
            prompt=prompt,
            limit=min(self._max_context, len(prompt) + sampling.max_tokens),
            stop_tokens=tuple(eos),
            seed=seed,
            text=TextStream(decoder, sampling.stop),
            active_from=active_from,
            sink=sink,
        )

    def _prompt(self, request: Request, tenant: Tenant) -> tuple[int, ...]:
        """The token ids of a request. Raises: RequestError if there are none, or too many."""
        if request.prompt_token_ids is not None:
            ids = tuple(request.prompt_token_ids)
            vocab = vocabulary(tenant.adapter, self._config.vocab_size)
            wrong = [i for i in ids if not 0 <= i < vocab]
            if wrong:
                raise RequestError(
                    f"prompt_token_ids holds {wrong[0]!r}; ids run from 0 to {vocab - 1}."
                )
        elif self._tokenizer is None:
            raise RequestError(
                "the model folder has no tokenizer: give prompt_token_ids in place of "
                f"{'prompt' if request.prompt is not None else 'messages'}."
            )
        elif request.prompt is not None:
            ids = tuple(self._tokenizer.encode(request.prompt))
        else:
            ids = tuple(self._tokenizer.encode_chat(request.messages))
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one.")
        if len(ids) >= self._max_context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but prompt and text together may have "
                f"{self._max_context}; shorten it or give the cache more memory."
            )
        return ids

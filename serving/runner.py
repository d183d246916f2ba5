"""Launches the compiled steps, and keeps on the device what passes from one to the next."""

from functools import partial

import jax

from scute_jax.models.cache import KVCache
from scute_jax.models.config import LlamaConfig
from scute_jax.models.llama import Slots
from scute_jax.models.params import LlamaParams
from scute_jax.serving.launch import decode_plan, prefill_plan, prompt_targets
from scute_jax.serving.options import EngineOptions
from scute_jax.serving.residency import Residency
from scute_jax.serving.sampling import TokenScores
from scute_jax.serving.scheduler import DecodeWork, PrefillWork
from scute_jax.serving.sequence import Sequence
from scute_jax.serving.steps import Drawn, Rows, decode, prefill, score_prompt
from scute_jax.serving.variants import Variants, needed


class Runner:
    """A call returns at once; the arrays that it returns are filled when the step has run."""

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        residency: Residency,
        options: EngineOptions,
        num_pages: int,
    ):
        self.params, self.residency, self.variants = params, residency, Variants()
        self.limits = options.limits()
        self._width = min(num_pages, -(-config.max_context // options.page_size))
        dtype = params.embed_tokens.dtype
        self._cache = KVCache.create(config, num_pages, options.page_size, dtype)
        self._rows = Rows.create(self.limits.rows)
        how = {"num_slots": residency.max_adapters, "implementation": options.implementation}
        compiled = partial(
            jax.jit, static_argnames=("sampled", "top"), donate_argnames=("cache", "rows")
        )
        self._prefill = compiled(partial(prefill, config=config, **how))
        self._decode = compiled(partial(decode, config=config, steps=options.steps, **how))
        self._score = jax.jit(partial(score_prompt, **how), static_argnames="top")

    def prefill(self, work: PrefillWork) -> tuple[Drawn, TokenScores | None]:
        """The first tokens of the prompts that are complete; scores of prompt tokens if wanted."""
        plan = prefill_plan(work, self.limits, self._width)
        sequences = list(dict.fromkeys(sequence for sequence, _, _ in work.blocks))
        slots, how = self._variant(("prefill", plan.row.shape), sequences)
        self._cache, self._rows, drawn, hidden = self._prefill(
            self.params, slots, self._cache, self._rows, plan, **how
        )
        if not any(sequence.wants_prompt_logprobs for sequence in sequences):
            return drawn, None
        targets = prompt_targets(work, plan.batch.tokens.shape)
        blocks = (plan.block_slot, plan.batch.rows)
        scores = self._score(self.params, slots, hidden, targets, *blocks, top=how["top"])
        return drawn, scores

    def decode(self, work: DecodeWork) -> Drawn:
        """The tokens of several steps of each row."""
        plan = decode_plan(work, self._width)
        slots, how = self._variant(("decode", plan.slot.shape), work.sequences)
        self._cache, self._rows, drawn = self._decode(
            self.params, slots, self._cache, self._rows, plan, **how
        )
        return drawn

    def _variant(self, shape: tuple, sequences: list[Sequence]) -> tuple[Slots, dict]:
        variant = self.variants.choose(shape, needed(sequences), self.residency.routes)
        slots = self.residency.slots(variant.routes)
        return slots, {"sampled": variant.sampled, "top": variant.top}

    @property
    def compiled(self) -> int:
        """How many steps were compiled so far."""
        return sum(step._cache_size() for step in (self._prefill, self._decode, self._score))

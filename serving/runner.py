"""Launches the compiled steps, and keeps on the device what passes from one to the next."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
from jaxtyping import Array

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
from scute_jax.serving.steps import Drawn, PrefillPlan, Rows, decode, prefill, score_prompt
from scute_jax.serving.variants import Variant, Variants, ladder, needed

Progress = Callable[[int, int, str], None]  # how many are done, of how many, which one is next

_STATIC = ("config", "num_slots", "sampled", "top", "implementation")
_DONATED = ("cache", "rows")


def compiler_options() -> dict[str, bool | int]:
    """How XLA compiles a step. On a GPU, products of the same rows are not to be merged: XLA would
    copy their weights side by side at every step, or take the results apart again."""
    on_gpu = jax.default_backend() == "gpu"
    return {"xla_gpu_dot_merger_threshold_mb": 0} if on_gpu else {}


@cache
def programs() -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """The jitted prefill and decode steps."""
    how = {"donate_argnames": _DONATED, "compiler_options": compiler_options()}
    return (
        jax.jit(prefill, static_argnames=_STATIC, **how),
        jax.jit(decode, static_argnames=(*_STATIC, "steps"), **how),
    )


_SCORE = jax.jit(score_prompt, static_argnames=("num_slots", "top", "implementation"))


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
        self._new_cache = partial(KVCache.create, config, num_pages, options.page_size, dtype)
        self.reset()
        how = {"num_slots": residency.max_adapters, "implementation": options.implementation}
        prefills, decodes = programs()
        self._prefill = partial(prefills, config=config, **how)
        self._decode = partial(decodes, config=config, steps=options.steps, **how)
        self._score = partial(_SCORE, **how)

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
        return drawn, self._prompt_scores(slots, hidden, targets, plan, how["top"])

    def decode(self, work: DecodeWork) -> Drawn:
        """The tokens of several steps of each row."""
        plan = decode_plan(work, self._width)
        slots, how = self._variant(("decode", plan.slot.shape), work.sequences)
        self._cache, self._rows, drawn = self._decode(
            self.params, slots, self._cache, self._rows, plan, **how
        )
        return drawn

    def reset(self) -> None:
        """An empty cache, and no rows."""
        self._cache = self._rows = None  # frees the old ones before the new ones are made
        self._cache = self._new_cache()
        self._rows = Rows.create(self.limits.rows)

    def warm_up(self, progress: Progress) -> None:
        """Compiles every shape of every variant that a batch of registered adapters can need.

        The steps run once, on rows that are not there: sequences in flight are not touched.
        """
        variants = ladder(self.residency.routes)
        prefills = [(size, v) for size in self.limits.prefill_blocks for v in variants]
        decodes = [(size, v) for size in self.limits.decode_rows for v in variants]
        total = len(prefills) + len(decodes)
        for done, (size, variant) in enumerate(prefills):
            progress(done, total, f"prefill of {size} blocks, {variant}")
            self._warm_prefill(size, variant)
        for done, (size, variant) in enumerate(decodes, len(prefills)):
            progress(done, total, f"decode of {size} rows, {variant}")
            work = DecodeWork(size, [], [])
            slots, how = self._ready(("decode", (size,)), variant)
            plan = decode_plan(work, self._width)
            self._cache, *rest = self._decode(
                self.params, slots, self._cache, Rows.create(self.limits.rows), plan, **how
            )
            jax.block_until_ready(rest)
        progress(total, total, "ready")

    def _warm_prefill(self, size: int, variant: Variant) -> None:
        plan = prefill_plan(
            PrefillWork(), replace(self.limits, prefill_blocks=(size,)), self._width
        )
        slots, how = self._ready(("prefill", (size,)), variant)
        self._cache, _, _, hidden = self._prefill(
            self.params, slots, self._cache, Rows.create(self.limits.rows), plan, **how
        )
        targets = prompt_targets(PrefillWork(), plan.batch.tokens.shape)
        jax.block_until_ready(self._prompt_scores(slots, hidden, targets, plan, how["top"]))

    def _prompt_scores(
        self, slots: Slots, hidden: Array, targets: np.ndarray, plan: PrefillPlan, top: int
    ) -> TokenScores:
        head = {site: slots[site] for site in ("lm_head",) if site in slots}
        blocks = (plan.block_slot, plan.batch.rows)
        return self._score(self.params, head, hidden, targets, *blocks, top=top)

    def _variant(self, shape: tuple, sequences: list[Sequence]) -> tuple[Slots, dict]:
        variant = self.variants.choose(shape, needed(sequences), self.residency.routes)
        return self._ready(shape, variant)

    def _ready(self, shape: tuple, variant: Variant) -> tuple[Slots, dict]:
        self.variants.add(shape, variant)
        slots = self.residency.slots(variant.routes)
        return slots, {"sampled": variant.sampled, "top": variant.top}

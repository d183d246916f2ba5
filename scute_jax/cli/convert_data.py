"""The data of a conversion: moments that weigh the error, log-probabilities that it changes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scute_jax.cli.texts import read_texts
from scute_jax.delta import Delta
from scute_jax.low_rank import Fit, Moments
from scute_jax.models.config import LlamaConfig
from scute_jax.models.merge import with_delta
from scute_jax.models.observe import (
    Windows,
    num_steps,
    read_by,
    second_moments,
    token_logprobs,
    windows,
)
from scute_jax.models.params import LlamaParams
from scute_jax.models.tokenizer import load_tokenizer
from scute_jax.peft.base import Base

MOMENT_BYTES = 4 << 30  # of second moments that are held at a time
KEPT_BACK = 4  # where windows weigh the error, every fourth of them measures instead


@dataclass(frozen=True)
class Data:
    """The windows of a body of text: those that weigh the error, and those that measure it."""

    weigh: Windows
    measure: Windows

    @classmethod
    def read(cls, path: Path, model: str, config: LlamaConfig, at_most: int, weigh: bool) -> "Data":
        """The first tokens of a file. Raises: ValueError if they are too few."""
        held = windows(read_texts(path, load_tokenizer(model), config.vocab_size), at_most)
        if not weigh and len(held):
            return cls(windows(()), held)
        if len(held) < 2:
            raise ValueError(
                f"--data {path}: {len(held)} window(s) of text within --data-tokens {at_most}, "
                "needed two or more with asvd, one with svd; give more text."
            )
        measures = np.arange(len(held)) % min(KEPT_BACK, len(held)) == 0
        return cls(held[~measures], held[measures])


class InputMoments:
    """The second moments of the input of a site, made for as many sites at once as fit."""

    def __init__(self, params: LlamaParams, config: LlamaConfig, held: Windows):
        self._params, self._config, self._held = params, config, held
        self._groups = _groups(config)
        self._made: dict[str, Moments] = {}
        self.on_step: Callable[[], None] = lambda: None

    @property
    def steps(self) -> int:
        return num_steps(self._held) * len(self._groups)

    def __call__(self, site: str) -> Moments:
        if site == "embed_tokens":
            return second_moments(self._params, self._config, self._held, (site,))[site]
        if site not in self._made:
            self._made = {}  # before the next are made
            group = next(group for group in self._groups if site in group)
            self._made = second_moments(self._params, self._config, self._held, group, self.on_step)
        return self._made[site]


def _groups(config: LlamaConfig) -> list[tuple[str, ...]]:
    """The projections in their order, cut where the moments of a group would take too much."""
    groups: list[list[str]] = []
    room, seen = 0, set()
    for p in Base.from_config(config).projections:
        needed = 0 if read_by(p.site) in seen else 4 * p.d_in**2
        if needed > room or not groups:
            groups.append([])
            room = MOMENT_BYTES
        seen.add(read_by(p.site))
        groups[-1].append(p.site)
        room -= needed
    return [tuple(group) for group in groups]


@dataclass(frozen=True)
class Effect:
    """What adapter and LoRA do to the log-probabilities of the tokens of a text, in nats."""

    tokens: int
    rms: float  # of adapter minus base
    share: float  # |LoRA - adapter| / |adapter - base|


class Merged:
    """The base with the adapter, and with the LoRA, built while sites are converted."""

    def __init__(self, params: LlamaParams):
        self._base = self._adapter = self._lora = params

    def add(self, site: str, delta: Delta, found: Fit) -> None:
        self._adapter = with_delta(self._adapter, site, delta.matrix(), delta.shift)
        self._lora = with_delta(self._lora, site, found.A @ found.B, delta.shift)

    def effect(self, config: LlamaConfig, held: Windows, on_step: Callable[[], None]) -> Effect:
        base, adapter, lora = (
            token_logprobs(params, config, held, on_step)
            for params in (self._base, self._adapter, self._lora)
        )
        effect, error = (float(np.linalg.norm(x - adapter)) for x in (base, lora))
        rms = effect / len(base) ** 0.5
        return Effect(len(base), rms, error / effect if effect else 0.0)

"""Rotary positions: the frequency of each pair of a head's components, as transformers has it.

    angle of pair i at position p = p * inv_freq[i]

float32 is kept step by step where transformers keeps it, because an error of one unit in the last
place of a frequency grows with the position it is multiplied with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from scute_jax.models.errors import ModelError

RopeKind = Literal["default", "linear", "llama3"]

# kind -> the numbers it reads, in the order of the fields of Rope
_SCALED: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_KNOWN = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings partial_rotary_factor".split()
)


@dataclass(frozen=True)
class Rope:
    """How positions rotate queries and keys.

    Invariants: factors other than 1 occur only in a kind that reads them.
    """

    theta: float = 10000.0  # the longest wavelength is about 2 pi theta
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3: how far low frequencies are stretched
    low_freq_factor: float = 1.0  # llama3: the band between low and high is blended
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3: context before the stretch

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_positions: int, source: str) -> "Rope":
        """The rope of a config.json, in the `rope_scaling` or the `rope_parameters` spelling.

        Raises: ModelError for a type or a field that is not served, or two spellings that differ.
        """
        both = ("rope_scaling", "rope_parameters")
        given = [name for name in both if config.get(name)] or both[:1]
        made = [_read(config, name, max_positions, source) for name in given]
        if len(set(made)) > 1:
            raise ModelError(
                f"{source}: rope_scaling and rope_parameters disagree: {made[0]} and {made[1]}; "
                "keep one of the two fields."
            )
        return made[0]

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied with: 1.0 for every kind served."""
        return 1.0

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """float32 [head_dim / 2]: radians per position of each pair, fastest first.

        Source: transformers 5.24, modeling_llama.py and modeling_rope_utils.py. The power is
        rounded once from float64: torch's float32 power gives the same bits but for rare ties.
        """
        one = np.float32(1.0)
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        power = np.float64(np.float32(self.theta)) ** exponent.astype(np.float64)
        inv_freq = one / power.astype(np.float32)
        if self.kind == "default":
            return inv_freq
        if self.kind == "linear":
            return inv_freq / np.float32(self.factor)
        factor = np.float32(self.factor)
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        original = np.float32(self.original_max_position_embeddings)
        wavelength = (one / inv_freq) * np.float32(2 * np.pi)
        stretched = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
        share = ((one / wavelength) * original - low) / (high - low)
        blended = (one - share) * stretched / factor + share * stretched
        between = ~(wavelength < original / high) & ~(wavelength > original / low)
        return np.where(between, blended, stretched).astype(np.float32)


def _read(config: Mapping[str, Any], name: str, max_positions: int, source: str) -> Rope:
    """The rope that the field `name` states, with what the fields beside it add."""
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{source}: {name} is {given!r}, but it must be an object.")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALED:
        raise ModelError(
            f"{source}: {name}.rope_type is {kind!r}, but served are {', '.join(_SCALED)}."
        )
    _refuse_what_is_not_read(config, name, kind, source)
    theta = given.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    numbers = {"rope_theta": 10000.0 if theta is None else theta}
    numbers |= {field: given.get(field) for field in _SCALED[kind]}
    for field, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ModelError(
                f"{source}: {name}.{field} is {value!r}, but rope type {kind!r} needs a positive "
                "number there."
            )
    scaled = {field: float(numbers[field]) for field in _SCALED[kind]}
    rope = replace(Rope(float(numbers["rope_theta"]), kind), **scaled)
    if kind != "llama3":
        return rope
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"{source}: {name}.high_freq_factor={rope.high_freq_factor} must be greater than "
            f"low_freq_factor={rope.low_freq_factor}."
        )
    original = config.get("original_max_position_embeddings")
    original = given.get("original_max_position_embeddings") if original is None else original
    original = max_positions if original is None else original
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise ModelError(
            f"{source}: {name}.original_max_position_embeddings is {original!r}, but rope type "
            "'llama3' needs a whole number of at least 1 there."
        )
    return replace(rope, original_max_position_embeddings=original)


def _refuse_what_is_not_read(config: Mapping[str, Any], name: str, kind: str, source: str) -> None:
    given = config.get(name) or {}
    unknown = [field for field, value in given.items() if value and field not in _KNOWN]
    if unknown:
        raise ModelError(
            f"{source}: {name} has fields of unknown meaning for rope type {kind!r}: "
            f"{', '.join(sorted(unknown)[:5])}; remove them if they change nothing."
        )
    for holder, where in ((given, f"{name}."), (config, "")):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelError(
                f"{source}: {where}partial_rotary_factor is {holder['partial_rotary_factor']!r}, "
                "but only heads that rotate whole (1.0) are served."
            )
    if kind == "default" and given.get("factor") not in (None, 1, 1.0):
        raise ModelError(
            f"{source}: {name}.factor is {given['factor']!r}, but rope type 'default' does not "
            "scale; name the type that does, or remove factor."
        )

"""Which compiled version of a step runs: one that has the live routes of its batch, few others."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scute_jax.serving.request import MAX_TOP_LOGPROBS
from scute_jax.serving.sequence import Sequence


@dataclass(frozen=True)
class Variant:
    """What a compiled step can do besides greedy decoding of the base model."""

    routes: frozenset[str] = frozenset()  # kinds of entries, see scute_jax.entries
    sampled: bool = False  # temperature, top_p, top_k
    top: int = 0  # alternatives beside each log-probability

    def covers(self, need: "Variant") -> bool:
        enough = self.sampled >= need.sampled and self.top >= need.top
        return enough and self.routes >= need.routes

    def __str__(self) -> str:
        routes = ", ".join(sorted(self.routes)) or "base rows"
        return f"{routes}, {'sampled' if self.sampled else 'greedy'}"

    @property
    def cost(self) -> tuple[int, bool, int]:
        return len(self.routes), self.sampled, self.top


def needed(sequences: Iterable[Sequence]) -> Variant:
    """The least variant that serves these sequences."""
    routes: frozenset[str] = frozenset()
    sampled, top = False, 0
    for sequence in sequences:
        sampling = sequence.request.sampling
        routes |= sequence.tenant.routes
        sampled |= sampling.temperature > 0
        top |= bool(sampling.logprobs) or bool(sampling.prompt_logprobs)
    return Variant(routes, sampled, MAX_TOP_LOGPROBS if top else 0)


class Variants:
    """The variants of each compiled shape, few of them.

    A step runs the least compiled variant that covers what its batch needs. Where there is none, a
    batch of base rows gets one of its own, and any other batch one with all routes that registered
    adapters use; `add` states variants that shall be there besides (see warm_up.py).
    """

    def __init__(self) -> None:
        self._ready: dict[tuple, set[Variant]] = {}

    def choose(self, shape: tuple, need: Variant, all_routes: frozenset[str]) -> Variant:
        """The variant to run for a shape: it covers `need`."""
        ready = self._ready.setdefault(shape, set())
        covering = [variant for variant in ready if variant.covers(need)]
        if covering:
            return min(covering, key=lambda variant: variant.cost)
        if need.routes:
            need = replace(need, routes=need.routes | all_routes)
        ready.add(need)
        return need

    def add(self, shape: tuple, variant: Variant) -> None:
        """Makes a variant one of those that a shape may run."""
        self._ready.setdefault(shape, set()).add(variant)


RIDING = frozenset(("factors", "scale", "shift"))  # s and b ride in the expand of the factors


def ladder(all_routes: frozenset[str]) -> list[Variant]:
    """The variants to have ready: together they cover whatever a batch can need.

    Base rows; rows whose slots ride with their factors (LoRA, DoRA, IA3 of outputs), which pay for
    no other route; and everything. Each greedy, and with sampling and alternatives.
    """
    routes = dict.fromkeys((frozenset[str](), RIDING & all_routes, all_routes))
    extras = ((False, 0), (True, MAX_TOP_LOGPROBS))
    return [Variant(own, sampled, top) for own in routes for sampled, top in extras]

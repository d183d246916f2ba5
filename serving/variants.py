"""Which compiled version of a step runs: one that has the live routes of its batch, few others."""

from collections.abc import Iterable
from dataclasses import dataclass

from scute_jax.serving.request import MAX_TOP_LOGPROBS
from scute_jax.serving.sequence import Sequence


@dataclass(frozen=True)
class Variant:
    """What a compiled step can do besides greedy decoding of the base model."""

    routes: frozenset[str] = frozenset()  # slots of adapters, see registry.routes_of
    sampled: bool = False  # temperature, top_p, top_k
    top: int = 0  # alternatives beside each log-probability

    def covers(self, need: "Variant") -> bool:
        enough = self.sampled >= need.sampled and self.top >= need.top
        return enough and self.routes >= need.routes

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
    """The variants of each compiled shape.

    Until `close`, a step runs the least variant that its batch needs, compiling it if it is new.
    After it (when all that will be wanted is compiled), it runs the least that is there.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple, set[Variant]] = {}
        self._closed = False

    def choose(self, shape: tuple, need: Variant) -> Variant:
        """The variant to run for a shape: it covers `need`."""
        ready = self._ready.setdefault(shape, set())
        if self._closed and need not in ready:
            need = min((v for v in ready if v.covers(need)), key=lambda v: v.cost, default=need)
        ready.add(need)
        return need

    def close(self) -> None:
        """From now on prefer what is compiled."""
        self._closed = True

    def reset(self) -> None:
        """Forgets everything: the shapes of the slots have changed."""
        self._ready.clear()

    @property
    def count(self) -> int:
        return sum(map(len, self._ready.values()))

"""What an engine makes once it knows how large its KV cache is."""

from dataclasses import dataclass

from scute_jax.serving.intake import Intake
from scute_jax.serving.pages import PagePool
from scute_jax.serving.runner import Runner
from scute_jax.serving.scheduler import Scheduler


@dataclass(frozen=True)
class Parts:
    """The parts of an engine that have the size of the cache in them."""

    max_context: int
    intake: Intake
    pages: PagePool
    runner: Runner
    scheduler: Scheduler

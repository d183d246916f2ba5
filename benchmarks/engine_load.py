"""What the load of an adapter costs the requests that run meanwhile."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from benchmarks.engine_steps import request
from benchmarks.llama_8b import adapter
from scute_jax.models.cache import page_bytes
from scute_jax.models.config import LlamaConfig
from scute_jax.models.params import LlamaParams
from scute_jax.serving import Engine, EngineOptions

LOADS, SLOTS = 6, 16
ROUNDS = 3  # of the engine, after which a new request has come and gone
TOKENS = 2048  # more than the requests that run meanwhile come to
METHODS = ("IA3", "VERA")


@dataclass(frozen=True)
class Stall:
    """How much longer the others wait for a token when an adapter is loaded than when it is there.

    `steps` and `worst` (median and largest) count decode steps of `step_ms`; `host_ms` is the time
    that the load takes on the host.
    """

    steps: float
    worst: float
    step_ms: float
    host_ms: float


def stalls(config: LlamaConfig, params: LlamaParams, options: EngineOptions) -> dict[str, Stall]:
    """Method -> stall, with all decode rows but one busy.

    A request comes for an adapter that is not on the device. That it is prefilled costs time in
    itself, so the same request for an adapter that is there is subtracted.
    """
    rows = options.decode_rows[-1]
    each = page_bytes(config, options.page_size, params.embed_tokens.dtype)
    own = {"max_adapters": SLOTS, "prefill_blocks": (4,), "decode_rows": (rows,)}
    own["memory"] = rows * TOKENS // options.page_size * each
    engine = Engine(config, params, None, EngineOptions(**asdict(options) | own))
    for method in METHODS:
        for i in range(SLOTS):
            engine.add_adapter(f"{method}{i}", adapter(config, method, i))
    engine._residency.warm_up()  # compiles the writes of the bank
    running = [f"{method}{i}" for method in METHODS for i in range(SLOTS // 2 - 1)]
    tickets = [
        engine.submit(request(config, running[i % len(running)], 8, TOKENS - 16))
        for i in range(rows - 1)
    ]
    for _ in range(rows // 4 + 4):  # until all run, and all is compiled
        engine.step()
    quiet = statistics.median(_seconds(engine, 1) for _ in range(15))
    found = {}
    for method in METHODS:
        more, host = [], []
        for i in range(LOADS):
            there = _with(engine, request(config, running[0], 8, 2))
            with _loads(engine, host):
                name = f"{method}{SLOTS // 2 + i}"
                loaded = _with(engine, request(config, name, 8, 2))
            more.append((loaded - there) / quiet * options.steps)
        assert len(host) == LOADS, "an adapter was there already"
        middle, step = statistics.median(more), quiet / options.steps
        found[method] = Stall(middle, max(more), 1e3 * step, 1e3 * statistics.median(host))
    assert not any(ticket.sequence is None or ticket.sequence.finished for ticket in tickets)
    for ticket in tickets:
        engine.cancel(ticket)
    while engine.busy:
        engine.step()
    return found


def _with(engine: Engine, newcomer) -> float:
    """Seconds of the rounds in which one more request comes and goes."""
    ticket = engine.submit(newcomer)
    seconds = _seconds(engine, ROUNDS)
    assert ticket.sequence is not None and ticket.sequence.finished
    return seconds


def _seconds(engine: Engine, rounds: int) -> float:
    """Seconds of some rounds; each brings the running requests the tokens of one call."""
    began = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    return time.perf_counter() - began


@contextmanager
def _loads(engine: Engine, seconds: list[float]) -> Iterator[None]:
    """Adds the host seconds of each load meanwhile."""
    residency, load = engine._residency, engine._residency._load

    def timed(tenant) -> bool:
        began = time.perf_counter()
        done = load(tenant)
        seconds.append(time.perf_counter() - began)
        return done

    residency._load = timed
    try:
        yield
    finally:
        del residency._load

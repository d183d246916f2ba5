"""The compiled steps of an engine, called as it calls them, and the time that they take."""

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from scute_jax import Adapter
from scute_jax.bench.timing import kernel_us
from scute_jax.models.config import LlamaConfig
from scute_jax.models.llama import Batch
from scute_jax.models.params import LlamaParams
from scute_jax.serving import Engine, EngineOptions, Request, SamplingParams
from scute_jax.serving.launch import decode_plan, prefill_plan
from scute_jax.serving.scheduler import DecodeWork, PrefillWork
from scute_jax.serving.steps import DecodePlan, PrefillPlan, Rows

PLAIN = {"sampled": False, "top": 0}  # greedy decoding
MOVED = 4 << 20
FOREVER = 1 << 20  # tokens that a row may still generate


class Steps:
    """An engine with adapters on the device, and its steps for batches made here.

    Row i of n rows belongs to adapter i * adapters // n: all have about as many.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        adapters: Sequence[Adapter],
        options: EngineOptions,
    ):
        self.config, self.params, self.options = config, params, options
        self.engine = Engine(config, params, None, options)
        for adapter in adapters:
            self.engine.add_adapter(adapter.version, adapter)
        residency, tenants = self.engine._residency, self.engine._registry.tenants()
        self.names = list(tenants)
        self._slot = [residency.acquire(tenant) for tenant in tenants.values()]
        for tenant in tenants.values():
            residency.release(tenant)
        self._runner = self.engine._parts.runner
        self._slots = residency.slots(residency.routes)
        self.pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._slots))
        jax.block_until_ready(self._slots)

    def compile(self, kind: str, size: int) -> str:
        """Compiles a step, so that calls find it compiled; says how long it took, and what moves
        arrays of MOVED bytes or more: weights and the cache should stay where they are."""
        began = time.perf_counter()
        step = self._runner._decode if kind == "decode" else self._runner._prefill
        plan = self.decode_plan(size, 16) if kind == "decode" else self.prefill_plan(size)
        args = (self.params, self._slots, self._runner._cache, self.rows(0), plan)
        made = step.func.lower(*args, **step.keywords, **PLAIN).compile()
        seconds = time.perf_counter() - began
        found = Counter(_moves(made.as_text()))
        shown = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
        return f"in {seconds:.0f} s; moves: {shown or 'none'}"

    def decode_seconds(self, rows: int, keys: int, calls: int = 3, repeats: int = 5) -> float:
        """Seconds of one step of `rows` rows that look at `keys` keys, in calls in a row."""
        first = max(0, keys - self.options.steps // 2)
        plan = self.decode_plan(rows, first + self.options.steps)

        def run() -> None:
            for _ in range(calls):
                tokens = self._decode(self.rows(first), plan)[1]
            jax.block_until_ready(tokens)

        return median_seconds(run, repeats) / calls / self.options.steps

    def prefill_seconds(self, plan: PrefillPlan, calls: int = 3, repeats: int = 5) -> float:
        """Seconds of one prefill call."""

        def run() -> None:
            for _ in range(calls):
                tokens = self._prefill(plan)[1]
            jax.block_until_ready(tokens)

        return median_seconds(run, repeats) / calls

    def text_seconds(self, rows: int, prompt: int, tokens: int, repeats: int = 5) -> float:
        """Seconds of the steps that `tokens` tokens after short prompts take, without the engine:
        one prefill call and the decode calls, launched one after the other."""
        shapes = self.options.prefill_blocks
        first = self.prefill_plan(next(n for n in shapes if n >= rows), count=prompt, filled=rows)
        plan = self.decode_plan(rows, prompt + tokens + self.options.steps)

        def run() -> None:
            state, drawn = self._prefill(first)
            for _ in range(-(-(tokens - 1) // self.options.steps)):
                state, drawn = self._decode(state, plan)
            jax.block_until_ready(drawn)

        return median_seconds(run, repeats)

    def generate_seconds(self, rows: int, prompt: int, tokens: int, repeats: int = 3) -> float:
        """Seconds that the whole engine takes for as many requests as rows."""
        names = self._adapters_of(rows)

        def run() -> None:
            asked = [request(self.config, name, prompt, tokens) for name in names]
            for completion in self.engine.generate(asked):
                assert completion.error is None and len(completion.token_ids) == tokens, completion

        return median_seconds(run, repeats)

    def kernels(self, kind: str, size: int) -> list[tuple[str, float, float]]:
        """(name, microseconds, launches) of all kernels of a step, the longest first."""
        if kind == "decode":
            plan, steps = self.decode_plan(size, 256), self.options.steps
            times = kernel_us(lambda: self._decode(self.rows(240), plan)[1])
        else:
            blocks, steps = self.prefill_plan(size), 1
            times = kernel_us(lambda: self._prefill(blocks)[1])
        table = [(name, us / steps, n / steps) for name, (n, us) in times.items()]
        return sorted(table, key=lambda row: -row[1])

    def rows(self, position: int) -> Rows:
        """The state of all decode rows at one position."""
        n = self.options.decode_rows[-1]
        token, left = np.full(n, 7, np.int32), np.full(n, FOREVER, np.int32)
        return Rows(token, np.full(n, position, np.int32), left, np.ones(n, bool))

    def decode_plan(self, rows: int, tokens: int) -> DecodePlan:
        """The plan of full rows whose pages hold `tokens` tokens."""
        plan = decode_plan(DecodeWork(rows, [], []), self._runner._width)
        table = self._table(rows, tokens)
        source = np.arange(rows, dtype=np.int32)
        return replace(plan, source=source, slot=self._slots_of(rows), table=table)

    def prefill_plan(
        self, blocks: int, count: int | None = None, chain: int = 1, filled: int | None = None
    ) -> PrefillPlan:
        """Blocks of `count` tokens (full ones if not given) of prompts of `chain` blocks each.

        Where `filled` is given, the blocks behind as many are empty. Prompts that end become decode
        rows as far as there are rows.
        """
        size, n = self.options.block, self.options.decode_rows[-1]
        empty = replace(self._runner.limits, prefill_blocks=(blocks,))
        plan = prefill_plan(PrefillWork(), empty, self._runner._width)
        filled = blocks if filled is None else filled
        i = np.arange(blocks, dtype=np.int32)
        there, count = i < filled, size if count is None else count
        table = self._table(-(-blocks // chain), chain * size)[i // chain]
        slot = np.where(there, np.resize(self._slots_of(filled), blocks), -1).astype(np.int32)
        ends = there & (i % chain == chain - 1)
        row = np.where(ends, i // chain, n).astype(np.int32)
        rng = np.random.default_rng(0)
        tokens = rng.integers(3, self.config.vocab_size, (blocks, size), np.int32)
        return replace(
            plan,
            batch=Batch(
                tokens=tokens,
                start=i % chain * size,
                rows=np.where(there, count, 0).astype(np.int32),
                table=table,
            ),
            block_slot=slot,
            slot=slot,
            last=i * size + count - 1,
            position=np.full(blocks, (chain - 1) * size + count - 1, np.int32),
            row=np.minimum(row, n),
            left=np.full(blocks, FOREVER, np.int32),
        )

    def _decode(self, rows: Rows, plan: DecodePlan) -> tuple[Rows, jax.Array]:
        runner = self._runner
        args = (self.params, self._slots, runner._cache, rows, plan)
        runner._cache, rows, drawn = runner._decode(*args, **PLAIN)
        return rows, drawn.token

    def _prefill(self, plan: PrefillPlan) -> tuple[Rows, jax.Array]:
        runner = self._runner
        args = (self.params, self._slots, runner._cache, self.rows(0), plan)
        runner._cache, rows, drawn, _ = runner._prefill(*args, **PLAIN)
        return rows, drawn.token

    def _slots_of(self, rows: int) -> np.ndarray:
        own = np.asarray(sorted(self._slot) or [-1], np.int32)
        return own[np.arange(rows) * len(own) // rows]

    def _adapters_of(self, rows: int) -> list[str | None]:
        own = self.names or [None]
        return [own[i * len(own) // rows] for i in range(rows)]

    def _table(self, sequences: int, tokens: int) -> np.ndarray:
        """Pages of their own for each sequence; the same ones again where there are too few."""
        each, width = -(-tokens // self.options.page_size), self._runner._width
        table = np.zeros((sequences, width), np.int32)
        pages = np.arange(sequences * each, dtype=np.int32) % self._runner._cache.k[0].shape[0]
        table[:, :each] = pages.reshape(sequences, each)[:, :width]
        return table


def request(config: LlamaConfig, name: str | None, prompt: int, tokens: int) -> Request:
    """A request with a random prompt that ends after so many tokens."""
    ids = np.random.default_rng().integers(3, config.vocab_size, prompt).tolist()
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(prompt_token_ids=ids, adapter=name, sampling=sampling)


def _moves(module: str) -> list[str]:
    """The instructions of a compiled module that only move or convert large arrays."""
    names = "copy|copy-start|transpose|concatenate|convert|pad|bitcast-convert"
    moves = []
    for dtype, shape, name in re.findall(rf"= (\w+)\[([\d,]+)\]\S* ({names})\(", module):
        count = math.prod(map(int, shape.split(",")))
        if count * int(re.sub(r"\D", "", dtype) or 8) // 8 >= MOVED:
            moves.append(f"{name} {dtype}[{shape}]")
    return moves


def median_seconds(run: Callable[[], None], repeats: int) -> float:
    """Median of the seconds that a call takes; the first one does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)

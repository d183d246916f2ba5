"""From the work of a scheduler to the numpy arrays of a compiled step."""

from collections.abc import Sequence as Seq

import numpy as np

from scute_jax.models.llama import Batch
from scute_jax.serving.sampling import SamplingRows
from scute_jax.serving.scheduler import DecodeWork, Limits, PrefillWork
from scute_jax.serving.sequence import Sequence
from scute_jax.serving.steps import DecodePlan, Ends, PrefillPlan

MAX_STOP_TOKENS = 8


def prefill_plan(work: PrefillWork, limits: Limits, width: int) -> PrefillPlan:
    """The arrays of a prefill step, in the smallest compiled shape that holds its blocks."""
    n = next(size for size in limits.prefill_blocks if size >= len(work.blocks))
    tokens = np.zeros((n, limits.block), np.int32)
    start, rows = np.zeros(n, np.int32), np.zeros(n, np.int32)
    table, slot = np.zeros((n, width), np.int32), np.full(n, -1, np.int32)
    last_row, known_tokens = {}, {s: np.asarray(s.known, np.int32) for s, _, _ in work.blocks}
    for i, (sequence, first, count) in enumerate(work.blocks):
        tokens[i, :count] = known_tokens[sequence][first : first + count]
        start[i], rows[i] = first, count
        slot[i] = sequence.slot if first >= sequence.active_from else -1
        table[i, : len(sequence.pages)] = sequence.pages
        last_row[sequence] = i * limits.block + count - 1
    done = work.complete
    ints = {name: np.zeros(n, np.int32) for name in ("last", "position", "left")}
    known, done_slot = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    row = np.full(n, limits.rows, np.int32)
    for j, sequence in enumerate(done):
        ints["last"][j] = last_row[sequence]
        ints["position"][j] = len(known_tokens[sequence]) - 1
        ints["left"][j] = sequence.limit - len(known_tokens[sequence])
        known[j] = sequence.tokens[-1].token if sequence.tokens else -1
        row[j], done_slot[j] = sequence.row, sequence.slot
    return PrefillPlan(
        batch=Batch(tokens=tokens, start=start, rows=rows, table=table),
        block_slot=slot,
        slot=done_slot,
        row=row,
        known=known,
        ends=_ends(done, n),
        **ints,
    )


def prompt_targets(work: PrefillWork, shape: tuple[int, int]) -> np.ndarray:
    """The prompt token that comes after each row of a prefill step, 0 where there is none."""
    targets = np.zeros(shape, np.int32)
    for i, (sequence, first, count) in enumerate(work.blocks):
        after = sequence.prompt[first + 1 : first + count + 1]
        targets[i, : len(after)] = after
    return targets.reshape(-1)


def decode_plan(work: DecodeWork, width: int) -> DecodePlan:
    """The arrays of a decode call. Empty rows come first, with the base rows: slots ascend."""
    first = work.size - len(work.sequences)
    source, slot = np.full(work.size, -1, np.int32), np.full(work.size, -1, np.int32)
    table = np.zeros((work.size, width), np.int32)
    source[first:] = work.source
    slot[first:] = [sequence.slot for sequence in work.sequences]
    for i, sequence in enumerate(work.sequences, first):
        table[i, : len(sequence.pages)] = sequence.pages
    ends = _ends(work.sequences, work.size, first)
    return DecodePlan(source=source, slot=slot, table=table, ends=ends)


def _ends(sequences: Seq[Sequence], size: int, first: int = 0) -> Ends:
    temperature, top_p = np.zeros(size, np.float32), np.ones(size, np.float32)
    top_k, seed = np.zeros(size, np.int32), np.zeros(size, np.uint32)
    stop = np.full((size, MAX_STOP_TOKENS), -1, np.int32)
    for i, sequence in enumerate(sequences, first):
        sampling = sequence.request.sampling
        temperature[i], top_p[i] = sampling.temperature, sampling.top_p
        top_k[i], seed[i] = sampling.top_k, sequence.seed
        stop[i, : len(sequence.stop_tokens)] = sequence.stop_tokens
    return Ends(SamplingRows(temperature, top_p, top_k, seed), stop)

"""The compiled steps: prefill of packed prompts, and several decode steps in one call.

    prefill(params, slots, cache, rows, plan)  -> cache, rows, first tokens, hidden states
    decode(params, slots, cache, rows, plan)   -> cache, rows, tokens of every step

The host plans with numpy arrays of fixed shapes; what changes from token to token (`Rows`) stays on
the device, so that the next step can be launched before the results of the last one are read.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from scute_jax.kernels import Implementation
from scute_jax.models.cache import KVCache
from scute_jax.models.config import LlamaConfig
from scute_jax.models.llama import Batch, Slots, forward, logits
from scute_jax.models.params import LlamaParams
from scute_jax.segments import block_segments, segments
from scute_jax.serving.sampling import SamplingRows, TokenScores, greedy, sample, score
from scute_jax.slots import looked_up


@struct.dataclass
class Rows:
    """The state of each decode row on the device. A row that is not active computes nothing."""

    token: Int[Array, "b"]  # the next input, generated already
    position: Int[Array, "b"]  # its position in the sequence
    left: Int[Array, "b"]  # tokens that may still be generated
    active: Bool[Array, "b"]

    @classmethod
    def create(cls, num_rows: int) -> "Rows":
        def zero() -> Array:
            return jnp.zeros((num_rows,), jnp.int32)

        return cls(zero(), zero(), zero(), jnp.zeros((num_rows,), jnp.bool_))


@struct.dataclass
class Ends:
    """How each row is drawn and when it ends."""

    sampling: SamplingRows
    stop_tokens: Int[Array, "b s"]  # -1 = none


@struct.dataclass
class PrefillPlan:
    """Blocks of prompt tokens, and the sequences whose prompt is complete with this step.

    Invariants: a sequence j that is not there has row[j] past the last row.
    """

    batch: Batch
    block_slot: Int[Array, "n"]  # the adapter of each block, -1 = base model
    last: Int[Array, "m"]  # which row of the step holds the last prompt token of sequence j
    position: Int[Array, "m"]  # its position
    slot: Int[Array, "m"]  # the adapter of sequence j
    row: Int[Array, "m"]  # the decode row that sequence j gets
    left: Int[Array, "m"]  # tokens it may generate, the first one included
    known: Int[Array, "m"]  # its next token where that was generated before, or -1
    ends: Ends


@struct.dataclass
class DecodePlan:
    """The decode rows of the next steps, sorted by adapter. A row continues a row of before."""

    source: Int[Array, "b"]  # which row of the state before, -1 = an empty row
    slot: Int[Array, "b"]  # non-decreasing, -1 = base model or empty
    table: Int[Array, "b w"]
    ends: Ends


@struct.dataclass
class Drawn:
    """Generated tokens with their scores; `valid` says which are there."""

    token: Int[Array, "steps b"]
    valid: Bool[Array, "steps b"]
    scores: TokenScores


def prefill(
    params: LlamaParams,
    slots: Slots,
    cache: KVCache,
    rows: Rows,
    plan: PrefillPlan,
    *,
    config: LlamaConfig,
    num_slots: int,
    sampled: bool,
    top: int,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Rows, Drawn, Float[Array, "t d"]]:
    """Writes the keys of the blocks and draws the first token of every sequence that is complete.

    Also returns the hidden states of all rows, for the log-probabilities of prompt tokens.
    """
    size = plan.batch.tokens.shape[1]
    seg = block_segments(plan.block_slot, plan.batch.rows, size, num_slots)
    how = implementation
    hidden, cache = forward(params, slots, config, plan.batch, seg, cache, implementation=how)
    seg = segments(plan.slot, num_slots)
    last = jnp.take(hidden, plan.last, axis=0, mode="clip")
    scores = logits(params, slots, last, seg, implementation=how)
    token = _draw(scores, plan.ends.sampling, plan.position + 1, sampled)
    token = jnp.where(plan.known >= 0, plan.known, token)
    left = plan.left - 1
    active = (left > 0) & ~_ends(token, plan.ends.stop_tokens)
    fresh = Rows(token=token, position=plan.position + 1, left=left, active=active)
    rows = jax.tree.map(lambda a, new: a.at[plan.row].set(new, mode="drop"), rows, fresh)
    valid = plan.row < rows.token.shape[0]
    drawn = Drawn(token, valid, score(scores, token, top))
    return cache, rows, jax.tree.map(lambda a: a[None], drawn), hidden


def decode(
    params: LlamaParams,
    slots: Slots,
    cache: KVCache,
    rows: Rows,
    plan: DecodePlan,
    *,
    config: LlamaConfig,
    num_slots: int,
    steps: int,
    sampled: bool,
    top: int,
    implementation: Implementation | None = None,
) -> tuple[KVCache, Rows, Drawn]:
    """`steps` tokens for every active row, fewer where a row ends."""
    num_rows = rows.token.shape[0]
    rows = _continue(rows, plan.source)
    seg = segments(plan.slot, num_slots, presorted=True)
    slots = {site: looked_up(own, seg.tiles) for site, own in slots.items()}
    how = implementation

    def step(carry, _):
        cache, rows = carry
        batch = Batch(
            tokens=rows.token[:, None],
            start=rows.position,
            rows=rows.active.astype(jnp.int32),
            table=plan.table,
        )
        hidden, cache = forward(params, slots, config, batch, seg, cache, implementation=how)
        scores = logits(params, slots, hidden, seg, implementation=how)
        token = _draw(scores, plan.ends.sampling, rows.position + 1, sampled)
        drawn = Drawn(token, rows.active, score(scores, token, top))
        left = rows.left - 1
        active = rows.active & (left > 0) & ~_ends(token, plan.ends.stop_tokens)
        after = Rows(token=token, position=rows.position + 1, left=left, active=active)
        return (cache, after), drawn

    (cache, rows), drawn = jax.lax.scan(step, (cache, rows), length=steps)
    spare = num_rows - plan.source.shape[0]
    rows = jax.tree.map(lambda a: jnp.pad(a, (0, spare)), rows)
    return cache, rows, drawn


def score_prompt(
    params: LlamaParams,
    slots: Slots,
    hidden: Float[Array, "t d"],
    token: Int[Array, "t"],
    block_slot: Int[Array, "n"],
    block_rows: Int[Array, "n"],
    *,
    num_slots: int,
    top: int,
    implementation: Implementation | None = None,
) -> TokenScores:
    """The scores of token[i] after the hidden state of row i of a prefill step."""
    size = hidden.shape[0] // block_slot.shape[0]
    seg = block_segments(block_slot, block_rows, size, num_slots)
    scores = logits(params, slots, hidden, seg, implementation=implementation)
    return score(scores, token, top)


def _continue(rows: Rows, source: Int[Array, "b"]) -> Rows:
    """The rows of before in the new order; empty rows are not active."""
    moved = jax.tree.map(lambda a: jnp.take(a, source, axis=0, mode="clip"), rows)
    return replace(moved, active=moved.active & (source >= 0))


def _draw(
    scores: Float[Array, "b vocab"], rows: SamplingRows, position: Int[Array, "b"], sampled: bool
) -> Int[Array, "b"]:
    return sample(scores, rows, position) if sampled else greedy(scores)


def _ends(token: Int[Array, "b"], stop_tokens: Int[Array, "b s"]) -> Bool[Array, "b"]:
    return jnp.any(token[:, None] == stop_tokens, axis=-1)

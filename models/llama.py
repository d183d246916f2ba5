"""The Llama forward pass: a pure function of (params, adapter slots, batch, cache).

    embed -> [norm, q k v, rope, attention, o, norm, gate up, down]* -> norm -> head

Every projection goes through `apply_fused`, so that each row gets its own adapter. Layers are
unrolled: a scan over stacked weights makes XLA copy them (measured three times slower on a GPU).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from scute_jax.apply import SiteParams, apply_fused
from scute_jax.apply_embedding import apply_embedding
from scute_jax.apply_norm import apply_norm
from scute_jax.entries import EMBEDDING
from scute_jax.kernels import Implementation, residual_norm, rope_attention, runs_pallas
from scute_jax.kernels.arrivals import zero_counts
from scute_jax.kernels.parts import add_parts
from scute_jax.kernels.residual_norm import normalised
from scute_jax.models.cache import KVCache
from scute_jax.models.config import LlamaConfig
from scute_jax.models.params import Layer, Linear, LlamaParams
from scute_jax.segments import Segments
from scute_jax.slots import SiteSlots

Slots = Mapping[str, SiteSlots]  # site -> the slots of the resident adapters; absent = nobody's


@struct.dataclass
class Batch:
    """The tokens of one step in blocks; a block holds consecutive tokens of one sequence.

    Decoding has blocks of one token, prefill blocks of many. Row i * size + j of the step is token
    j of block i.
    Invariants: 0 <= rows <= size; a row past rows[i] is padding: it computes something that nobody
    reads and writes nothing to the cache. The pages of `table` cover every position of the block.
    """

    tokens: Int[Array, "n size"]
    start: Int[Array, "n"]  # position of the first token of the block in its sequence
    rows: Int[Array, "n"]  # tokens in the block
    table: Int[Array, "n w"]  # the pages of its sequence, in order

    def positions(self) -> Int[Array, "n size"]:
        size = self.tokens.shape[1]
        return self.start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]


def forward(
    params: LlamaParams,
    slots: Slots,
    config: LlamaConfig,
    batch: Batch,
    segments: Segments,
    cache: KVCache,
    *,
    implementation: Implementation | None = None,
    observe: Callable[[str, Array], None] | None = None,
) -> tuple[Float[Array, "t d"], KVCache]:
    """The final hidden states (after the last norm) of every row, and the cache with their keys.

    `segments` says which adapter each row uses (t = n * size rows). `observe` is called with each
    projection of a layer and the rows that it reads, traced ones under jit. Dtypes: activations
    have the dtype of the embedding, except the residual stream between the layers, which is
    float32 (half precision would round it twice a layer); norms, rope, softmax and all sums are
    float32.
    """
    dtype = params.embed_tokens.dtype
    token = jnp.reshape(batch.tokens, (-1,))
    x = apply_embedding(params.embed_tokens, _of(slots, EMBEDDING), token, segments)

    def norm(x: Array, added: Array | None, weight: Array, site: str) -> tuple[Array, Array]:
        """The residual stream with the parts that a layer adds, and its norm."""
        own, how, eps = _of(slots, site), implementation, config.rms_norm_eps
        if added is not None and not jax.tree.leaves(own):
            return residual_norm(x, added, weight, eps, dtype, implementation=how)
        x = x if added is None else x + add_parts(added)
        h = apply_norm(normalised(x, eps), weight, own, segments, implementation=how)
        return x, h.astype(dtype)

    rope = _rope_tables(config, jnp.reshape(batch.positions(), (-1,)))
    where = batch.table, batch.start, batch.rows
    k_pages, v_pages = list(cache.k), list(cache.v)
    added, calls = None, 4 * len(params.layers)  # q k v, o, gate up, down
    counts = iter(zero_counts(calls) if runs_pallas(implementation) else (None,) * calls)
    for i, layer in enumerate(params.layers):
        site = _Sites(layer, slots, f"layers.{i}", segments, counts, implementation, observe)
        x, h = norm(x, added, layer.input_layernorm, f"layers.{i}.input_layernorm")
        # What is rotated, multiplied or added to the residual stream stays float32 until then.
        qkv = site("self_attn", ("q_proj", "k_proj", "v_proj"), h, parts=True)
        qkv = tuple(jnp.reshape(y, (*y.shape[:2], -1, config.head_dim)) for y in qkv)
        attended, k_pages[i], v_pages[i] = rope_attention(
            qkv, k_pages[i], v_pages[i], *rope, *where, implementation=implementation
        )
        attended = jnp.reshape(attended, (x.shape[0], -1))
        (o,) = site("self_attn", ("o_proj",), attended, parts=True)
        name = f"layers.{i}.post_attention_layernorm"
        x, h = norm(x, o, layer.post_attention_layernorm, name)
        gate, up = site("mlp", ("gate_proj", "up_proj"), h)
        gated = _gated(gate, up).astype(dtype)
        (added,) = site("mlp", ("down_proj",), gated, parts=True)
    _, hidden = norm(x, added, params.norm, "norm")
    return hidden, KVCache(k=tuple(k_pages), v=tuple(v_pages))


def logits(
    params: LlamaParams,
    slots: Slots,
    hidden: Float[Array, "t d"],
    segments: Segments,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t vocab"]:
    """The logits of rows of final hidden states, in float32.

    Tokens that adapters add stand behind those of the base, see `apply_fused`.
    """
    head = params.linear("lm_head")
    site = SiteParams(head.weight, head.bias, _of(slots, "lm_head"))
    how = {"out_dtype": jnp.float32, "ride": False, "implementation": implementation}
    (out,) = apply_fused((site,), hidden, segments, **how)  # a tied head is a transposed W
    return out


class _Sites:
    """Applies projections of one layer together with the adapters at them."""

    def __init__(
        self, layer: Layer, slots: Slots, prefix: str, segments: Segments, counts, how, observe
    ):
        self.layer, self.slots, self.prefix = layer, slots, prefix
        self.segments, self.counts, self.how, self.observe = segments, counts, how, observe

    def __call__(
        self, module: str, names: tuple[str, ...], x: Array, parts: bool = False
    ) -> tuple[Array, ...]:
        """The projections of x in float32, or the `parts` of them: see `apply_fused`."""
        if self.observe is not None:
            for name in names:
                self.observe(f"{self.prefix}.{module}.{name}", x)
        params = tuple(self._params(module, name) for name in names)
        how = {"out_dtype": jnp.float32, "parts": parts, "implementation": self.how}
        return apply_fused(params, x, self.segments, counts=next(self.counts), **how)

    def _params(self, module: str, name: str) -> SiteParams:
        linear: Linear = getattr(self.layer, name)
        site = f"{self.prefix}.{module}.{name}"
        return SiteParams(linear.weight, linear.bias, _of(self.slots, site))


def _of(slots: Slots, site: str) -> SiteSlots:
    return slots.get(site, SiteSlots())


def _gated(gate: Float[Array, "t f"], up: Float[Array, "t f"]) -> Float[Array, "t f"]:
    """silu(gate) * up. Source: SwiGLU (arXiv:2002.05202) eq. 6."""
    return gate * jax.nn.sigmoid(gate) * up


def _rope_tables(config: LlamaConfig, positions: Int[Array, "t"]) -> tuple[Array, Array]:
    """cos and sin of position times frequency, [t, dh / 2] in float32."""
    frequencies = jnp.asarray(config.rope.inv_freq(config.head_dim), jnp.float32)
    angle = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angle), jnp.sin(angle)

"""The next token of every row, drawn on the device."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32


@struct.dataclass
class SamplingRows:
    """The sampling parameters of each row. temperature 0 = greedy; top_k 0 = no limit."""

    temperature: Float[Array, "b"]
    top_p: Float[Array, "b"]
    top_k: Int[Array, "b"]
    seed: UInt32[Array, "b"]


def sample(
    logits: Float[Array, "b vocab"], rows: SamplingRows, position: Int[Array, "b"]
) -> Int[Array, "b"]:
    """The token of each row at `position` of its sequence.

    A row's draw depends on its own logits, seed and position only. Filters: top_k first, then the
    smallest set of tokens whose renormalised probabilities reach top_p (Holtzman et al.,
    arXiv:1904.09751). Draws by the Gumbel-max trick.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True).astype(jnp.int32)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(ranked.shape[1], dtype=jnp.int32)[None, :]
    ranked = jnp.where((rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None], ranked, -jnp.inf)
    share = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    keep = (before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    ranked = jnp.where(keep, ranked, -jnp.inf)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, position, ranked.shape[1])
    drawn = jnp.argmax(ranked + noise, axis=-1)
    drawn = jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
    return jnp.where(rows.temperature > 0, drawn, greedy)


def greedy(logits: Float[Array, "b vocab"]) -> Int[Array, "b"]:
    """The most likely token of each row, the first one of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _gumbel(seed: UInt32[Array, ""], position: Int[Array, ""], vocab: int) -> Float[Array, "vocab"]:
    """Noise that hangs on seed and position alone: with another generator, which a process can make
    jax's default, on the other rows as well."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)


@struct.dataclass
class TokenScores:
    """Log-probabilities of chosen tokens and of the k most likely ones (k may be 0)."""

    logprob: Float[Array, "b"]
    top_token: Int[Array, "b k"]
    top_logprob: Float[Array, "b k"]


def score(logits: Float[Array, "b vocab"], token: Int[Array, "b"], k: int) -> TokenScores:
    """The scores of `token` under the softmax of each row.

    Without alternatives no array of log-probabilities is made: the vocabulary is large.
    """
    peak = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)
    top, index = jax.lax.top_k(logits, k)
    return TokenScores((chosen - peak - total)[:, 0], index.astype(jnp.int32), top - peak - total)

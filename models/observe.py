"""What a model does over a body of text: log-probabilities, and moments of what projections read.

    sequences -> windows -> [one compiled step] -> token_logprobs | second_moments

Texts are cut into windows of one length, each seen by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scute_jax.models.cache import KVCache
from scute_jax.models.config import LlamaConfig
from scute_jax.models.llama import Batch, forward, logits
from scute_jax.models.params import LlamaParams
from scute_jax.segments import segments

WINDOW, AT_ONCE, PAGE = 256, 2, 16  # tokens of a window, windows in a step, tokens of a cache page
SAME = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # that read the same rows

Windows = Int[np.ndarray, "n window"]  # of token ids, -1 behind the end of a text
OnStep = Callable[[], None]


def windows(sequences: Iterable[Sequence[int]], at_most: int | None = None) -> Windows:
    """Token ids cut into windows of at least two tokens, of all sequences or the first tokens."""
    rows, left = [], np.inf if at_most is None else at_most
    for ids in sequences:
        for start in range(0, len(ids), WINDOW):
            row = np.array(ids[start : start + WINDOW], np.int32)
            if len(row) > 1 and left >= len(row):
                rows.append(np.pad(row, (0, WINDOW - len(row)), constant_values=-1))
                left -= len(row)
    return np.stack(rows) if rows else np.zeros((0, WINDOW), np.int32)


def token_logprobs(
    params: LlamaParams, config: LlamaConfig, held: Windows, on_step: OnStep = lambda: None
) -> Float[np.ndarray, "tokens"]:
    """The log-probability of every token of the windows but their first, one after the other."""
    scored = []
    for step in steps(held):
        found = np.asarray(_logprobs(params, jnp.asarray(step), config=config))
        scored.append(found[step[:, 1:] >= 0])
        on_step()
    return np.concatenate(scored) if scored else np.zeros(0, np.float32)


def second_moments(
    params: LlamaParams,
    config: LlamaConfig,
    held: Windows,
    sites: Sequence[str],
    on_step: OnStep = lambda: None,
) -> dict[str, Float[np.ndarray, "d_in d_in"]]:
    """E[x^T x] of the rows x that each site reads; the counts of tokens at the embedding.

    Sites that read the same rows share one array. Memory: all of them are on the device at once.
    """
    counts = np.bincount(held[held >= 0], minlength=config.vocab_size)
    found = {"embed_tokens": counts / max(counts.sum(), 1)} if "embed_tokens" in sites else {}
    wanted = tuple(dict.fromkeys(read_by(s) for s in sites if s not in found))
    sums: dict[str, Array] | None = None
    for step in steps(held) if wanted else ():
        new = _moments(params, jnp.asarray(step), config=config, wanted=wanted)
        sums = new if sums is None else _add(sums, new)
        on_step()
    seen = {site: np.asarray(M) / counts.sum() for site, M in (sums or {}).items()}
    return found | {site: seen[read_by(site)] for site in sites if site not in found}


def read_by(site: str) -> str:
    """The site that stands for all that read the same rows."""
    layer, dot, name = site.rpartition(".")
    return f"{layer}{dot}{SAME.get(name, name)}"


def num_steps(held: Windows) -> int:
    return -(-len(held) // AT_ONCE)


def steps(held: Windows) -> Iterator[Windows]:
    """The windows, `AT_ONCE` at a time, the last ones filled up with empty ones."""
    for start in range(0, len(held), AT_ONCE):
        step = held[start : start + AT_ONCE]
        yield np.pad(step, ((0, AT_ONCE - len(step)), (0, 0)), constant_values=-1)


@partial(jax.jit, static_argnames="config")
def _logprobs(
    params: LlamaParams, tokens: Int[Array, "n window"], config: LlamaConfig
) -> Float[Array, "n window-1"]:
    hidden, segs = _hidden(params, tokens, config, None)
    scores = jnp.reshape(logits(params, {}, hidden, segs), (*tokens.shape, -1))[:, :-1]
    chosen = jnp.take_along_axis(scores, jnp.maximum(tokens[:, 1:, None], 0), axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scores, axis=-1)


@partial(jax.jit, static_argnames=("config", "wanted"))
def _moments(
    params: LlamaParams, tokens: Int[Array, "n window"], config: LlamaConfig, wanted: tuple
) -> dict[str, Float[Array, "d_in d_in"]]:
    """The sums of x^T x over the tokens that are there."""
    found, held = {}, jnp.reshape(tokens >= 0, (-1, 1))

    def keep(site: str, x: Array) -> None:
        if site in wanted:
            x = jnp.where(held, x.astype(jnp.float32), 0)
            found[site] = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)

    hidden, _ = _hidden(params, tokens, config, keep)
    keep("lm_head", hidden)
    return found


@partial(jax.jit, donate_argnums=0)
def _add(sums: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
    return jax.tree.map(jnp.add, sums, new)


def _hidden(params: LlamaParams, tokens: Int[Array, "n window"], config: LlamaConfig, observe):
    """The final hidden states of the windows and the segments of the base model."""
    n, size = tokens.shape
    pages = -(-size // PAGE)
    batch = Batch(
        tokens=jnp.maximum(tokens, 0),
        start=jnp.zeros((n,), jnp.int32),
        rows=jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32),
        table=jnp.arange(n * pages, dtype=jnp.int32).reshape(n, pages),
    )
    segs = segments(jnp.full((n * size,), -1, jnp.int32), 0, presorted=True)
    cache = KVCache.create(config, n * pages, PAGE, params.embed_tokens.dtype)
    return forward(params, {}, config, batch, segs, cache, observe=observe)[0], segs

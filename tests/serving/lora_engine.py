"""Engines of a tiny base of one layer with LoRAs made here, without torch: they are quick to build.

Options are the same for all, so that their steps are compiled once for all tests of a process.
"""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np

from scute_jax import Adapter, NormalForm, Term
from scute_jax.identity import content_version
from scute_jax.models.config import LlamaConfig
from scute_jax.models.params import Layer, Linear, LlamaParams
from scute_jax.serving import Engine, EngineOptions, Request, SamplingParams

RAW = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "eos_token_id": 96,
}
SITES = {"self_attn.q_proj": (48, 72), "mlp.up_proj": (48, 80)}


def new_engine(pages: int = 200, **options) -> Engine:
    """An engine of four rows, without adapters."""
    config, params = base()
    given = {"max_adapters": 3, "prefill_blocks": (2,), "decode_rows": (4,), "steps": 4}
    memory = pages * 16 * 2 * 2 * 12 * 4
    return Engine(config, params, None, EngineOptions(memory=memory, **(given | options)))


@cache
def base() -> tuple[LlamaConfig, LlamaParams]:
    """A random model."""
    config, rng = LlamaConfig.from_hf(RAW), np.random.default_rng(7)

    def linear(d_in: int, d_out: int) -> Linear:
        return Linear(jnp.asarray(rng.normal(size=(d_in, d_out)) / np.sqrt(d_in), jnp.float32))

    ones = jnp.ones((48,), jnp.float32)
    layer = Layer(
        input_layernorm=ones,
        q_proj=linear(48, 72),
        k_proj=linear(48, 24),
        v_proj=linear(48, 24),
        o_proj=linear(72, 48),
        post_attention_layernorm=ones,
        gate_proj=linear(48, 80),
        up_proj=linear(48, 80),
        down_proj=linear(80, 48),
    )
    embedding = jnp.asarray(rng.normal(size=(97, 48)), jnp.float32)
    return config, LlamaParams(embedding, (layer,), ones, linear(48, 97))


def lora(seed: int, rank: int = 4, scale: float = 0.5) -> Adapter:
    """A LoRA that changes every text."""
    rng, sites = np.random.default_rng(seed), {}
    for name, (d_in, d_out) in SITES.items():
        A, B = rng.normal(size=(d_in, rank)), rng.normal(size=(rank, d_out))
        term = Term(np.float32(scale * A), np.float32(B))
        sites[f"layers.0.{name}"] = NormalForm(terms=(term,))
    return Adapter(sites, "LORA", content_version([f"lora {seed} {rank} {scale}"]))


def ask(adapter=None, length: int = 12, tokens: int = 10, seed: int = 0, **more) -> Request:
    """A request whose prompt and draws follow from the seed."""
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    sampling = {key: more.pop(key) for key in list(more) if key in fields}
    ids = np.random.default_rng(seed).integers(3, 90, length).tolist()
    given = {"max_tokens": tokens, "ignore_eos": True, "seed": seed} | sampling
    return Request(prompt_token_ids=ids, adapter=adapter, sampling=SamplingParams(**given), **more)


def tokens(completions) -> list[tuple[int, ...]]:
    """The tokens of completions without an error."""
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


def alone(engine: Engine, requests) -> list[tuple[int, ...]]:
    return tokens([engine.generate([request])[0] for request in requests])

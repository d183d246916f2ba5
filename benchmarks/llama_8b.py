"""Llama-3.1-8B with random weights, and adapters of five methods with its shapes."""

from collections.abc import Callable, Mapping
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import scute_jax as sj
from scute_jax.models.config import LlamaConfig
from scute_jax.models.params import Layer, Linear, LlamaParams
from scute_jax.peft.base import Base

SHAPES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
VERA_RANK, OFT_BLOCK = 256, 32
Site = Callable[[str, int, int], sj.NormalForm]  # module, d_in, d_out -> form


def config(layers: int, tiny: bool) -> LlamaConfig:
    """The configuration with some number of layers; `tiny` for a dry run on a CPU."""
    return LlamaConfig.from_hf(
        (TINY if tiny else SHAPES)
        | {"model_type": "llama", "num_hidden_layers": layers, "rms_norm_eps": 1e-5}
        | {"rope_theta": 500000.0, "rope_scaling": ROPE, "eos_token_id": 2, "bos_token_id": 1}
    )


def random_params(config: LlamaConfig, seed: int = 0) -> LlamaParams:
    """Weights that keep activations near one, made on the device in bfloat16."""
    count = 2 + 7 * config.num_hidden_layers
    keys = iter(jax.random.split(jax.random.key(seed), count))
    d = config.hidden_size
    ones = jnp.ones((d,), jnp.bfloat16)
    widths = Base.from_config(config).widths

    def linear(site: str) -> Linear:
        return Linear(_normal(next(keys), *widths[site]))

    def layer(i: int) -> Layer:
        sites = {
            name: linear(f"layers.{i}.{module}.{name}")
            for module, names in (
                ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
                ("mlp", ("gate_proj", "up_proj", "down_proj")),
            )
            for name in names
        }
        return Layer(input_layernorm=ones, post_attention_layernorm=ones, **sites)

    layers = tuple(layer(i) for i in range(config.num_hidden_layers))
    embedding = _normal(next(keys), config.vocab_size, d)
    return LlamaParams(embedding, layers, ones, Linear(_normal(next(keys), d, config.vocab_size)))


def _normal(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return _scaled_normal(key, rows, columns, rows**-0.5)


_scaled_normal = jax.jit(
    lambda key, rows, columns, scale: (
        jax.random.normal(key, (rows, columns), jnp.bfloat16) * scale
    ).astype(jnp.bfloat16),
    static_argnums=(1, 2),
)


def adapter(config: LlamaConfig, method: str, tenant: int, rank: int = 16) -> sj.Adapter:
    """One adapter of a method at all sites of the projections that the method adapts.

    All layers and all tenants have the same numbers in host memory: time does not depend on them,
    and the device holds a copy for each.
    """
    forms = {
        "LORA": lambda _, d_in, d_out: sj.NormalForm(terms=_lora(d_in, d_out, rank)),
        "DORA": lambda _, d_in, d_out: sj.NormalForm(
            terms=_lora(d_in, d_out, rank), s=_near_one(d_out)
        ),
        "IA3": _ia3,
        "VERA": _vera(config),
        "OFT": lambda _, d_in, d_out: sj.NormalForm(R=_blocks(d_in)),
    }[method]
    sites = {
        site: form
        for site, (d_in, d_out) in projections(config).items()
        if jax.tree.leaves(form := forms(site.rpartition(".")[2], d_in, d_out))
    }
    return sj.Adapter(sites, method, version=f"{method}-{rank}-{tenant}")


def projections(config: LlamaConfig) -> Mapping[str, tuple[int, int]]:
    """Site -> (d_in, d_out) of the seven projections of every layer."""
    widths = Base.from_config(config).widths
    return {s: w for s, w in widths.items() if s.startswith("layers.") and s.endswith("_proj")}


def _ia3(module: str, d_in: int, d_out: int) -> sj.NormalForm:
    """Vectors on the outputs of k and v and on the input of down, as PEFT has them for Llama."""
    if module in ("k_proj", "v_proj"):
        return sj.NormalForm(s=_near_one(d_out))
    if module == "down_proj":
        return sj.NormalForm(R=_near_one(d_in).reshape(-1, 1, 1))
    return sj.NormalForm()


def _vera(config: LlamaConfig) -> Site:
    """Vectors on one pair of factors, cut to the widths of each site, at all projections."""
    widths = projections(config).values()
    most_in, most_out = max(d_in for d_in, _ in widths), max(d_out for _, d_out in widths)
    rows = _numbers(VERA_RANK, most_in)  # [r, d_in], as checkpoints have it
    B = _numbers(VERA_RANK, most_out)

    def form(module: str, d_in: int, d_out: int) -> sj.NormalForm:
        d, e = _near_one(VERA_RANK), _near_one(d_out)
        return sj.NormalForm(terms=(sj.Term(rows[:, :d_in].T, B[:, :d_out], 1.0, d, e, pair="v"),))

    return form


def _lora(d_in: int, d_out: int, rank: int) -> tuple[sj.Term, ...]:
    return (sj.Term(_numbers(rank, d_in).T, _numbers(rank, d_out)),)


@cache
def _blocks(d_in: int) -> np.ndarray:
    m = OFT_BLOCK
    turns = np.eye(m, dtype=np.float32) + _numbers(d_in, m).reshape(-1, m, m).astype(np.float32)
    return turns.astype(ml_dtypes.bfloat16)


@cache
def _near_one(d: int) -> np.ndarray:
    return 1 + _numbers(1, d)[0]


@cache
def _numbers(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng([rows, columns])
    return (0.01 * rng.standard_normal((rows, columns), np.float32)).astype(ml_dtypes.bfloat16)

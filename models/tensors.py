"""Named tensors of a checkpoint -> the weights as a pytree.

Names and layout are those of Hugging Face: a projection is stored [out, in] and becomes
[d_in, d_out] here. What a configuration needs is compared with what is there before anything is
read, and reported as a whole.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.models.params import ATTENTION_SITES, MLP_SITES, Layer, Linear, LlamaParams

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """The tensors of an opened checkpoint.

    Invariants: read(name) has shapes[name] and a float32, float16 or bfloat16 dtype, and nobody
    else holds or writes its memory.
    """

    where: str  # the file or folder, for messages
    shapes: Mapping[str, Shape]  # name -> shape as stored by torch
    dtype: np.dtype  # of the stored embedding; float32 if it is quantised
    read: Callable[[str], np.ndarray]


def tensor_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Every tensor that a model of this configuration has, with its shape as stored by torch."""
    d, ff = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    attention = dict(zip(ATTENTION_SITES, ((q, d), (kv, d), (kv, d), (d, q)), strict=True))
    mlp = dict(zip(MLP_SITES, ((ff, d), (ff, d), (d, ff)), strict=True))
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
        for module, sites in (("self_attn", attention), ("mlp", mlp)):
            for name, shape in sites.items():
                shapes[f"{layer}.{module}.{name}.weight"] = shape
                if _has_bias(config, name):
                    shapes[f"{layer}.{module}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def build_params(
    config: LlamaConfig,
    source: TensorSource,
    dtype: jnp.dtype | None,
    progress: Callable[[str, int, int], None] | None = None,
) -> LlamaParams:
    """The weights on the default device in `dtype` (None: that of the stored embedding).

    Raises: ModelError naming all tensors that are missing, unexpected or of another shape.
    """
    if config.num_hidden_layers > len(source.shapes):  # before a damaged number makes a long list
        raise ModelError(
            f"{source.where}: num_hidden_layers is {config.num_hidden_layers}, but the "
            f"checkpoint has {len(source.shapes)} tensors in all: the two are not of one model."
        )
    needed = tensor_shapes(config)
    check_tensors(config, source, needed)
    dtype = jnp.dtype(source.dtype if dtype is None else dtype)
    total = dtype.itemsize * sum(prod(shape) for shape in needed.values())
    done = 0

    def take(name: str) -> jax.Array:
        nonlocal done
        array = source.read(name)
        transpose = array.ndim == 2 and name != "model.embed_tokens.weight"
        placed, finite = _place(array, dtype, transpose)
        if not finite:
            raise ModelError(
                f"{source.where}: {name}, stored as {array.dtype}, holds NaN or values beyond "
                f"{dtype.name}; load it in a wider dtype, or fetch the file again."
            )
        done += placed.nbytes
        if progress is not None:
            progress(name, done, total)
        return placed

    def linear(layer: str, module: str, name: str) -> Linear:
        path = f"{layer}.{module}.{name}"
        bias = take(f"{path}.bias") if _has_bias(config, name) else None
        return Linear(take(f"{path}.weight"), bias)

    embed_tokens = take("model.embed_tokens.weight")
    layers = []
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        projections = {name: linear(layer, "self_attn", name) for name in ATTENTION_SITES}
        projections |= {name: linear(layer, "mlp", name) for name in MLP_SITES}
        layers.append(
            Layer(
                input_layernorm=take(f"{layer}.input_layernorm.weight"),
                post_attention_layernorm=take(f"{layer}.post_attention_layernorm.weight"),
                **projections,
            )
        )
    return LlamaParams(
        embed_tokens=embed_tokens,
        layers=tuple(layers),
        norm=take("model.norm.weight"),
        lm_head=None if config.tie_word_embeddings else Linear(take("lm_head.weight")),
    )


def check_tensors(config: LlamaConfig, source: TensorSource, needed: Mapping[str, Shape]) -> None:
    """Raises: ModelError unless the source has exactly the tensors needed, in their shapes."""
    missing = [name for name in needed if name not in source.shapes]
    unexpected = [name for name in source.shapes if name not in needed]
    wrong = [
        f"{name} has {source.shapes[name]} instead of {shape}"
        for name, shape in needed.items()
        if source.shapes.get(name, shape) != shape
    ]
    if not (missing or unexpected or wrong):
        return
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    found = "; ".join(f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds if names)
    cure = "was config.json taken from another model?"
    if missing == ["lm_head.weight"]:
        cure = "if the head is the embedding, set tie_word_embeddings to true in config.json."
    raise ModelError(
        f"{source.where}: the tensors are not those of a {config.model_type} model with "
        f"{config.num_hidden_layers} layers ({len(needed)} tensors): {found}; {cure}"
    )


def _has_bias(config: LlamaConfig, name: str) -> bool:
    if name in MLP_SITES:
        return config.mlp_bias
    return config.o_bias if name == "o_proj" else config.qkv_bias


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@partial(jax.jit, static_argnames=("dtype", "transpose"))
def _place(array: jax.Array, dtype: jnp.dtype, transpose: bool) -> tuple[jax.Array, jax.Array]:
    """The array as the model holds it, and whether it is finite."""
    placed = (array.T if transpose else array).astype(dtype)
    return placed, jnp.isfinite(placed).all()

"""A tiny base whose every dimension differs, in numpy, and checkpoints for it. No torch here.

params = random_params("biased"); write(folder, config, tensors)
adapter = load_peft(folder, CONFIGS["biased"], params); y = forms.apply_over(adapter[site], ...)
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from scute_jax.peft.base import Base, Projection

# vocab 97, hidden 48, intermediate 80, q and o 72, k and v 24: no two sides of a module agree.
PLAIN = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "biased": PLAIN | {"attention_bias": True, "mlp_bias": True},
    "tied": PLAIN | {"tie_word_embeddings": True},
    "qwen2": PLAIN | {"model_type": "qwen2", "num_attention_heads": 4},
    "wider": PLAIN | {"intermediate_size": 96},
    "deeper": PLAIN | {"num_hidden_layers": 3},
    "larger vocab": PLAIN | {"vocab_size": 101},
}


@cache
def random_params(name: str) -> dict[str, np.ndarray]:
    """Hugging Face tensor name -> float32 array in torch's layout [d_out, d_in]."""
    config, rng = CONFIGS[name], np.random.default_rng(7)
    base = Base.from_config(config)
    params = {"model.embed_tokens.weight": rng.normal(size=(base.vocab, base.hidden))}
    for p in base.projections:
        params[f"{p.module}.weight"] = rng.normal(size=(p.d_out, p.d_in)) / np.sqrt(p.d_in)
        if p.has_bias:
            params[f"{p.module}.bias"] = 0.5 * rng.normal(size=p.d_out)
    if base.tied:
        params["lm_head.weight"] = params["model.embed_tokens.weight"]
    norms = {f"{norm}.weight": np.ones(base.hidden) for norm in base.others[1:]}
    return {name: array.astype(np.float32) for name, array in (params | norms).items()}


def projections(name: str) -> tuple[Projection, ...]:
    return Base.from_config(CONFIGS[name]).projections


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """An adapter folder; without tensors only the config is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    if tensors is not None:
        arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def lora_checkpoint(
    modules: tuple[str, ...] = ("q_proj", "down_proj"), base: str = "plain", r: int = 4, **fields
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of a random LoRA, with PEFT's keys."""
    rng = np.random.default_rng(3)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 8, "target_modules": list(modules)}
    tensors = {}
    for p in projections(base):
        if p.module.endswith(modules):
            key = f"base_model.model.{p.module}"
            tensors[f"{key}.lora_A.weight"] = rng.normal(size=(r, p.d_in)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = rng.normal(size=(p.d_out, r)).astype(np.float32)
    return config | fields, tensors


def base_output(params: Mapping[str, np.ndarray], module: str):
    """x -> x W + bias in float64."""
    W = np.float64(params[f"{module}.weight"]).T
    bias = np.float64(params.get(f"{module}.bias", 0.0))
    return lambda x: x @ W + bias

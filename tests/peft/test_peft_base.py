"""The base as its config describes it, and its weights on demand."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIGS, PLAIN, random_params

from scute_jax import AdapterError
from scute_jax.models.config import LlamaConfig
from scute_jax.peft.base import Base
from scute_jax.peft.weights import BaseWeights


def biased(base: Base) -> set[str]:
    return {p.module.split(".")[-1] for p in base.projections if p.has_bias}


def test_modules_in_the_order_of_the_model():
    base = Base.from_config(PLAIN)
    assert [(p.site, p.d_in, p.d_out) for p in (*base.projections[:7], base.projections[-1])] == [
        ("layers.0.self_attn.q_proj", 48, 72),
        ("layers.0.self_attn.k_proj", 48, 24),
        ("layers.0.self_attn.v_proj", 48, 24),
        ("layers.0.self_attn.o_proj", 72, 48),
        ("layers.0.mlp.gate_proj", 48, 80),
        ("layers.0.mlp.up_proj", 48, 80),
        ("layers.0.mlp.down_proj", 80, 48),
        ("lm_head", 48, 97),
    ]
    assert biased(base) == set()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_modules_are_those_of_transformers(name: str):
    pytest.importorskip("torch", reason="the oracle is transformers")
    from peft_oracle import base_model, torch

    base, model = Base.from_config(CONFIGS[name]), base_model(name)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert [p.module for p in base.projections] == list(linear)
    for p in base.projections:
        module = linear[p.module]
        assert (module.in_features, module.out_features) == (p.d_in, p.d_out)
        assert (module.bias is not None) == p.has_bias
    assert Base.from_config(model.config) == base
    weighted = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    assert weighted - {p.module for p in base.projections} == set(base.others)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_config(name: str):
    base = Base.from_config(CONFIGS[name])
    assert Base.from_config(SimpleNamespace(**CONFIGS[name])) == base
    rope = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}
    assert Base.from_config(LlamaConfig.from_hf(CONFIGS[name] | rope)) == base


def test_biases_by_model_type():
    assert biased(Base.from_config(CONFIGS["biased"])) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert biased(Base.from_config(CONFIGS["qwen2"])) == {"q_proj", "k_proj", "v_proj"}
    mistral = PLAIN | {"model_type": "mistral", "attention_bias": True}
    assert biased(Base.from_config(mistral)) == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0, needed a positive integer"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
    ],
)
def test_a_config_of_no_model_that_is_served(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Base.from_config(PLAIN | change)


def test_weights_of_a_folder_in_shards(tmp_path: Path):
    params = random_params("tied")
    arrays = {k.removeprefix("model."): v for k, v in params.items() if k != "lm_head.weight"}
    halves = list(arrays)[::2], list(arrays)[1::2]
    for i, names in enumerate(halves):
        save_file({name: arrays[name] for name in names}, tmp_path / f"{i}.safetensors")
    index = {name: f"{i}.safetensors" for i, names in enumerate(halves) for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    base = Base.from_config(CONFIGS["tied"])
    weights = BaseWeights(tmp_path, base)
    for p in base.projections:
        assert np.array_equal(weights.weight(p, ""), params[f"{p.module}.weight"].T)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"1\.safetensors: cannot be read"):
        [BaseWeights(tmp_path, base).weight(p, "") for p in base.projections]


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none(content: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(AdapterError, match="no index of tensors"):
        BaseWeights(tmp_path, Base.from_config(PLAIN))


def test_params_that_are_none():
    base = Base.from_config(PLAIN)
    with pytest.raises(AdapterError, match="params names a folder without"):
        BaseWeights("nowhere", base)
    with pytest.raises(TypeError, match="params is a int"):
        BaseWeights(3, base)
    with pytest.raises(AdapterError, match="needed: a reason. Pass params="):
        BaseWeights(None, base).weight(base.projections[0], "a reason")

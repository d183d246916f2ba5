"""GLoRA against the PEFT library: vectors, constants and nothing on each of its paths."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, modules
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.GloraConfig:
    return quiet(peft.GloraConfig, **fields)


@settings(max_examples=40, deadline=None)
@given(
    r=st.integers(1, 6),
    a_b=st.sampled_from(["vector", "constant", "none"]),
    c=st.sampled_from(["lora", "vector", "none"]),
    d_e=st.sampled_from(["vector", "constant", "none"]),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "glora_only"]),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, a_b, c, d_e, init, bias, modules, base, seed):
    config = make(
        r=r,
        config_A_B=a_b,
        config_C=c,
        config_D_E=d_e,
        init_weights=init,
        bias=bias,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, tolerance=1e-4, needs_effect=a_b != "none")
    assert adapter.method == "GLORA" and set(adapter.live) <= {"s", "b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = make(config_A_B="none", config_C="none", target_modules=["q_proj"])
    return save_adapter(config, "biased", tmp_path)


def test_a_matrix_beside_the_weight_is_refused(folder: Path):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config_A_B": "lora"}))
    with pytest.raises(AdapterError, match="config_A_B.*full rank.*scute convert"):
        load_peft(folder, CONFIGS["biased"], random_params("biased"))


@pytest.mark.parametrize("name", ["glora_A.zeros", "glora_C.zeros"])
def test_zeros_that_are_none_are_refused(name: str, folder: Path):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(name))
    tensors[key] = np.ones_like(tensors[key])
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=f"q_proj.*{name} has to hold zeros"):
        load_peft(folder, CONFIGS["biased"], random_params("biased"))

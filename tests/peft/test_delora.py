"""DeLoRA against the PEFT library: the bound, the norms, and norms too small to divide by."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from test_lora import patterns
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

ranks = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(
    r=ranks,
    bound=st.sampled_from([15, 0.5, -3]),
    rank_pattern=patterns(ranks),
    lambda_pattern=patterns(st.integers(1, 40)),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "delora_only"]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, bound, rank_pattern, lambda_pattern, init, bias, modules, base, seed):
    config = peft.DeloraConfig(
        r=r,
        delora_lambda=bound,
        module_dropout=0.3,
        init_weights=init,
        bias=bias,
        target_modules=modules,
        rank_pattern=rank_pattern,
        lambda_pattern=lambda_pattern,
    )
    adapter = serve(config, base, seed, save_embedding_layers=False)
    assert adapter.method == "DELORA" and set(adapter.live) <= {"b"}


def test_norms_are_those_of_the_file_and_at_least_a_little(tmp_path: Path):
    config = peft.DeloraConfig(r=3, delora_lambda=5e4, target_modules=["q_proj"])
    folder = save_adapter(config, "plain", tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, array in tensors.items():
        if key.endswith("delora_A"):
            array[1] *= 1e-6 / np.linalg.norm(array[1])
        if key.endswith("delora_B"):
            array[:, 2] = 0
        if key.endswith("w_norm"):
            array[::2] *= 3
    save_file(tensors, folder / "adapter_model.safetensors")
    compare(load_peft(folder, CONFIGS["plain"]), folder, "plain")


def test_norms_beyond_float32_are_refused(tmp_path: Path):
    config = peft.DeloraConfig(r=3, target_modules=["q_proj"])
    path = save_adapter(config, "plain", tmp_path) / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v * 1e20 if k.endswith("_B") else v for k, v in tensors.items()}, path)
    with pytest.raises(AdapterError, match="layers.0.self_attn.q_proj: delora_A or delora_B has"):
        load_peft(tmp_path, CONFIGS["plain"])

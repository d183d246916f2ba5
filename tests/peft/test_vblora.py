"""VB-LoRA against the PEFT library: logits in full, and the weights of the largest alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, modules
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.VBLoRAConfig:
    return quiet(peft.VBLoRAConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 6),
    vectors=st.integers(1, 12),
    length=st.sampled_from([1, 2, 4, 8]),
    topk=st.integers(1, 12),
    only=st.booleans(),
    bias=st.sampled_from(["none", "all", "vblora_only"]),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, vectors, length, topk, only, bias, modules, base, seed):
    config = make(
        r=r,
        num_vectors=vectors,
        vector_length=length,
        topk=min(topk, vectors),
        save_only_topk_weights=only,
        vblora_dropout=0.3,
        bias=bias,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, scale=2.0, tolerance=1e-4 if only else 1e-5)
    assert adapter.method == "VBLORA" and set(adapter.live) <= {"b"}
    assert {form.rank for form in adapter.sites.values() if form.terms} == {r}


def changed(tmp_path: Path, only: bool, name: str, change) -> Path:
    config = make(r=3, num_vectors=6, vector_length=4, topk=2, target_modules=["q_proj"])
    config.save_only_topk_weights = only
    path = save_adapter(config, "plain", tmp_path, scale=2.0) / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(name))
    change(tensors[key])
    save_file(tensors, path)
    return tmp_path


def put(values) -> object:
    def change(array: np.ndarray) -> None:
        array[0, 0] = values

    return change


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("vblora_logits_A_topk_indices", [1, 6], "2 different vectors out of the 6"),
        ("vblora_logits_A_topk_indices", [3, 3], "2 different vectors out of the 6"),
        ("vblora_logits_B_topk_weights", [1.5], "none below 0, at most 1 in sum"),
        ("vblora_logits_B_topk_weights", [-0.1], "none below 0, at most 1 in sum"),
    ],
)
def test_a_choice_that_is_none_is_refused(name, values, message, tmp_path: Path):
    folder = changed(tmp_path, True, name, put(values))
    with pytest.raises(AdapterError, match=rf"layers\.\d\.self_attn\.q_proj.*{name}.*{message}"):
        load_peft(folder, CONFIGS["plain"])


def test_equal_logits_at_the_last_place_are_refused_and_before_it_are_not(tmp_path: Path):
    folder = changed(tmp_path / "a", False, "vblora_logits_A", put([5, 1, 2, 2, 0, -1]))
    with pytest.raises(AdapterError, match="vblora_logits_A has equal logits at place 2"):
        load_peft(folder, CONFIGS["plain"])
    folder = changed(tmp_path / "b", False, "vblora_logits_A", put([5, 5, 2, 2, 0, -1]))
    compare(load_peft(folder, CONFIGS["plain"]), folder, "plain")

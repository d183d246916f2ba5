"""MiSS against the PEFT library, and Bone, the same function in files of PEFT before 0.19."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


@settings(max_examples=25, deadline=None)
@given(
    r=st.integers(1, 24),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "MiSS_only"]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, init, bias, modules, base, seed):
    config = peft.MissConfig(
        r=r, mini_r=5, miss_dropout=0.3, init_weights=init, bias=bias, target_modules=modules
    )
    adapter = serve(config, base, seed, save_embedding_layers=False)
    assert adapter.method == "MISS" and set(adapter.live) <= {"b"}
    assert {form.rank for form in adapter.sites.values() if form.terms} == {r}


@settings(max_examples=15, deadline=None)
@given(
    r=st.integers(1, 24),
    mini_r=st.sampled_from([1, 2, 4, 8]),
    modules=with_head.filter(lambda names: "lm_head" not in names),
    base=bases,
)
def test_the_mini_variant(r, mini_r, modules, base):
    config = peft.MissConfig(r=r, mini_r=mini_r, init_weights="mini", target_modules=modules)
    adapter = serve(config, base)
    assert {form.rank for form in adapter.sites.values()} == {min(r, mini_r)}


def as_bone(folder: Path) -> Path:
    """The files of a MiSS adapter as PEFT 0.14 to 0.18 wrote them."""
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields = {k: v for k, v in fields.items() if k not in ("mini_r", "miss_dropout")}
    path.write_text(json.dumps(fields | {"peft_type": "BONE"}))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k.replace("miss_block", "bone_block"): v for k, v in tensors.items()}, path)
    return folder


@pytest.mark.parametrize("init", [True, False])
def test_a_bone_file_is_the_miss_file_of_other_names(init: bool, tmp_path: Path):
    config = peft.MissConfig(r=7, init_weights=init, target_modules=["q_proj", "down_proj"])
    serve(config, "plain", seed=5)
    folder = save_adapter(config, "plain", tmp_path, seed=5)
    miss = load_peft(folder, CONFIGS["plain"])
    bone = load_peft(as_bone(folder), CONFIGS["plain"])
    assert (miss.method, bone.method) == ("MISS", "BONE") and miss.version == bone.version


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("init_weights", "bat", "full rank.*scute convert"),
        ("init_weights", "other", "known are true, false, 'mini'"),
        ("init_weights", 7, "known are true, false, 'mini'"),
        ("r", 0, "needed 1 to 48"),
        ("r", 49, "needed 1 to 48"),
    ],
)
def test_variants_that_are_not_served_are_refused(field, value, message, tmp_path: Path):
    folder = save_adapter(peft.MissConfig(r=4, target_modules=["q_proj"]), "plain", tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(AdapterError, match=f"{field}.*{message}"):
        load_peft(folder, CONFIGS["plain"])
    if value == "bat":
        with pytest.raises(AdapterError, match=f"{field}.*{message}"):
            load_peft(as_bone(folder), CONFIGS["plain"])


def test_a_mini_block_has_to_divide_the_output(tmp_path: Path):
    config = peft.MissConfig(r=4, mini_r=8, init_weights="mini", target_modules=["q_proj"])
    path = save_adapter(config, "plain", tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mini_r": 5}))
    with pytest.raises(AdapterError, match="mini_r.*divide the width.*q_proj, 72"):
        load_peft(tmp_path, CONFIGS["plain"])

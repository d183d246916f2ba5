"""Uni-LoRA against the PEFT library: indices that are saved, and indices that are drawn."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.UniLoraConfig:
    return quiet(peft.UniLoraConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 6),
    length=st.sampled_from([1, 7, 64, 1000, 20000]),
    proj_seed=st.integers(0, 2**40),
    saved=st.booleans(),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "unilora_only"]),
    layers=st.sampled_from([None, [1], 0]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, length, proj_seed, saved, init, bias, layers, modules, base, seed):
    config = make(
        r=r,
        theta_d_length=length,
        proj_seed=proj_seed,
        save_indices=saved,
        init_weights=init,
        unilora_dropout=0.3,
        bias=bias,
        layers_to_transform=None if modules == ["lm_head"] else layers,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, scale=2.0, save_embedding_layers=False)
    assert adapter.method == "UNILORA" and set(adapter.live) <= {"b"}
    assert {form.rank for form in adapter.sites.values() if form.terms} == {r}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {"r": 2, "theta_d_length": 50, "save_indices": True, "proj_seed": 3}
    return save_adapter(make(**fields, target_modules=["q_proj"]), "plain", tmp_path)


def set_fields(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_saved_indices_are_what_would_be_drawn(folder: Path):
    saved = load_peft(folder, CONFIGS["plain"])
    path = folder / "adapter_model.safetensors"
    theta = {k: v for k, v in load_file(path).items() if k.endswith("theta_d")}
    save_file(theta, path)
    set_fields(folder, save_indices=False)
    assert load_peft(folder, CONFIGS["plain"]).version == saved.version
    set_fields(folder, proj_seed=4)
    other = load_peft(folder, CONFIGS["plain"])
    compare(other, folder, "plain")
    assert other.version != saved.version


def test_places_beyond_the_vector_are_refused(folder: Path):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(k for k in tensors if k.endswith("q_proj.unilora_indices_B"))
    tensors[key][3, 1] = 50
    save_file(tensors, path)
    with pytest.raises(AdapterError, match="q_proj.*unilora_indices_B reaches.*needed.*0 to 49"):
        load_peft(folder, CONFIGS["plain"])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"save_indices": False, "proj_seed": -1}, "proj_seed.*0 or more"),
        ({"save_indices": False, "proj_seed": None}, "proj_seed.*state it"),
        ({"save_indices": False}, "of no use: .*unilora_indices_A"),
        ({"theta_d_length": 49}, r"unilora_theta_d.*\[50\].*\[49\]"),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, "exclude_modules.*ignores it"),
    ],
)
def test_what_contradicts_the_file_is_refused(fields: dict, named: str, folder: Path):
    set_fields(folder, **fields)
    with pytest.raises(AdapterError, match=named):
        load_peft(folder, CONFIGS["plain"])

"""TinyLoRA against the PEFT library: vectors of single modules and of groups, P saved or drawn."""

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


def make(**fields) -> peft.TinyLoraConfig:
    return quiet(peft.TinyLoraConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 30),
    u=st.integers(1, 20),
    tying=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 0.9, 1.0]),
    projection_seed=st.integers(-5, 2**40),
    saved=st.booleans(),
    init=st.sampled_from([True, "uniform"]),
    bias=st.sampled_from(["none", "all", "tinylora_only"]),
    layers=st.sampled_from([None, [1], 0]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, u, tying, projection_seed, saved, init, bias, layers, modules, base, seed):
    config = make(
        r=r,
        u=u,
        weight_tying=tying,
        projection_seed=projection_seed,
        save_projection=saved,
        init_weights=init,
        tinylora_dropout=0.3,
        bias=bias,
        layers_to_transform=None if modules == ["lm_head"] else layers,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, save_embedding_layers=False)
    assert adapter.method == "TINYLORA" and set(adapter.live) <= {"b"}


def load(folder: Path, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return load_peft(folder, CONFIGS["plain"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {"r": 4, "u": 5, "projection_seed": 3, "weight_tying": 0.5}
    return save_adapter(make(**fields, target_modules=["q_proj", "v_proj"]), "plain", tmp_path)


def test_a_file_that_holds_what_would_be_drawn_serves_what_it_holds(folder: Path):
    compare(load(folder, save_projection=False), folder, "plain")
    with pytest.raises(AdapterError, match="save_projection.*tinylora_P.*q_proj.*another one"):
        load(folder, projection_seed=4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight_tying": 1.5}, "weight_tying.*0 to 1"),
        ({"weight_tying": 0.0}, r"2 tensor.s. missing: 'base_model.tinylora_v\.2'"),
        ({"weight_tying": 1.0}, "of no use: 'base_model.tinylora_v.1'"),
        ({"save_projection": False, "projection_seed": 2**64}, "projection_seed.*64 bits"),
        ({"u": 0}, "'u'.*at least 1"),
    ],
)
def test_what_contradicts_the_file_is_refused(fields: dict, named: str, folder: Path):
    with pytest.raises(AdapterError, match=named):
        load(folder, **fields)


def test_a_projection_that_is_missing_is_not_drawn_unless_the_config_says_so(folder: Path):
    path = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not k.endswith("tinylora_P")}, path)
    with pytest.raises(AdapterError, match="4 tensor.s. missing: .*tinylora_P"):
        load(folder)
    assert load(folder, save_projection=False).sites

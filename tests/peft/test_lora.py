"""LoRA against the PEFT library: every option that changes the function."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft

PATTERNS = ("q_proj", "self_attn.v_proj", r".*layers\.1\..*_proj", "model.layers.0.mlp.up_proj")


def patterns(values: st.SearchStrategy) -> st.SearchStrategy:
    """Patterns in the order in which PEFT writes them; of two that match, the first counts."""
    drawn = st.dictionaries(st.sampled_from(PATTERNS), values, max_size=3)
    return drawn.map(lambda pattern: dict(sorted(pattern.items())))


bases = st.sampled_from(["plain", "biased", "qwen2", "tied"])
ranks = st.integers(1, 9)


@st.composite
def configs(draw) -> peft.LoraConfig:
    return quiet(
        peft.LoraConfig,
        r=draw(ranks),
        lora_alpha=draw(st.one_of(st.integers(1, 32), st.just(-3), st.floats(0.5, 9.0))),
        use_rslora=draw(st.booleans()),
        lora_bias=draw(st.booleans()),
        lora_dropout=draw(st.sampled_from([0.0, 0.3])),
        fan_in_fan_out=draw(st.booleans()),
        bias=draw(st.sampled_from(["none", "all", "lora_only"])),
        init_lora_weights=draw(st.booleans()),
        target_modules=list(draw(st.sets(st.sampled_from(MODULES), min_size=1))),
        rank_pattern=draw(patterns(ranks)),
        alpha_pattern=draw(patterns(st.integers(1, 40))),
    )


@settings(max_examples=25, deadline=None)
@given(configs(), bases, st.integers(0, 99))
def test_every_option(config: peft.LoraConfig, base: str, seed: int):
    adapter = serve(config, base, seed)
    assert adapter.method == "LORA"
    assert adapter.live in ((), ("b",))
    assert all(term.c == 1.0 for form in adapter.sites.values() for term in form.terms)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
        {"target_modules": r".*\.layers\.1\.(self_attn|mlp)\.[vud].*"},
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-linear", "exclude_modules": r".*layers\.0.*"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {
            "target_modules": ["model.layers.1.mlp.up_proj", "q_proj"],
            "layers_to_transform": [0],
            "layers_pattern": ["h", "layers"],
        },
        {"target_modules": None},
        {"target_modules": [f"model.layers.{i}.mlp.{m}" for i in (0, 1) for m in MODULES[4:]]},
    ],
)
def test_every_way_to_name_targets(targets: dict):
    adapter = serve(peft.LoraConfig(r=3, **targets), "biased")
    assert adapter.sites


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "eva", "mica"])
def test_initialisations_that_leave_a_plain_lora(init: str):
    config = quiet(peft.LoraConfig, r=4, init_lora_weights=init, target_modules=list(MODULES))
    assert serve(config, "biased").live == ()


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["pissa", "olora"]),
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 20),
    st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_unconverted_pissa_and_olora_are_two_terms(init, rslora, r, alpha, base):
    config = quiet(
        peft.LoraConfig,
        r=r,
        lora_alpha=alpha,
        use_rslora=rslora,
        init_lora_weights=init,
        target_modules=list(MODULES),
    )
    adapter = serve(config, base, tolerance=1e-4)  # PEFT's own SVD and QR are in float32
    assert {len(form.terms) for form in adapter.sites.values()} == {2}
    assert {form.rank for form in adapter.sites.values()} == {2 * r}


def test_a_converted_pissa_is_one_term(tmp_path: Path):
    base, name = "biased", "pissa"
    config = peft.LoraConfig(r=3, init_lora_weights="pissa", target_modules=["q_proj", "down_proj"])
    initial, folder = tmp_path / "initial", tmp_path / "converted"
    save_adapter(config, base, initial, scale=0.0)
    config = peft.LoraConfig(r=3, init_lora_weights="pissa", target_modules=["q_proj", "down_proj"])
    save_adapter(config, base, folder, path_initial_model_for_weight_conversion=str(initial))
    adapter = load_peft(folder, CONFIGS[base])
    compare(adapter, folder, base, tolerance=1e-4)
    assert {len(form.terms) for form in adapter.sites.values()} == {1}, name


@pytest.mark.parametrize("base", ["plain", "tied"])
def test_the_head_is_a_site_like_others(base: str):
    """PEFT saves a copy of the head's own weight beside it, which has to equal the base's."""
    adapter = serve(quiet(peft.LoraConfig, r=3, target_modules=["lm_head", "q_proj"]), base)
    assert "lm_head" in adapter


def test_a_head_of_its_own_is_refused(tmp_path: Path):
    folder = save_adapter(peft.LoraConfig(r=3, target_modules=["lm_head"]), "plain", tmp_path)
    params = random_params("plain") | {
        "lm_head.weight": random_params("plain")["lm_head.weight"] + 1
    }
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.weight.*differs by up to 1\.0"):
        load_peft(folder, CONFIGS["plain"], params)
    with pytest.raises(AdapterError, match=r"lm_head.*copy.*Pass params="):
        load_peft(folder, CONFIGS["plain"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_float_dtype_is_computed_in_float32(dtype: str, tmp_path: Path):
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    folder = save_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"]), "plain", tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = {k: v.to(getattr(torch, dtype)) for k, v in load_file(path).items()}
    save_torch(tensors, path)
    adapter = load_peft(folder, CONFIGS["plain"])
    compare(adapter, folder, "plain")
    assert adapter["layers.0.self_attn.q_proj"].terms[0].A.dtype == np.float32


def test_a_bin_file_holds_the_same_adapter(tmp_path: Path):
    for safe in (True, False):
        config = peft.LoraConfig(r=3, target_modules=["q_proj"])
        save_adapter(config, "plain", tmp_path / str(safe), safe_serialization=safe)
    assert [p.name for p in (tmp_path / "False").glob("adapter_model.*")] == ["adapter_model.bin"]
    versions = {load_peft(tmp_path / str(s), CONFIGS["plain"]).version for s in (True, False)}
    assert len(versions) == 1


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("pissa_niter_4", "randomised.*path_initial_model_for_weight_conversion"),
        ("corda", "CorDA.*path_initial_model_for_weight_conversion"),
        ("lora_ga", "LoRA-GA.*path_initial_model_for_weight_conversion"),
        ("loftq", "quantised"),
        ("surprise", "no initialisation of this name"),
        (7, "no initialisation of this name"),
    ],
)
def test_initialisations_that_are_not_in_the_file_are_refused(init, message, tmp_path):
    folder = save_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"]), "plain", tmp_path)
    config = folder / "adapter_config.json"
    config.write_text(
        config.read_text()
        .replace('"init_lora_weights": true', f'"init_lora_weights": {init!r}')
        .replace("'", '"')
    )
    with pytest.raises(AdapterError, match=f"init_lora_weights.*{message}"):
        load_peft(folder, CONFIGS["plain"], random_params("plain"))


def test_pissa_on_a_tied_head_is_refused(tmp_path: Path):
    config = quiet(peft.LoraConfig, r=3, target_modules=["lm_head"], init_lora_weights="olora")
    folder = save_adapter(config, "tied", tmp_path, save_embedding_layers=False)
    with pytest.raises(AdapterError, match="lm_head.*tied"):
        load_peft(folder, CONFIGS["tied"], random_params("tied"))


def test_defaults_are_those_of_the_installed_peft():
    from scute_jax.peft.targets import DEFAULT_TARGETS

    tables = peft.utils.constants
    for peft_type, by_model in DEFAULT_TARGETS.items():
        table = getattr(tables, f"TRANSFORMERS_MODELS_TO_{peft_type}_TARGET_MODULES_MAPPING")
        assert by_model == {model: tuple(table[model]) for model in by_model}

"""What `save_peft` writes, PEFT loads and runs to the same numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, load_with_peft, peft, quiet, save_adapter, torch
from test_ssf import checkpoint as ssf_checkpoint
from tiny_checkpoints import CONFIGS, random_params, write

from scute_jax import Adapter, AdapterError, NormalForm, Term, scaled, stack
from scute_jax.normal_form import Blocks, Sparse, TokenRows
from scute_jax.peft import load_peft, save_peft
from scute_jax.peft.oft import neumann, neumann_coefficients, skew
from scute_jax.peft.oft_blocks import cayley
from scute_jax.peft.oft_inverse import cayley_inverse, neumann_inverse

BASE, MODULES = "biased", ["q_proj", "v_proj", "up_proj", "down_proj"]
PARAMS = random_params(BASE)


def oft(**fields):
    return quiet(peft.OFTConfig, target_modules=MODULES, **({"oft_block_size": 7} | fields))


MADE = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=MODULES, rank_pattern={"v_proj": 2}),
    "rslora with biases": lambda: peft.LoraConfig(
        r=4, target_modules=MODULES, use_rslora=True, lora_bias=True, bias="all"
    ),
    "pissa": lambda: peft.LoraConfig(r=4, target_modules=MODULES, init_lora_weights="pissa"),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=MODULES, use_dora=True),
    "dora of pissa": lambda: peft.LoraConfig(
        r=4, target_modules=MODULES, use_dora=True, init_lora_weights="pissa"
    ),
    "ia3": lambda: peft.IA3Config(target_modules=MODULES, feedforward_modules=["down_proj"]),
    "ia3 output": lambda: peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
    "vera": lambda: quiet(peft.VeraConfig, r=6, target_modules=MODULES, save_projection=False),
    "vera with biases": lambda: peft.VeraConfig(r=6, target_modules=MODULES, bias="vera_only"),
    "oft": oft,
    "oft of three terms": lambda: oft(num_cayley_neumann_terms=3),
    "oft of eight terms": lambda: oft(num_cayley_neumann_terms=8),
    "oft exact": lambda: oft(use_cayley_neumann=False, r=5, oft_block_size=0),
    "oft shared": lambda: oft(block_share=True, coft=True, eps=0.3),
    "oft of one block": lambda: oft(oft_block_size=1000),
}


@pytest.mark.parametrize("name", MADE)
def test_what_was_loaded_is_saved(name: str, tmp_path: Path):
    scale = 0.1 if "oft" in name else 0.3
    folder = save_adapter(MADE[name](), BASE, tmp_path / "peft", scale=scale)
    adapter = load_peft(folder, CONFIGS[BASE], PARAMS)
    save_peft(adapter, tmp_path / "ours")
    tolerance = 1e-4 if "pissa" in name else 2e-5
    compare(adapter, tmp_path / "ours", BASE, tolerance)
    again = load_peft(tmp_path / "ours", CONFIGS[BASE], PARAMS)
    assert again.sites.keys() == adapter.sites.keys()
    if name in ("lora", "ia3", "ia3 output", "vera"):
        assert again.version == adapter.version


def loaded(config, tmp_path: Path, seed: int = 0) -> Adapter:
    folder = save_adapter(config, BASE, tmp_path / f"part{seed}", seed, scale=0.1)
    return load_peft(folder, CONFIGS[BASE], PARAMS)


def test_stacks_of_low_rank_terms_are_a_lora(tmp_path: Path):
    parts = (
        peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"]),
        quiet(peft.VeraConfig, r=5, target_modules=["q_proj", "down_proj"]),
        peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True),
    )
    adapters = [loaded(part, tmp_path, seed) for seed, part in enumerate(parts)]
    stacked = stack(stack(adapters[0], adapters[1]), adapters[2])
    save_peft(stacked, tmp_path / "stack")
    compare(stacked, tmp_path / "stack", BASE, 1e-5)
    again = load_peft(tmp_path / "stack", CONFIGS[BASE])
    assert again["layers.0.self_attn.q_proj"].rank == 3 + 5 + 2


def test_stacks_of_scales_and_of_rotations(tmp_path: Path):
    for name, make in {
        "ia3": lambda: peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[]),
        "oft": lambda: oft(use_cayley_neumann=False),
    }.items():
        first, second = (loaded(make(), tmp_path / name, seed) for seed in (1, 2))
        stacked = stack(first, second)
        save_peft(stacked, tmp_path / name / "stack")
        compare(stacked, tmp_path / name / "stack", BASE, 2e-5)


def test_a_scale_on_a_lora_is_a_dora_of_the_base(tmp_path: Path):
    """(IA)3 on top of LoRA where the base has no bias: s and terms, so m = s norm(W + A B)."""
    params, parts = random_params("plain"), []
    for seed, config in enumerate(
        (
            peft.LoraConfig(r=3, target_modules=["q_proj"]),
            peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        )
    ):
        folder = save_adapter(config, "plain", tmp_path / str(seed))
        parts.append(load_peft(folder, CONFIGS["plain"]))
    stacked = stack(*parts)
    with pytest.raises(AdapterError, match="q_proj: the magnitudes of a DoRA.*pass params="):
        save_peft(stacked, tmp_path / "dora")
    save_peft(stacked, tmp_path / "dora", params)
    compare(stacked, tmp_path / "dora", "plain", 1e-5)


def test_a_dora_without_its_file_needs_a_base_that_fits(tmp_path: Path):
    adapter = loaded(peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True), tmp_path)
    bare = Adapter(sites=adapter.sites, method="DORA", version=adapter.version)
    with pytest.raises(AdapterError, match="pass params="):
        save_peft(bare, tmp_path / "out")
    save_peft(bare, tmp_path / "out", PARAMS)
    compare(adapter, tmp_path / "out", BASE, 2e-5)
    replaced = loaded(
        peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True, bias="lora_only"),
        tmp_path,
        1,
    )
    with pytest.raises(AdapterError, match=r"q_proj: its shift b is not bias \(1 - s\)"):
        save_peft(replaced, tmp_path / "x", PARAMS)


TERMS_ONLY = {
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=MODULES),
    "miss": lambda: peft.MissConfig(r=4, target_modules=MODULES),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=MODULES),
    "pvera": lambda: quiet(peft.PveraConfig, r=4, target_modules=MODULES),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=9, target_modules=MODULES),
}


@pytest.mark.parametrize("name", TERMS_ONLY)
def test_other_methods_of_terms_alone_are_written_as_such(name: str, tmp_path: Path):
    adapter = loaded(TERMS_ONLY[name](), tmp_path)
    save_peft(adapter, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["peft_type"] == ("VERA" if name == "pvera" else "LORA")
    compare(adapter, tmp_path / "ours", BASE, 2e-5)


@pytest.mark.parametrize("name", ["lora", "rslora with biases", "dora", "ia3", "vera", "oft"])
def test_adapters_of_another_strength(name: str, tmp_path: Path):
    """A share of a rotation is no rotation, so it has no OFT file; the others have their own."""
    half = scaled(loaded(MADE[name](), tmp_path), 0.5)
    if name == "oft":
        with pytest.raises(AdapterError, match="its R is neither orthogonal nor a Neumann series"):
            save_peft(half, tmp_path / "half")
        return
    save_peft(half, tmp_path / "half", PARAMS)
    config = json.loads((tmp_path / "half" / "adapter_config.json").read_text())
    assert config["peft_type"] == {"ia3": "IA3", "vera": "VERA"}.get(name, "LORA")
    assert config.get("use_dora", False) == (name == "dora")
    compare(half, tmp_path / "half", BASE, 2e-5)


def test_shifts_keep_the_widths_of_stacks_and_scales(tmp_path: Path):
    shift = loaded(peft.BeftConfig(target_modules=["v_proj"]), tmp_path)
    lora = loaded(peft.LoraConfig(r=2, target_modules=["q_proj"]), tmp_path, 1)
    both = stack(lora, scaled(shift, 0.5))
    save_peft(both, tmp_path / "both")
    compare(both, tmp_path / "both", BASE, 1e-5)


def test_the_embedding_is_adapted_too(tmp_path: Path):
    rng = np.random.default_rng(0)
    table = Term(*(rng.normal(size=s).astype(np.float32) for s in ((97, 3), (3, 48))))
    query = Term(*(rng.normal(size=s).astype(np.float32) for s in ((48, 2), (2, 72))))
    sites = {
        "embed_tokens": NormalForm(terms=(table,)),
        "layers.0.self_attn.q_proj": NormalForm(terms=(query,)),
    }
    save_peft(Adapter(sites, "LORA", "0"), tmp_path)
    model = load_with_peft(tmp_path, BASE)
    embedding = model.base_model.model.get_submodule("model.embed_tokens")
    rows = embedding(torch.arange(97)).detach().numpy()
    expected = PARAMS["model.embed_tokens.weight"] + table.A @ table.B
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    shifted = sites | {"layers.0.self_attn.q_proj": NormalForm(b=np.ones(72), terms=(query,))}
    with pytest.raises(AdapterError, match="embed_tokens: PEFT has no lora_bias where"):
        save_peft(Adapter(shifted, "LORA", "0"), tmp_path)


EYES = Blocks(np.tile(np.eye(4, dtype=np.float32), (12, 1, 1)))
ONE = np.ones(1, np.int64)
UNWRITTEN = {
    "q_proj: no PEFT method.*tP": dict(P=(EYES,)),
    "q_proj: no PEFT method.*tQ": dict(Q=(EYES,)),
    "q_proj: no PEFT method.*tS": dict(S=Sparse(ONE, ONE, np.ones(1, np.float32))),
    "q_proj: no PEFT method.*tT": dict(rows=TokenRows(ONE, np.ones((1, 48), np.float32))),
}


@pytest.mark.parametrize("reason", UNWRITTEN)
def test_no_slot_is_left_out(reason: str, tmp_path: Path):
    term = Term(np.ones((48, 2), np.float32), np.ones((2, 72), np.float32))
    form = NormalForm(terms=(term,), **UNWRITTEN[reason])
    with pytest.raises(AdapterError, match=reason):
        save_peft(Adapter({"layers.0.self_attn.q_proj": form}, "X", "0"), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_input_vector_of_a_pair_is_written(tmp_path: Path):
    rng = np.random.default_rng(0)
    A, B, u = (rng.normal(size=s).astype(np.float32) for s in ((48, 2), (2, 72), (48,)))
    form = NormalForm(terms=(Term(A, B, u=u, pair="some pair"),))
    adapter = Adapter({"layers.0.self_attn.q_proj": form}, "X", "0")
    save_peft(adapter, tmp_path)
    compare(adapter, tmp_path, BASE, 1e-5)


def test_sites_that_are_no_projection_are_refused(tmp_path: Path):
    norm = NormalForm(s=np.full(48, 2.0, np.float32))
    with pytest.raises(AdapterError, match="input_layernorm: what an adapter does here is not"):
        save_peft(Adapter({"layers.0.input_layernorm": norm}, "LN_TUNING", "0"), tmp_path)


def test_ssf_comes_back_as_it_was(tmp_path: Path):
    adapter = load_peft(write(tmp_path / "a", *ssf_checkpoint()), CONFIGS[BASE])
    save_peft(adapter, tmp_path / "b")
    again = load_peft(tmp_path / "b", CONFIGS[BASE])
    assert again.version == adapter.version and again.method == "SSF"


def test_mixed_slots_have_no_method_in_peft(tmp_path: Path):
    one = np.ones(72, np.float32)
    mixed = NormalForm(R=np.tile(np.eye(4, dtype=np.float32), (12, 1, 1)), s=2 * one)
    adapter = Adapter({"layers.0.self_attn.q_proj": mixed}, method="X", version="0")
    with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.q_proj: no PEFT method.*Rs"):
        save_peft(adapter, tmp_path)
    assert not list(tmp_path.iterdir())
    shift = Adapter({"layers.0.self_attn.q_proj": NormalForm(b=one)}, method="X", version="0")
    with pytest.raises(
        AdapterError, match="q_proj: the form of this site does not show its widths"
    ):
        save_peft(shift, tmp_path)


def test_rotations_that_no_file_gives_are_refused(tmp_path: Path):
    site = "layers.0.self_attn.q_proj"
    twice = Adapter({site: NormalForm(R=np.tile(2 * np.eye(4), (12, 1, 1)))}, "OFT", "0")
    with pytest.raises(AdapterError, match="q_proj: its R is neither orthogonal nor a Neumann"):
        save_peft(twice, tmp_path)
    eye = {
        f"layers.{i}.self_attn.q_proj": np.tile(np.eye(k), (48 // k, 1, 1))
        for i, k in ((0, 4), (1, 6))
    }
    mixed = Adapter({site: NormalForm(R=R) for site, R in eye.items()}, "OFT", "0")
    with pytest.raises(AdapterError, match=r"no one block size.*\(48, 4\), \(48, 6\)"):
        save_peft(mixed, tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.floats(0.001, 0.6),
    st.sampled_from([0, 2, 3, 5, 6, 9]),
)
def test_q_is_found_from_r(k: int, seed: int, norm: float, terms: int):
    upper = np.random.default_rng(seed).normal(size=(4, k * (k - 1) // 2))
    Q = skew(upper, k)
    Q *= norm / max(np.linalg.norm(Q, 2, axis=(1, 2)).max(), 1e-9)
    coefficients = neumann_coefficients(terms)
    R = neumann(Q, coefficients) if terms else cayley(Q)
    R = R.astype(np.float32).astype(np.float64)
    found = neumann_inverse(R, coefficients) if terms else cayley_inverse(R)
    assert found is not None
    assert np.allclose(neumann(found, coefficients) if terms else cayley(found), R, atol=1e-5)


def test_the_files_are_those_of_peft(tmp_path: Path):
    term = Term(np.ones((48, 2), np.float32), np.ones((2, 72), np.float32))
    adapter = Adapter({"layers.0.self_attn.q_proj": NormalForm(terms=(term,))}, "LORA", "0")
    save_peft(adapter, tmp_path / "new" / "folder")
    config = json.loads((tmp_path / "new" / "folder" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)

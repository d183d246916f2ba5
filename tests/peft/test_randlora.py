"""RandLoRA against the PEFT library: saved bases of every kind, and sparse ones drawn again."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, load_with_peft, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import modules
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

# d_in > d_out for k, v, o and down: 48, 72, 80 to 24 or 48; o_proj of qwen2 is square.
AT = "layers.0.self_attn.v_proj"


def make(**fields) -> peft.RandLoraConfig:
    return quiet(peft.RandLoraConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 50),
    alpha=st.sampled_from([640, 8, -3]),
    key=st.integers(0, 2**40),
    kind=st.sampled_from(["dense", "sparse", "very_sparse", "both"]),
    saved=st.booleans(),
    bias=st.sampled_from(["none", "all", "randlora_only"]),
    init=st.booleans(),
    modules=modules,
    layers=st.sampled_from([None, [1], 0]),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(r, alpha, key, kind, saved, bias, init, modules, layers, base):
    config = make(
        r=r,
        randlora_alpha=alpha,
        projection_prng_key=key,
        sparse=kind in ("sparse", "both"),
        very_sparse=kind in ("very_sparse", "both"),
        save_projection=saved or kind == "dense",
        bias=bias,
        init_weights=init,
        target_modules=modules,
        layers_to_transform=layers,
    )
    adapter = serve(config, base)
    for form in (f for f in adapter.sites.values() if f.terms):
        d_in, d_out = len(form.terms[0].A), form.terms[0].B.shape[1]
        assert set(form.live) - {"b"} == ({"d", "e"} if d_in > d_out else {"u", "d"})
        assert sum(term.rank for term in form.terms) >= min(d_in, d_out)


def save(tmp_path: Path, name: str, seed: int = 0, **fields) -> Path:
    config = make(**{"r": 5, "target_modules": ["v_proj", "down_proj"], "sparse": True} | fields)
    return save_adapter(config, "plain", tmp_path / name, seed)


def test_tenants_of_one_seed_share_the_bases(tmp_path: Path):
    a, b, c, d = (
        load_peft(save(tmp_path, str(i), i, **fields), CONFIGS["plain"])
        for i, fields in enumerate(
            ({}, {"save_projection": False}, {"projection_prng_key": 1}, {"r": 6})
        )
    )
    pairs = [{t.pair for t in adapter[AT].terms} for adapter in (a, b, c, d)]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 5 and a.version != b.version
    assert not pairs[0] & pairs[2] and not pairs[0] & pairs[3]
    terms = [t for adapter in (a, b) for form in adapter.sites.values() for t in form.terms]
    assert len({id(factor.base) for t in terms for factor in (t.A, t.B)}) == 2


def test_dense_bases_that_are_not_saved_are_refused_and_can_be_saved(tmp_path: Path):
    fields = {"sparse": False, "save_projection": False}
    folder = save(tmp_path, "drawn", **fields)
    with pytest.raises(AdapterError, match="save_projection.*half precision.*save it again"):
        load_peft(folder, CONFIGS["plain"])
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('projection": false', 'projection": true'))
    load_with_peft(folder, "plain").save_pretrained(tmp_path / "saved")
    compare(load_peft(tmp_path / "saved", CONFIGS["plain"]), tmp_path / "saved", "plain")


def changed(folder: Path, change) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change(tensors), folder / "adapter_model.safetensors")
    return folder


def test_one_copy_of_the_bases_is_enough(tmp_path: Path):
    whole = load_peft(save(tmp_path, "whole"), CONFIGS["plain"])
    for name, dropped in (("a", "base_model.model"), ("b", "base_model.randlora")):
        folder = changed(
            save(tmp_path, name),
            lambda tensors, dropped=dropped: {
                k: v
                for k, v in tensors.items()
                if not (k.startswith(dropped) and k[-2:] in ("_A", "_B"))
            },
        )
        assert load_peft(folder, CONFIGS["plain"]).version == whole.version
    bare = changed(
        save(tmp_path, "c"), lambda t: {k: t[k] for k in t if k[-2:] not in ("_A", "_B")}
    )
    with pytest.raises(AdapterError, match=r"2 tensor.s. missing.*randlora_A.*randlora_B"):
        load_peft(bare, CONFIGS["plain"])


def test_copies_that_differ_are_refused(tmp_path: Path):
    def change(tensors):
        tensors[f"base_model.model.model.{AT}.randlora_B"][0, 0, 0] += 1
        return tensors

    folder = changed(save(tmp_path, "a"), change)
    with pytest.raises(AdapterError, match="v_proj: randlora_B is not the one of the other"):
        load_peft(folder, CONFIGS["plain"])


def test_a_file_that_contradicts_its_seed_is_refused(tmp_path: Path):
    path = save(tmp_path, "a") / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"save_projection": False}))
    assert load_peft(path.parent, CONFIGS["plain"]).sites  # the file holds what would be drawn
    path.write_text(json.dumps(fields | {"save_projection": False, "projection_prng_key": 9}))
    with pytest.raises(AdapterError, match="save_projection.*randlora_A"):
        load_peft(path.parent, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"save_projection": False, "projection_prng_key": 2**64}))
    with pytest.raises(AdapterError, match="projection_prng_key.*64 bits"):
        load_peft(path.parent, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"r": 0}))
    with pytest.raises(AdapterError, match="'r' is 0; needed at least 1"):
        load_peft(path.parent, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"r": 6}))
    with pytest.raises(AdapterError, match=r"randlora_lambda' has shape \[5, 5\].*\[6, 4\]"):
        load_peft(path.parent, CONFIGS["plain"])


def test_all_is_missing_where_the_vectors_are(tmp_path: Path):
    folder = changed(
        save(tmp_path, "a"), lambda t: {k: v for k, v in t.items() if "layers.0" not in k}
    )
    with pytest.raises(AdapterError, match=r"4 tensor.s. missing.*randlora_lambda"):
        load_peft(folder, CONFIGS["plain"])
    assert np.isfinite(
        load_file(folder / "adapter_model.safetensors")["base_model.randlora_A"]
    ).all()

"""VeRA against the PEFT library: saved and drawn projections, several pairs, shared memory."""

import gc
import json
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft, vera


def make(**fields) -> peft.VeraConfig:
    return quiet(peft.VeraConfig, **fields)


@settings(max_examples=25, deadline=None)
@given(
    r=st.integers(1, 20),
    key=st.integers(0, 2**40),
    saved=st.booleans(),
    bias=st.sampled_from(["none", "all", "vera_only"]),
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    layers=st.sampled_from([None, [1], 0]),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(r, key, saved, bias, modules, layers, base):
    if modules == {"lm_head"}:
        layers = None
    config = make(
        r=r,
        projection_prng_key=key,
        save_projection=saved,
        bias=bias,
        target_modules=list(modules),
        layers_to_transform=layers,
    )
    adapter = serve(config, base, save_embedding_layers=False)
    assert set(adapter.live) - {"b"} == {"d", "e"}


def load(tmp_path: Path, name: str, base: str = "plain", seed: int = 0, **fields):
    folder = save_adapter(make(**fields), base, tmp_path / name, seed)
    adapter = load_peft(folder, CONFIGS[base])
    compare(adapter, folder, base)
    return adapter


def pairs(adapter) -> set[str]:
    return {term.pair for form in adapter.sites.values() for term in form.terms}


def test_tenants_of_one_pair_share_its_arrays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(vera, "_MATRICES", WeakValueDictionary())  # others may live in this process
    fields = {"r": 6, "target_modules": ["q_proj", "down_proj"], "projection_prng_key": 3}
    a = load(tmp_path, "a", seed=1, **fields)
    b = load(tmp_path, "b", seed=2, **fields, save_projection=False)
    assert pairs(a) == pairs(b) and len(pairs(a)) == 1
    assert a.version != b.version
    terms = [form.terms[0] for adapter in (a, b) for form in adapter.sites.values()]
    owners = {id(factor.base) for term in terms for factor in (term.A, term.B)}
    assert len(owners) == 2  # one matrix A and one B under all slices of both
    del a, b, terms
    gc.collect()
    assert not vera._MATRICES  # nothing is held once no adapter uses it


def test_different_pairs_have_different_keys(tmp_path: Path):
    """A depends on the widest input that is adapted, so neither seed nor rank names a pair."""
    fields = {"r": 5, "save_projection": False, "projection_prng_key": 0}
    narrow = load(tmp_path, "narrow", **fields, target_modules=["q_proj"])
    wide = load(tmp_path, "wide", **fields, target_modules=["q_proj", "down_proj"])
    other = load(tmp_path, "other", **(fields | {"r": 6}), target_modules=["q_proj"])
    seeded = load(
        tmp_path, "seed", **(fields | {"projection_prng_key": 1}), target_modules=["q_proj"]
    )
    assert len(pairs(narrow) | pairs(wide) | pairs(other) | pairs(seeded)) == 4
    at = "layers.0.self_attn.q_proj"
    assert not np.array_equal(narrow[at].terms[0].A, wide[at].terms[0].A)


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path):
    folder = save_adapter(make(r=4, target_modules=["q_proj"]), "plain", tmp_path)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"save_projection": False, "projection_prng_key": 9}))
    with pytest.raises(AdapterError, match="save_projection.*vera_A.*projection_prng_key=9"):
        load_peft(folder, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"save_projection": False, "projection_prng_key": 2**64}))
    with pytest.raises(AdapterError, match="projection_prng_key.*64 bits"):
        load_peft(folder, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"save_projection": False}))
    assert load_peft(folder, CONFIGS["plain"]).sites  # the file holds what would be drawn
    path.write_text(json.dumps(fields | {"r": 5}))
    with pytest.raises(AdapterError, match=r"vera_lambda_d.*\[4\].*\[5\]"):
        load_peft(folder, CONFIGS["plain"])


def test_saved_projections_that_are_not_there_are_missing(tmp_path: Path):
    config = make(r=4, target_modules=["q_proj"], save_projection=False)
    folder = save_adapter(config, "plain", tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"save_projection": True}))
    with pytest.raises(AdapterError, match="2 tensor.s. missing: 'base_model.vera_A'"):
        load_peft(folder, CONFIGS["plain"])

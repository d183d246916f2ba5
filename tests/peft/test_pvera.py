"""PVeRA against the PEFT library: the mean alone is served."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.PveraConfig:
    return quiet(peft.PveraConfig, **fields)


@settings(max_examples=20, deadline=None)
@given(
    r=st.integers(1, 20),
    key=st.integers(0, 2**40),
    saved=st.booleans(),
    bias=st.sampled_from(["none", "all", "pvera_only"]),
    init=st.booleans(),
    seed=st.sampled_from([None, 7]),
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    layers=st.sampled_from([None, [1], 0]),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(r, key, saved, bias, init, seed, modules, layers, base):
    config = make(
        r=r,
        projection_prng_key=key,
        save_projection=saved,
        bias=bias,
        init_weights=init,
        generator_seed=seed,
        target_modules=list(modules),
        layers_to_transform=None if modules == {"lm_head"} else layers,
    )
    adapter = serve(config, base, save_embedding_layers=False)
    assert set(adapter.live) - {"b"} == {"d", "e"}


def test_tenants_of_one_pair_share_it_and_sampling_is_refused(tmp_path: Path):
    fields = {"r": 6, "target_modules": ["q_proj", "down_proj"], "projection_prng_key": 3}
    saved = save_adapter(make(**fields), "plain", tmp_path / "a", seed=1)
    drawn = save_adapter(make(**fields, save_projection=False), "plain", tmp_path / "b", seed=2)
    a, b = (load_peft(folder, CONFIGS["plain"]) for folder in (saved, drawn))
    compare(b, drawn, "plain")
    at = "layers.0.mlp.down_proj"
    assert a[at].terms[0].pair == b[at].terms[0].pair and a.version != b.version
    assert np.shares_memory(a[at].terms[0].A, b[at].terms[0].A)

    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sample_at_inference": True}))
    with pytest.raises(AdapterError, match="sample_at_inference.*no request has one answer"):
        load_peft(saved, CONFIGS["plain"])


def test_the_half_of_the_variance_changes_nothing(tmp_path: Path):
    folder = save_adapter(make(r=6, target_modules=["q_proj"]), "plain", tmp_path)
    before = load_peft(folder, CONFIGS["plain"])
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for key in tensors:
        if key.endswith(("lambda_d", "pvera_A")):
            tensors[key][6:] += 1
    save_file(tensors, path)
    assert load_peft(folder, CONFIGS["plain"]).version == before.version
    compare(before, folder, "plain")

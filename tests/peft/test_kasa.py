"""KaSA against the PEFT library: what is taken out of the base, and the diagonal."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import KasaConfig
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, with_head
from test_lora import patterns
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft
from scute_jax.peft.kasa import smallest_part

ranks = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(
    r=ranks,
    alpha=st.sampled_from([8, 1, -3, 2.5]),
    rank_pattern=patterns(ranks),
    rslora=st.booleans(),
    lora_bias=st.booleans(),
    bias=st.sampled_from(["none", "all", "lora_only"]),
    init=st.booleans(),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, alpha, rank_pattern, rslora, lora_bias, bias, init, modules, base, seed):
    config = quiet(
        peft.LoraConfig,
        r=r,
        lora_alpha=alpha,
        rank_pattern=rank_pattern,
        use_rslora=rslora,
        lora_bias=lora_bias,
        bias=bias,
        init_lora_weights=init,
        target_modules=modules,
        kasa_config=KasaConfig(beta=1e-3, gamma=1e-2),
    )
    adapter = serve(config, base, seed, tolerance=1e-4, save_embedding_layers=False)
    assert adapter.method == "KASA" and set(adapter.live) <= {"b"}


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (24, 24)])
def test_the_part_that_is_taken_out_is_that_of_the_svd(shape):
    W = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    U, S, V = np.linalg.svd(W.astype(np.float64), full_matrices=False)
    A, B = smallest_part(W, 5)
    np.testing.assert_allclose(A @ B, (U[:, -5:] * S[-5:]) @ V[-5:], atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kasa_config": {"beta": 1, "more": 2}}, "kasa_config.*known are beta, gamma"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights.*takes its own part"),
    ],
)
def test_what_is_not_understood_is_refused(fields, named, tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], kasa_config=KasaConfig())
    path = save_adapter(config, "plain", tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=named):
        load_peft(tmp_path, CONFIGS["plain"], random_params("plain"))


def test_it_leaves_a_part_of_the_base_and_no_tied_head(tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], kasa_config=KasaConfig())
    folder = save_adapter(config, "tied", tmp_path / "a", save_embedding_layers=False)
    with pytest.raises(AdapterError, match="lm_head.*tied to the embedding"):
        load_peft(folder, CONFIGS["tied"], random_params("tied"))
    folder = save_adapter(peft.LoraConfig(r=24, target_modules=["k_proj"]), "plain", tmp_path / "b")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kasa_config": {"beta": 1.0}}))
    with pytest.raises(AdapterError, match="'r' is 24; needed less than the shorter side"):
        load_peft(folder, CONFIGS["plain"], random_params("plain"))

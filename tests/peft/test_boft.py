"""BOFT against the PEFT library, which makes one factor where its CUDA extension is missing."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS, projections, random_params, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft


@pytest.fixture(autouse=True)
def without_extension(monkeypatch: pytest.MonkeyPatch):
    """PEFT tries to compile its extension once; here it is known to be missing."""
    from peft.tuners.boft import layer

    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: None)


def make(**fields) -> peft.BOFTConfig:
    return quiet(peft.BOFTConfig, **fields)


# 48 and 80 (and 72, the input of o_proj) are multiples of 8; 16 divides 48 and 80.
NARROW = [name for name in MODULES if name != "o_proj"]
sizes = st.one_of(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.just(0), st.just(MODULES)),
    st.tuples(st.just(0), st.sampled_from([1, 2, 4, 8]), st.just(MODULES)),
    st.tuples(st.just(16), st.just(0), st.just(NARROW)),
    st.tuples(st.just(0), st.just(16), st.just(NARROW)),
)


@settings(max_examples=25, deadline=None)
@given(
    size=sizes,
    factors=st.sampled_from([1, 1, 2, 3]),
    bias=st.sampled_from(["none", "all", "boft_only"]),
    init=st.booleans(),
    chosen=st.sets(st.integers(0, 6), min_size=1),
    layers=st.sampled_from([None, [1], 0]),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(size, factors, bias, init, chosen, layers, base):
    block, number, modules = size
    config = make(
        boft_block_size=block,
        boft_block_num=number,
        boft_n_butterfly_factor=factors,
        bias=bias,
        init_weights=init,
        target_modules=[modules[i % len(modules)] for i in chosen],
        layers_to_transform=layers,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = serve(config, base)
    assert set(adapter.live) - {"b"} == {"R", "s"}


def test_the_base_bias_is_not_scaled(tmp_path: Path):
    folder = save_adapter(make(target_modules=["q_proj"]), "biased", tmp_path)
    adapter = load_peft(folder, CONFIGS["biased"], random_params("biased"))
    compare(adapter, folder, "biased")
    assert adapter.live == ("R", "s", "b")
    with pytest.raises(AdapterError, match=r"q_proj.*bias is needed: BOFT leaves it unscaled"):
        load_peft(folder, CONFIGS["biased"])


def checkpoint(factors: int, blocks: int = 12) -> tuple[dict, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tensors = {}
    for p in projections("plain"):
        if p.module.endswith("q_proj"):
            key = f"base_model.model.{p.module}"
            shape = (factors, blocks, 4, 4)
            tensors[f"{key}.boft_R"] = rng.normal(size=shape).astype(np.float32)
            tensors[f"{key}.boft_s"] = rng.normal(size=(p.d_out, 1)).astype(np.float32)
    fields = {"boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": factors}
    return {"peft_type": "BOFT", "target_modules": ["q_proj"], **fields}, tensors


def test_several_factors_are_refused(tmp_path: Path):
    with pytest.raises(AdapterError, match="boft_n_butterfly_factor.* 2 permuted factors"):
        load_peft(write(tmp_path, *checkpoint(2)), CONFIGS["plain"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boft_block_num": 3}, "boft_block_size' is 4; exactly one of it and boft_block_num"),
        ({"boft_block_size": 0}, "exactly one of it and boft_block_num"),
        ({"boft_block_size": 5}, "boft_block_size' is 5; it has to divide the width 48"),
        ({"boft_block_size": 0, "boft_block_num": 7}, "boft_block_num' is 7; it has to divide"),
        ({"boft_block_size": 8}, r"boft_R' has shape \[1, 12, 4, 4\].*need \[1, 6, 8, 8\]"),
        ({"boft_n_butterfly_factor": 0}, "boft_n_butterfly_factor.*at least 1"),
    ],
)
def test_sizes_that_contradict_the_file_are_refused(fields, message, tmp_path: Path):
    config, tensors = checkpoint(1)
    with pytest.raises(AdapterError, match=message):
        load_peft(write(tmp_path, config | fields, tensors), CONFIGS["plain"])


def test_the_default_targets_are_those_of_peft(tmp_path: Path):
    folder = save_adapter(make(), "plain", tmp_path)
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": None}))
    assert len(load_peft(folder, CONFIGS["plain"])) == 4

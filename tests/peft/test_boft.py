"""BOFT against the PEFT library, with and without its CUDA extension.

Where the extension is missing, PEFT makes one factor. `BlockDiagonal` does what its kernel does.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from boft_extension import BlockDiagonal
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


# Width 48 has 12 blocks of size 4, 80 has 20, 72 has 18 (a multiple of 2 only).
butterflies = st.one_of(
    st.tuples(st.sampled_from([2, 4]), st.just(0), st.just(2), st.just(MODULES)),
    st.tuples(st.just(0), st.sampled_from([2, 4]), st.just(2), st.just(MODULES)),
    st.tuples(st.sampled_from([2, 4]), st.just(0), st.just(3), st.just(NARROW)),
    st.tuples(st.just(0), st.just(8), st.just(4), st.just(["v_proj", "gate_proj"])),
)


@settings(max_examples=25, deadline=None)
@given(
    size=butterflies,
    bias=st.sampled_from(["none", "all", "boft_only"]),
    chosen=st.sets(st.integers(0, 6), min_size=1),
    base=st.sampled_from(["plain", "biased"]),
)
def test_several_factors(size, bias, chosen, base):
    block, number, factors, modules = size
    config = make(
        boft_block_size=block,
        boft_block_num=number,
        boft_n_butterfly_factor=factors,
        bias=bias,
        target_modules=[modules[i % len(modules)] for i in chosen],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: BlockDiagonal)
        adapter = serve(config, base)
    assert set(adapter.live) - {"b"} == {"P", "R", "s"}
    for form in (f for f in adapter.sites.values() if f.P):
        assert [blocks.values.shape for blocks in form.P] == [form.R.shape] * (factors - 1)


def test_orders_are_shared_by_content(tmp_path: Path):
    a, b = (
        load_peft(write(tmp_path / str(i), *checkpoint(2, seed=i)), CONFIGS["plain"])
        for i in range(2)
    )
    (first,), (second,) = (f["layers.0.self_attn.q_proj"].P for f in (a, b))
    assert first.key == second.key and (first.order == second.order).all()
    assert not np.allclose(first.values, second.values) and a.version != b.version
    assert first.order[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_the_base_bias_is_not_scaled(tmp_path: Path):
    folder = save_adapter(make(target_modules=["q_proj"]), "biased", tmp_path)
    adapter = load_peft(folder, CONFIGS["biased"], random_params("biased"))
    compare(adapter, folder, "biased")
    assert adapter.live == ("R", "s", "b")
    with pytest.raises(AdapterError, match=r"q_proj.*bias is needed: BOFT leaves it unscaled"):
        load_peft(folder, CONFIGS["biased"])


def checkpoint(factors: int, seed: int = 0) -> tuple[dict, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for p in projections("plain"):
        if p.module.endswith("q_proj"):
            key = f"base_model.model.{p.module}"
            shape = (factors, 12, 4, 4)
            tensors[f"{key}.boft_R"] = rng.normal(size=shape).astype(np.float32)
            tensors[f"{key}.boft_s"] = rng.normal(size=(p.d_out, 1)).astype(np.float32)
    fields = {"boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": factors}
    return {"peft_type": "BOFT", "target_modules": ["q_proj"], **fields}, tensors


def test_factors_that_do_not_fit_are_refused(tmp_path: Path):
    with pytest.raises(
        AdapterError, match=r"is 4; it needs .* multiple of 2\^3 of them, but .* 12"
    ):
        load_peft(write(tmp_path, *checkpoint(4)), CONFIGS["plain"])
    with pytest.raises(AdapterError, match=r"boft_R' has shape \[2, .*need \[1, .*or \[3, "):
        config, tensors = checkpoint(2)
        load_peft(
            write(tmp_path, config | {"boft_n_butterfly_factor": 3}, tensors), CONFIGS["plain"]
        )


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

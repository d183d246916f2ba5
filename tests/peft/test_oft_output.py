"""OFT files of PEFT 0.7 to 0.13 against the formula of that time, in float64.

Source: peft/tuners/oft/layer.py of PEFT 0.13.2, which the present PEFT no longer has:
OFTLayer.forward takes the bias off, _get_delta_activations multiplies the output by the
block-diagonal matrix of get_delta_weight, and the bias is added again.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from forms import apply_over
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CONFIGS, base_output, projections, random_params, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft

MODULES = ["q_proj", "v_proj", "down_proj"]  # outputs 72, 24, 48


def delta_weight(oft_r: np.ndarray, r: int, eps: float | None) -> np.ndarray:
    """get_delta_weight; eps as it stands in the config, None without coft."""
    if eps is not None:
        limit = eps * oft_r.shape[-1] ** 2 / math.sqrt(len(oft_r))
        norms = np.linalg.norm(oft_r, axis=(1, 2), keepdims=True)
        oft_r = np.where(norms <= limit, oft_r, limit * oft_r / norms)
    eye = np.eye(oft_r.shape[-1])
    delta = np.zeros((r * len(eye), r * len(eye)))
    for j in range(r):
        block = oft_r[j % len(oft_r)]
        skew, at = (block - block.T) / 2, slice(j * len(eye), (j + 1) * len(eye))
        delta[at, at] = (eye - skew) @ np.linalg.inv(eye + skew)
    return delta


def checkpoint(base: str, seed: int = 0, **fields) -> tuple[dict, dict[str, np.ndarray]]:
    """What PEFT 0.13 writes, every field that it has."""
    config = {
        "peft_type": "OFT",
        "r": 8,
        "module_dropout": 0.1,
        "target_modules": MODULES,
        "init_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "coft": False,
        "eps": 6e-5,
        "block_share": False,
        "rank_pattern": {},
        "alpha_pattern": {"q_proj": 4},
    } | fields
    rng, tensors = np.random.default_rng(seed), {}
    for p in projections(base):
        if p.module.endswith(tuple(MODULES)):
            r = blocks_of(config, p.module)
            k, stored = p.d_out // r, 1 if config["block_share"] else r
            M = rng.normal(size=(stored, k, k)) / math.sqrt(k)
            tensors[f"base_model.model.{p.module}.oft_r"] = M.astype(np.float32)
    return config, tensors


def blocks_of(config: dict, module: str) -> int:
    return next((r for key, r in config["rank_pattern"].items() if key in module), config["r"])


@settings(max_examples=40, deadline=None)
@given(
    r=st.sampled_from([1, 2, 3, 8, 24]),
    pattern=st.sampled_from([{}, {"v_proj": 4}, {"layers.1.mlp.down_proj": 6}]),
    coft=st.booleans(),
    eps=st.sampled_from([6e-5, 1e-3, 0.05, 10.0]),
    shared=st.booleans(),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
    seed=st.integers(0, 99),
)
def test_every_option(tmp_path_factory, r, pattern, coft, eps, shared, base, seed):
    fields = {"r": r, "rank_pattern": pattern, "coft": coft, "eps": eps, "block_share": shared}
    config, tensors = checkpoint(base, seed, **fields)
    folder = write(tmp_path_factory.mktemp("oft"), config, tensors)
    params = random_params(base)
    adapter = load_peft(folder, CONFIGS[base], params)
    assert set(adapter.live) - {"b"} == {"Q"}
    rng = np.random.default_rng(seed)
    for p in projections(base):
        key = f"base_model.model.{p.module}.oft_r"
        if key not in tensors:
            assert p.site not in adapter
            continue
        x, base_y = rng.normal(size=(5, p.d_in)), base_output(params, p.module)
        delta = delta_weight(
            np.float64(tensors[key]), blocks_of(config, p.module), eps if coft else None
        )
        bias = np.float64(params.get(f"{p.module}.bias", 0.0))
        expected = (base_y(x) - bias) @ delta + bias
        ours = apply_over(adapter[p.site], base_y, x)
        effect = np.linalg.norm(expected - base_y(x))
        rounding = 1e-6 * np.linalg.norm(expected)
        assert np.linalg.norm(ours - expected) <= 1e-5 * effect + rounding


def test_a_cut_block_is_refused(tmp_path: Path):
    config, tensors = checkpoint("plain")
    with pytest.raises(
        AdapterError, match=r"'r' is 7; needed a number of blocks that divides .*72"
    ):
        load_peft(write(tmp_path, config | {"r": 7}, tensors), CONFIGS["plain"])


def test_the_base_bias_is_needed(tmp_path: Path):
    folder = write(tmp_path, *checkpoint("biased"))
    with pytest.raises(AdapterError, match=r"bias is needed: OFT of PEFT 0.13"):
        load_peft(folder, CONFIGS["biased"])


def test_files_of_a_later_peft_need_their_block_size(tmp_path: Path):
    config, tensors = checkpoint("plain")
    scales = {
        key.replace("oft_r", "oft_s"): np.ones((width, 1), np.float32)
        for key, width in zip(tensors, [72, 24, 48] * 2, strict=True)
    }
    with pytest.raises(AdapterError, match=r"6 tensor.s. of no use: .*oft_s"):
        load_peft(write(tmp_path / "a", config, tensors | scales), CONFIGS["plain"])
    triangles = {key.replace("oft_r", "oft_R.weight"): t[:, 0] for key, t in tensors.items()}
    with pytest.raises(AdapterError, match="oft_block_size' is missing; .* state it"):
        load_peft(write(tmp_path / "b", config, triangles), CONFIGS["plain"])

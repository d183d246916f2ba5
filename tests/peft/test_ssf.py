"""SSF in the file form of this package."""

from pathlib import Path

import numpy as np
import pytest
from forms import apply_over
from tiny_checkpoints import CONFIGS, base_output, projections, random_params, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def checkpoint() -> tuple[dict, dict[str, np.ndarray]]:
    rng, tensors = np.random.default_rng(0), {}
    for p in (p for p in projections("biased") if p.module.endswith(("k_proj", "up_proj"))):
        for name, centre in (("ssf_scale", 1.0), ("ssf_shift", 0.0)):
            vector = centre + 0.3 * rng.normal(size=p.d_out)
            tensors[f"base_model.model.{p.module}.{name}"] = vector.astype(np.float32)
    return {"peft_type": "SSF", "target_modules": ["k_proj", "up_proj"]}, tensors


def test_scale_and_shift_act_on_the_whole_output(tmp_path: Path):
    adapter = load_peft(write(tmp_path, *checkpoint()), CONFIGS["biased"])
    assert adapter.method == "SSF" and adapter.live == ("s", "b") and len(adapter) == 4
    _, tensors = checkpoint()
    for p in (p for p in projections("biased") if p.site in adapter):
        x = np.random.default_rng(1).normal(size=(3, p.d_in))
        base_y = base_output(random_params("biased"), p.module)
        scale, shift = (
            tensors[f"base_model.model.{p.module}.{name}"] for name in ("ssf_scale", "ssf_shift")
        )
        assert np.allclose(
            apply_over(adapter[p.site], base_y, np.float64(x)), base_y(x) * scale + shift
        )


def test_ones_and_zeros_take_no_slot(tmp_path: Path):
    config, tensors = checkpoint()
    first, second = list(tensors)[:2]
    tensors[first], tensors[second] = np.ones_like(tensors[first]), np.zeros_like(tensors[second])
    adapter = load_peft(write(tmp_path, config, tensors), CONFIGS["biased"])
    assert adapter["layers.0.self_attn.k_proj"].live == ()


def test_half_of_a_pair_is_refused(tmp_path: Path):
    config, tensors = checkpoint()
    del tensors["base_model.model.model.layers.1.mlp.up_proj.ssf_shift"]
    with pytest.raises(
        AdapterError, match=r"1 tensor.*missing: '.*layers\.1\.mlp\.up_proj\.ssf_shift'"
    ):
        load_peft(write(tmp_path, config, tensors), CONFIGS["biased"])

"""RoAD against the PEFT library: every variant and group size, with and without biases."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS, projections, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft

VARIANTS = ["road_1", "road_2", "road_4"]


def make(**fields) -> peft.RoadConfig:
    return quiet(peft.RoadConfig, **fields)


@settings(max_examples=40, deadline=None)
@given(
    variant=st.sampled_from(VARIANTS),
    group=st.sampled_from([2, 4, 6, 8, 12, 24]),
    init=st.booleans(),
    modules=with_head,
    base=bases,
)
def test_every_option(variant, group, init, modules, base):
    widths = {p.d_out for p in projections(base) if p.module.split(".")[-1] in modules}
    if any(width % group for width in widths):
        modules, group = ["k_proj", "down_proj"], min(group, 12)
    config = make(variant=variant, group_size=group, init_weights=init, target_modules=modules)
    adapter = serve(config, base, save_embedding_layers=False)
    assert adapter.live == ("Q",)
    for form in adapter.sites.values():
        assert form.Q[0].values.shape[1:] == (2, 2)
        assert (form.Q[0].order is None) == (group == 2)


def test_orders_are_shared_by_width_and_group(tmp_path: Path):
    keys = {}
    for seed, group in enumerate([4, 4, 8]):
        config = make(group_size=group, target_modules=["q_proj", "o_proj", "v_proj"])
        folder = save_adapter(config, "plain", tmp_path / str(seed), seed)
        adapter = load_peft(folder, CONFIGS["plain"])
        keys[seed] = [adapter[f"layers.0.self_attn.{p}"].Q[0].key for p in ("q_proj", "v_proj")]
    assert keys[0] == keys[1]
    assert len({*keys[0], *keys[2]}) == 4


def checkpoint(**fields) -> tuple[dict, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{p.module}.{name}": rng.normal(size=p.d_out // 2).astype(np.float32)
        for p in projections("plain")
        if p.module.endswith("v_proj")
        for name in ("road_theta", "road_alpha")
    }
    config = {"peft_type": "ROAD", "variant": "road_1", "group_size": 4}
    return config | {"target_modules": ["v_proj"]} | fields, tensors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "road_3"}, "variant' is 'road_3'; known are 'road_1', 'road_2', 'road_4'"),
        ({"variant": "road_2"}, r"road_theta' has shape \[12\].*need \[24\]"),
        ({"group_size": 3}, "group_size' is 3; needed an even divisor of the width 24"),
        ({"group_size": 10}, "group_size' is 10; needed an even divisor of the width 24"),
        ({"group_size": 0}, "group_size' is 0; needed an even divisor"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_what_contradicts_the_file_is_refused(fields: dict, message: str, tmp_path: Path):
    config, tensors = checkpoint(**fields)
    with pytest.raises(AdapterError, match=message):
        load_peft(write(tmp_path, config, tensors), CONFIGS["plain"])


def test_the_default_targets_are_those_of_peft(tmp_path: Path):
    folder = save_adapter(make(group_size=4), "plain", tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": None}))
    assert len(load_peft(folder, CONFIGS["plain"])) == 4

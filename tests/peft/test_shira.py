"""SHiRA against the PEFT library."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

# Of torch, wherever a sparse tensor is made, which is what PEFT does.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
AT = "base_model.model.model.layers.1.self_attn.v_proj"


def make(**fields) -> peft.ShiraConfig:
    return quiet(peft.ShiraConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 16),  # 16 (48 + 24) is all of v_proj
    seed=st.integers(0, 2**40),
    init=st.booleans(),
    modules=with_head,
    base=bases,
)
def test_every_option(r, seed, init, modules, base):
    config = make(r=r, random_seed=seed, init_weights=init, target_modules=modules)
    adapter = serve(config, base, save_embedding_layers=False)
    assert adapter.live == ("S",)
    for form in adapter.sites.values():
        assert form.S.values.shape == form.S.rows.shape == form.S.cols.shape


def test_a_mask_of_ones_own(tmp_path: Path):
    def upper(base_layer, r, **_):
        mask = base_layer.weight.new_zeros(base_layer.weight.numel())
        mask[: r * sum(base_layer.weight.shape)] = 1
        return mask.reshape(base_layer.weight.shape)

    config = make(r=2, mask_type="upper", target_modules=["q_proj"])
    config.mask_fn = upper
    folder = save_adapter(config, "plain", tmp_path)
    adapter = load_peft(folder, CONFIGS["plain"])
    compare(adapter, folder, "plain")
    assert adapter["layers.0.self_attn.q_proj"].S.cols.max() == 4  # 240 entries of rows of 48


def saved(folder: Path, change, **fields) -> Path:
    config = make(**{"r": 3, "target_modules": ["v_proj"]} | fields)
    save_adapter(config, "plain", folder)
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    return folder


def test_indices_in_float32_are_those_of_windows(tmp_path: Path):
    def as_float(tensors):
        return {k: t.astype(np.float32) for k, t in tensors.items()}

    ints, floats = saved(tmp_path / "a", dict), saved(tmp_path / "b", as_float)
    adapter = load_peft(floats, CONFIGS["plain"])
    assert adapter.version == load_peft(ints, CONFIGS["plain"]).version
    compare(adapter, floats, "plain")


def test_places_outside_of_the_weight_are_refused(tmp_path: Path):
    for name, place, value in (("a", (0, 0), 24), ("b", (1, 5), 48), ("c", (0, 1), -1)):

        def change(tensors, place=place, value=value):
            tensors[f"{AT}.shira_indices"][place] = value
            return tensors

        with pytest.raises(AdapterError, match=r"v_proj: shira_indices .* from 0 to 23 and 47"):
            load_peft(saved(tmp_path / name, change), CONFIGS["plain"])

    def half(tensors):
        indices = tensors[f"{AT}.shira_indices"].astype(np.float32)
        indices[0, 0] = 0.5
        return tensors | {f"{AT}.shira_indices": indices}

    with pytest.raises(AdapterError, match="whole numbers"):
        load_peft(saved(tmp_path / "d", half), CONFIGS["plain"])


def test_what_is_missing_or_does_not_fit_is_refused(tmp_path: Path):
    def without(tensors):
        return {k: t for k, t in tensors.items() if not k.endswith("indices")}

    with pytest.raises(AdapterError, match=r"2 tensor.s. missing.*shira_indices"):
        load_peft(saved(tmp_path / "a", without), CONFIGS["plain"])
    folder = saved(tmp_path / "b", dict)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 3', '"r": 4'))
    with pytest.raises(AdapterError, match=r"shira_weight' has shape \[216\].*need \[288\]"):
        load_peft(folder, CONFIGS["plain"])
    config.write_text(config.read_text().replace('"r": 4', '"r": 17'))
    with pytest.raises(AdapterError, match="r' is 17; it gives .* 1224 entries.* 1 to 1152"):
        load_peft(folder, CONFIGS["plain"])

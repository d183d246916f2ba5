"""Super-Tuning against the PEFT library: the sparse support, and the hybrid with a LoRA."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, load_with_peft, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

AT = "base_model.model.model.layers.1.self_attn.v_proj"


def make(**fields) -> peft.SupertuningConfig:
    return quiet(peft.SupertuningConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    sparsity=st.sampled_from([0.0, 0.3, 0.9, 0.99, 0.999]),
    top=st.booleans(),
    r=st.sampled_from([None, 1, 7]),
    alpha=st.sampled_from([None, 3.0, 16]),
    init=st.booleans(),
    modules=with_head,
    base=bases,
)
def test_every_option(sparsity, top, r, alpha, init, modules, base):
    config = make(
        sparsity=sparsity,
        select_top=top,
        r=r,
        lora_alpha=None if r is None else alpha,
        init_weights=init,
        target_modules=modules,
    )
    adapter = serve(config, base, save_embedding_layers=False)
    assert adapter.live == ("S",)
    assert {form.rank for form in adapter.sites.values()} == {r or 0}


def saved(folder: Path, **fields) -> Path:
    config = make(**{"sparsity": 0.9, "target_modules": ["v_proj"]} | fields)
    return save_adapter(config, "plain", folder)


def test_places_that_are_not_saved_are_refused_and_can_be_saved(tmp_path: Path):
    folder = saved(tmp_path / "bare", save_precomputed_indices=False)
    with pytest.raises(AdapterError, match="lacks supertuning_indices.*ties.*save it again"):
        load_peft(folder, CONFIGS["plain"])
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('indices": false', 'indices": true'))
    load_with_peft(folder, "plain").save_pretrained(tmp_path / "whole")
    compare(load_peft(tmp_path / "whole", CONFIGS["plain"]), tmp_path / "whole", "plain")


def test_what_does_not_fit_is_refused(tmp_path: Path):
    folder = saved(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{AT}.supertuning_indices"][3] = 48 * 24
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=r"v_proj: supertuning_indices .* from 0 to 1151"):
        load_peft(folder, CONFIGS["plain"])
    config = folder / "adapter_config.json"
    text = config.read_text()
    for old, new, message in (
        ('"sparsity": 0.9', '"sparsity": 0.5', r"supertuning_values.*\[115\].*\[576\]"),
        ('"sparsity": 0.9', '"sparsity": 1.0', "sparsity' is 1.0; it leaves 0 of the 1152"),
        ('"r": null', '"r": 0', "r' is 0; needed at least 1, or null"),
        ('"r": null', '"r": 2', r"missing.*supertuning_lora_A.weight"),
        ('"r": null', '"lora_alpha": 1.0, "r": "x"', "r' is 'x'; needed an integer"),
    ):
        config.write_text(text.replace(old, new))
        with pytest.raises(AdapterError, match=message):
            tensors[f"{AT}.supertuning_indices"][3] = 0
            save_file(tensors, path)
            load_peft(folder, CONFIGS["plain"])


def test_a_place_named_twice_adds_up(tmp_path: Path):
    folder = saved(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{AT}.supertuning_indices"][:2] = 100
    save_file({k: np.ascontiguousarray(t) for k, t in tensors.items()}, path)
    compare(load_peft(folder, CONFIGS["plain"]), folder, "plain")

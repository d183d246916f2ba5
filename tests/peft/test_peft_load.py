"""What every loaded adapter is: folded, numpy float32, hashable, with a version of its content."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, lora_checkpoint, random_params, write

from scute_jax import AdapterError, fold
from scute_jax.peft import load_peft

SITE = "layers.0.self_attn.q_proj"


def test_arrays_are_numpy_float32_and_already_folded(tmp_path: Path):
    params = random_params("biased")
    config, tensors = lora_checkpoint(base="biased", lora_alpha=7)
    adapter = load_peft(write(tmp_path, config, tensors), CONFIGS["biased"], params)
    for form in adapter.sites.values():
        assert fold(form).terms[0].A is form.terms[0].A
        for leaf in (form.terms[0].A, form.terms[0].B):
            assert type(leaf) is np.ndarray and leaf.dtype == np.float32
    assert adapter.nbytes == 4 * 2 * 4 * ((48 + 72) + (80 + 48))


def test_metadata_is_static_under_jit(tmp_path: Path):
    config, tensors = lora_checkpoint(use_dora=True)
    for key in [key for key in tensors if "lora_B" in key]:
        vector = np.ones(tensors[key].shape[0], np.float32)
        tensors[key.replace("lora_B.weight", "lora_magnitude_vector")] = vector
    loaded = [
        load_peft(write(tmp_path, config, tensors), CONFIGS["plain"], random_params("plain"))
        for _ in range(2)
    ]
    assert hash(loaded[0].metadata) == hash(loaded[1].metadata)
    assert loaded[0].metadata == loaded[1].metadata
    assert len(loaded[0].info["magnitudes"]) == len(loaded[0])
    total = jax.jit(lambda adapter: sum(form.s.sum() for form in adapter.sites.values()))
    assert np.isfinite(total(loaded[0]))


def test_the_version_follows_the_function(tmp_path: Path):
    config, tensors = lora_checkpoint()

    def version(name: str, **changes) -> str:
        changed = tensors | changes.pop("tensors", {})
        folder = write(tmp_path / name, config | changes, changed)
        return load_peft(folder, CONFIGS["plain"]).version

    key = next(iter(tensors))
    assert version("a") == version("b") == version("c", lora_dropout=0.5, task_type="CAUSAL_LM")
    assert version("d", lora_alpha=9) != version("a")
    assert version("e", tensors={key: tensors[key] + 1}) != version("a")


@pytest.mark.parametrize("alpha", [1e300, 1e39])
def test_numbers_beyond_float32_are_refused(alpha: float, tmp_path: Path):
    config, tensors = lora_checkpoint(lora_alpha=alpha)
    message = r"adapter_model\.safetensors: layers\.0\.self_attn\.q_proj: .*not finite"
    with pytest.raises(AdapterError, match=message):
        load_peft(write(tmp_path, config, tensors), CONFIGS["plain"])


def test_missing_tensors_are_counted_and_five_are_named(tmp_path: Path):
    config, tensors = lora_checkpoint()
    first = next(iter(tensors))
    kept = {first: tensors[first], "base_model.x": tensors[first]}
    with pytest.raises(AdapterError) as error:
        load_peft(
            write(tmp_path, config, kept),
            CONFIGS["plain"],
        )
    assert "7 tensor(s) missing: " in str(error.value) and " and 2 more" in str(error.value)
    assert "1 tensor(s) of no use: 'base_model.x'" in str(error.value)

"""Poly against the PEFT library: one adapter for each task of a file."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, torch
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, modules
from tiny_checkpoints import CONFIGS, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.PolyConfig:
    return quiet(peft.PolyConfig, **fields)


def of_task(task: int):
    """Tells every layer of a PEFT model which task its batch of one belongs to."""
    return lambda model: model.base_model._register_pre_hooks(torch.tensor([task]))


@settings(max_examples=20, deadline=None)
@given(
    r=st.integers(1, 6),
    tasks=st.integers(1, 4),
    skills=st.integers(1, 5),
    splits=st.sampled_from([1, 2, 4, 8]),
    init=st.booleans(),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_every_option(r, tasks, skills, splits, init, modules, base, seed, data):
    task = data.draw(st.integers(0, tasks - 1))
    config = make(
        r=r,
        n_tasks=tasks,
        n_skills=skills,
        n_splits=splits,
        init_weights=init,
        target_modules=modules,
    )
    with TemporaryDirectory() as name:
        folder = save_adapter(config, base, Path(name), seed, scale=1.0)
        adapter = load_peft(folder, CONFIGS[base], options={"task_id": task})
        compare(adapter, folder, base, prepare=of_task(task))
    assert adapter.method == "POLY" and adapter.live == ()
    assert {form.rank for form in adapter.sites.values()} == {r}


def test_each_task_is_an_adapter_of_its_own(tmp_path: Path):
    folder = save_adapter(make(n_tasks=3, target_modules=["q_proj"]), "plain", tmp_path, scale=1.0)
    versions = {
        load_peft(folder, CONFIGS["plain"], options={"task_id": task}).version for task in range(3)
    }
    assert len(versions) == 3


@pytest.mark.parametrize("options", [{}, {"task_id": 3}, {"task_id": -1}])
def test_a_task_that_is_none_is_refused(options: dict, tmp_path: Path):
    folder = save_adapter(make(n_tasks=3, target_modules=["q_proj"]), "plain", tmp_path)
    message = r"task_id.*another function for each task.*n from 0 to 2: options=\{.task_id.: n\}"
    with pytest.raises(AdapterError, match=message):
        load_peft(folder, CONFIGS["plain"], options=options)


def test_a_task_in_the_config_is_the_one_that_is_stated(tmp_path: Path):
    folder = save_adapter(make(n_tasks=3, target_modules=["q_proj"]), "plain", tmp_path, scale=1.0)
    stated = load_peft(folder, CONFIGS["plain"], options={"task_id": 2})
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_id": 2}))
    assert load_peft(folder, CONFIGS["plain"]).version == stated.version


@pytest.mark.parametrize("name", ["poly_lora_A", "poly_lora_B", "poly_router.module_logits"])
def test_tensors_that_are_missing_or_of_another_shape_are_refused(name: str, tmp_path: Path):
    folder = save_adapter(make(n_tasks=3, target_modules=["q_proj"]), "plain", tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(name))
    array = tensors.pop(key)
    save_file(tensors, path)
    with pytest.raises(AdapterError, match=f"1 tensor.s. missing: '{key}'"):
        load_peft(folder, CONFIGS["plain"], options={"task_id": 0})
    save_file(tensors | {key: array[..., :-1]}, path)
    with pytest.raises(AdapterError, match=f"{key}' has shape"):
        load_peft(folder, CONFIGS["plain"], options={"task_id": 0})
    save_file(tensors | {key: array, f"{key}_more": array}, path)
    with pytest.raises(AdapterError, match=f"of no use: '{key}_more'"):
        load_peft(folder, CONFIGS["plain"], options={"task_id": 0})


def test_other_routers_and_splits_that_do_not_fit_are_refused(tmp_path: Path):
    config = {"peft_type": "POLY", "r": 2, "n_tasks": 1, "n_skills": 2, "n_splits": 5}
    config |= {"target_modules": ["q_proj"], "task_id": 0}
    with pytest.raises(AdapterError, match=r"n_splits.*divide both widths.*\(48, 72\)"):
        load_peft(write(tmp_path / "a", config, {}), CONFIGS["plain"])
    with pytest.raises(AdapterError, match="poly_type.*known are 'poly'"):
        load_peft(write(tmp_path / "b", config | {"poly_type": "mhr"}, {}), CONFIGS["plain"])

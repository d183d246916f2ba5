"""Every method of the installed PEFT is served, or refused with its reason and a way out."""

import json
from pathlib import Path

import numpy as np
import pytest
from peft_oracle import layer_output, load_with_peft, peft, quiet, save_adapter, torch
from tiny_checkpoints import (
    CONFIGS,
    base_output,
    lora_checkpoint,
    projections,
    random_params,
    write,
)

from scute_jax import AdapterError, NormalForm
from scute_jax.peft import load_peft, methods, register
from scute_jax.peft import registry as registry_module
from scute_jax.peft.refused import ALONE, CONVERT, FIELDS, TYPES

# Of torch, wherever a sparse tensor is made.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
SERVED = {method.peft_type for method in methods()}
TARGETS = {"target_modules": ["q_proj", "o_proj"]}


@pytest.mark.parametrize("peft_type", [kind.value for kind in peft.PeftType])
def test_every_type_of_peft_is_served_or_has_a_reason(peft_type: str, tmp_path: Path):
    assert (peft_type in SERVED) != (peft_type in TYPES)
    if peft_type in TYPES:
        folder = write(tmp_path, {"peft_type": peft_type, **TARGETS}, {})
        with pytest.raises(AdapterError) as raised:
            load_peft(folder, CONFIGS["plain"])
        message = str(raised.value)
        assert f"{folder / 'adapter_config.json'}: field 'peft_type' is {peft_type!r}; " in message
        assert message.endswith((f"{CONVERT}.", f"{ALONE}.", "by itself, with PEFT."))
        assert "\n" not in message


def test_no_reason_is_left_over():
    assert set(TYPES) <= {kind.value for kind in peft.PeftType}
    assert set(FIELDS) <= set(peft.LoraConfig(use_qalora=True).to_dict())


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_make_it_another_method_are_refused(field: str, tmp_path: Path):
    config, tensors = lora_checkpoint()
    assert load_peft(write(tmp_path, config | {field: None}, tensors), CONFIGS["plain"])
    with pytest.raises(AdapterError) as raised:
        load_peft(write(tmp_path, config | {field: [1]}, tensors), CONFIGS["plain"])
    reason, remedy = FIELDS[field]
    assert str(raised.value).endswith(
        f"field {field!r} is [1]; {reason}, which is not served beside other adapters. {remedy}."
    )


def test_a_method_of_ones_own_takes_the_place_of_a_reason(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(registry_module, "_METHODS", dict(registry_module._METHODS))

    @register("HIRA")
    def mine(site):
        """x W"""
        return NormalForm()

    assert load_peft(write(tmp_path, {"peft_type": "HIRA", **TARGETS}, {}), CONFIGS["plain"])


DENSE = {
    "HIRA": quiet(peft.HiraConfig, r=4, **TARGETS),
    "C3A": quiet(peft.C3AConfig, block_size=24, **TARGETS),
    "OSF": quiet(peft.OSFConfig, **TARGETS),
    "FROD": quiet(peft.FrodConfig, save_projection=True, **TARGETS),
}


@pytest.mark.parametrize("peft_type", DENSE)
def test_what_is_said_to_be_of_full_rank_is(peft_type: str, tmp_path: Path):
    folder = save_adapter(DENSE[peft_type], "plain", tmp_path)
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == peft_type
    with pytest.raises(AdapterError, match="of full rank"):
        load_peft(folder, CONFIGS["plain"], random_params("plain"))
    model = load_with_peft(folder, "plain")
    for p in projections("plain"):
        if p.module.endswith(("q_proj", "o_proj")):
            eye = np.eye(p.d_in, dtype=np.float32)
            delta = layer_output(model, p.module, eye) - base_output(
                random_params("plain"), p.module
            )(eye)
            values = np.linalg.svd(delta, compute_uv=False)
            assert (values > 1e-4 * values[0]).sum() >= 0.9 * min(p.d_in, p.d_out), values


def test_lily_answers_a_request_otherwise_beside_another(tmp_path: Path):
    config = quiet(peft.LilyConfig, r=4, stride_A=1, num_B=2, **TARGETS)
    folder = save_adapter(config, "plain", tmp_path)
    model = load_with_peft(folder, "plain")
    rng = np.random.default_rng(0)
    x, other = rng.normal(size=(2, 3, 48)).astype(np.float32)
    module = "model.layers.0.self_attn.q_proj"
    alone = layer_output(model, module, x)
    beside = layer_output(model, module, np.concatenate([x, other]))[:3]
    assert np.abs(alone - beside).max() > 1e-3
    with pytest.raises(AdapterError, match="mean of a router over all tokens of the batch"):
        load_peft(folder, CONFIGS["plain"])


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(num_virtual_tokens=3),
        peft.PrefixTuningConfig(num_virtual_tokens=3),
        peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_what_is_no_projection_changes_none(config: peft.PeftConfig, tmp_path: Path):
    config.task_type = "CAUSAL_LM"
    folder = save_adapter(config, "plain", tmp_path)
    with pytest.raises(AdapterError, match="in front of .*, and changes no projection"):
        load_peft(folder, CONFIGS["plain"])
    state = load_with_peft(folder, "plain").base_model.state_dict()
    expected = random_params("plain")
    assert state.keys() == expected.keys()
    assert all(torch.equal(t, torch.tensor(expected[k])) for k, t in state.items())

"""Checkpoints of activated LoRAs: what is read, written and refused.

tests/serving/test_alora_rows.py runs them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from peft_oracle import peft, quiet, save_adapter
from tiny_checkpoints import CONFIGS, random_params, write

from scute_jax import AdapterError, scaled, stack
from scute_jax.convert import convert_to_lora
from scute_jax.peft import load_peft, save_peft

PARAMS, CALL = random_params("plain"), [7, 3]


def load(folder: Path, **fields):
    lora = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = quiet(peft.LoraConfig, **(lora | {"alora_invocation_tokens": CALL} | fields))
    return load_peft(save_adapter(config, "plain", folder), CONFIGS["plain"], PARAMS)


def test_the_invocation_is_part_of_what_an_adapter_is(tmp_path: Path):
    adapter = load(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    others = []
    for tokens in ([73], None):
        write(tmp_path, config | {"alora_invocation_tokens": tokens})
        others.append(load_peft(tmp_path, CONFIGS["plain"]))
    assert [a.invocation for a in (adapter, *others)] == [(7, 3), (73,), ()]
    assert [a.method for a in (adapter, *others)] == ["ALORA", "ALORA", "LORA"]
    assert len({a.version for a in (adapter, *others)}) == 3
    q = "layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(adapter[q].terms[0].A, others[1][q].terms[0].A)
    assert scaled(adapter, 0.5).invocation == (7, 3)


def test_it_is_saved_as_it_was(tmp_path: Path):
    adapter = load(tmp_path / "a")
    save_peft(adapter, tmp_path / "b")
    again = load_peft(tmp_path / "b", CONFIGS["plain"])
    assert again.version == adapter.version and again.invocation == adapter.invocation
    assert peft.LoraConfig.from_pretrained(tmp_path / "b").alora_invocation_tokens == CALL


def test_what_would_act_on_all_tokens_is_refused(tmp_path: Path):
    for fields, message in (
        ({"modules_to_save": ["norm"]}, "alora_invocation_tokens.*changes norm|changes layers"),
        ({"init_lora_weights": "olora"}, "init_lora_weights.*changes the base for all tokens"),
    ):
        with pytest.raises(AdapterError, match=message):
            load(tmp_path / str(len(message)), **fields)
    adapter, plain = load(tmp_path / "a"), load(tmp_path / "c", alora_invocation_tokens=None)
    for pair in ((adapter, plain), (plain, adapter)):
        with pytest.raises(AdapterError, match="cannot stack: an activated LoRA"):
            stack(*pair)
    with pytest.raises(AdapterError, match="after its invocation only, and a LoRA on all"):
        convert_to_lora(adapter, CONFIGS["plain"], PARAMS, 4)


@pytest.mark.parametrize("tokens", [[7, -1], [97], ["7"], [True], 7, "73", {"7": 3}])
def test_an_invocation_is_a_list_of_tokens_of_the_base(tokens, tmp_path: Path):
    load(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    write(tmp_path, config | {"alora_invocation_tokens": tokens})
    with pytest.raises(AdapterError, match="alora_invocation_tokens.*needed a list of token ids"):
        load_peft(tmp_path, CONFIGS["plain"], PARAMS)

"""Which key is which tensor of which module."""

from pathlib import Path

import pytest
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft.base import Base
from scute_jax.peft.names import place, some

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BASE, FILE = Base.from_config(CONFIGS["plain"]), Path("adapter_model.safetensors")
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "keys",
    [
        [
            f"base_model.model.{Q}.lora_A.weight",
            "base_model.vera_A",
            "base_model.model.lm_head.ia3_l",
        ],
        [f"{Q}.lora_A.weight", "vera_A", "lm_head.ia3_l"],
        [
            f"base_model.model.{Q}.lora_A.tenant_7.weight",
            "base_model.vera_A.tenant_7",
            "base_model.model.lm_head.ia3_l.tenant_7",
        ],
    ],
)
def test_every_spelling_of_a_key(keys: list[str]):
    names = place(keys, BASE, FILE)
    assert names.modules == {Q: {"lora_A.weight": keys[0]}, "lm_head": {"ia3_l": keys[2]}}
    assert names.shared == {"vera_A": keys[1]}
    assert names.unknown == []


def test_biases_and_base_layers_carry_no_adapter_name():
    keys = [
        f"{Q}.lora_A.x.weight",
        f"{Q}.base_layer.bias",
        "model.norm.weight",
        f"{Q}.lora_B.x.bias",
    ]
    names = place(keys, BASE, FILE)
    assert set(names.modules[Q]) == {"lora_A.weight", "base_layer.bias", "lora_B.bias"}
    assert names.modules["model.norm"] == {"weight": "model.norm.weight"}


def test_an_adapter_name_that_not_all_keys_carry_is_left_alone():
    names = place([f"{Q}.lora_A.x.weight", f"{Q}.lora_B.weight"], BASE, FILE)
    assert set(names.modules[Q]) == {"lora_A.x.weight", "lora_B.weight"}


def test_keys_of_other_models_are_unknown():
    keys = [f"base_model.model.{Q}.lora_A.weight", "base_model.model.model.unembed.lora_A.weight"]
    assert place(keys, BASE, FILE).unknown == keys[1:]
    mapped = place(keys, BASE, FILE, {r"^model\.unembed": "lm_head"})
    assert mapped.modules["lm_head"] == {"lora_A.weight": keys[1]}


def test_two_keys_for_one_tensor_are_refused():
    keys = ["base_model.model.lm_head.lora_A.weight", "base_model.model.head.lora_A.weight"]
    with pytest.raises(AdapterError, match="both mean the tensor 'lora_A.weight' at lm_head"):
        place(keys, BASE, FILE, {"^head": "lm_head"})


def test_nothing_that_lines_up_shows_both_sides():
    keys = [f"base_model.model.language_model.{Q}.lora_{x}.weight" for x in "AB"]
    with pytest.raises(AdapterError, match=r"none of its 2 keys.*language_model.*base has.*q_proj"):
        place(keys, BASE, FILE)


def test_long_lists_are_cut():
    assert some(["a", "b"]) == "'a', 'b'"
    assert some("abcdefg") == "'a', 'b', 'c', 'd', 'e' and 2 more"

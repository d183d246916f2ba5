"""`scute inspect`: what is in a checkpoint, with and without its base, and what is wrong."""

import json

import numpy as np
import pytest
from files import lora_folder, model_folder
from tiny_checkpoints import lora_checkpoint, write

from scute_jax.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("inspect") / "model")


def report(capsys, *args, expect=0):
    assert main(["inspect", *map(str, args), "--json"]) == expect
    return json.loads(capsys.readouterr().out)


def test_without_a_base_it_says_what_the_files_say(tmp_path, capsys):
    found = report(capsys, lora_folder(tmp_path / "a"))
    assert found["method"] == "LORA" and found["folded"] == ["c"] and found["live"] == []
    assert found["parameters"] == 2 * 4 * (48 + 72 + 80 + 48)
    assert found["modules"]["layers.0.self_attn.q_proj"] == [
        "lora_A.weight [4, 48]",
        "lora_B.weight [72, 4]",
    ]
    assert found["problems"] == []


def test_with_its_base_it_shows_every_site(tmp_path, model, capsys):
    found = report(capsys, lora_folder(tmp_path / "a"), "--model", model)
    assert found["sites"]["layers.1.mlp.down_proj"] == {
        "rank": 4,
        "shared_ranks": [],
        "live": [],
        "block": None,
    }
    assert found["served_bytes"] == 4 * found["parameters"]


def test_a_person_gets_a_table(tmp_path, model, capsys):
    assert main(["inspect", str(lora_folder(tmp_path / "a")), "--model", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "LORA" in shown and "self_attn.q_proj" in shown and "can be served over" in shown


def test_problems_are_named(tmp_path, model, capsys):
    config, tensors = lora_checkpoint()
    bad = {k: t * np.float32(np.nan) for k, t in tensors.items()}
    found = report(capsys, write(tmp_path / "nan", config, bad), expect=1)
    assert "holds NaN" in found["problems"][0]
    wide = {k: np.pad(t, ((0, 1), (0, 0))) for k, t in tensors.items()}
    found = report(capsys, write(tmp_path / "wide", config, wide), "--model", model, expect=1)
    assert "has shape" in found["problems"][0]
    found = report(capsys, tmp_path / "nowhere", expect=1)
    assert "does not exist" in found["problems"][0]

"""(IA)3 against the PEFT library: both kinds, with the base's biases."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


@settings(max_examples=25, deadline=None)
@given(
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    feedforward=st.sets(st.sampled_from(MODULES)),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_both_kinds_at_every_module(modules, feedforward, base):
    feedforward &= modules
    config = peft.IA3Config(target_modules=list(modules), feedforward_modules=list(feedforward))
    adapter = serve(config, base, save_embedding_layers=False)
    for site, form in adapter.sites.items():
        assert form.live == (("R",) if site.endswith(tuple(feedforward or "-")) else ("s",))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": ["k_proj", "down_proj"]},
        {
            "target_modules": ["v_proj", "layers.1.mlp.down_proj"],
            "feedforward_modules": r".*down.*",
        },
        {"target_modules": r".*(up|down)_proj", "feedforward_modules": ["p_proj", "n_proj"]},
        {"target_modules": "all-linear", "feedforward_modules": r".*down_proj"},
        {"target_modules": ["up_proj"], "feedforward_modules": [], "exclude_modules": ["layers.0"]},
    ],
)
def test_every_way_to_name_modules(fields: dict):
    assert serve(peft.IA3Config(**fields), "biased").sites


def test_lists_that_contradict_each_other_are_refused(tmp_path: Path):
    config = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    folder = save_adapter(config, "plain", tmp_path)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    for wrong, message in (
        (["up_proj"], "feedforward_modules.*part of target_modules"),
        ([], r"down_proj: ia3_l has shape \[1, 80\].*output is scaled.*\[48, 1\]"),
        (["down_proj", "k_proj"], r"k_proj: ia3_l has shape \[24, 1\].*input is scaled"),
    ):
        path.write_text(json.dumps(fields | {"feedforward_modules": wrong}))
        with pytest.raises(AdapterError, match=message):
            load_peft(folder, CONFIGS["plain"])

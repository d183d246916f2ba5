"""BEFT against the PEFT library."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


@settings(max_examples=12, deadline=None)
@given(
    modules=st.sets(st.sampled_from(MODULES), min_size=1),
    init=st.booleans(),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
    seed=st.integers(0, 99),
)
def test_every_option(modules, init, base, seed):
    config = peft.BeftConfig(target_modules=list(modules), init_weights=init)
    assert serve(config, base, seed).live == ("b",)


def test_the_default_targets_are_those_of_peft():
    adapter = serve(peft.BeftConfig(), "biased")
    assert set(adapter) == {"layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"}


def test_a_file_for_another_width_is_refused(tmp_path: Path):
    folder = save_adapter(peft.BeftConfig(target_modules=["down_proj"]), "plain", tmp_path)
    text = (folder / "adapter_config.json").read_text().replace("down_proj", "up_proj")
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"up_proj\.beft_bias"):
        load_peft(folder, CONFIGS["plain"])

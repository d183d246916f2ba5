"""AdaLoRA against the PEFT library: whole, pruned, and pruned to nothing at some modules."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS, projections

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.AdaLoraConfig:
    return quiet(peft.AdaLoraConfig, **({"total_step": 10} | fields))


@st.composite
def configs(draw, base: str) -> peft.AdaLoraConfig:
    """A config, pruned at some of its modules by a mask each."""
    init_r, modules = draw(st.integers(1, 7)), draw(with_head)
    masks = st.lists(st.booleans(), min_size=init_r, max_size=init_r)
    targets = [p.module for p in projections(base) if p.module.split(".")[-1] in modules]
    pruned = draw(st.sets(st.sampled_from(targets)))
    return make(
        init_r=init_r,
        lora_alpha=draw(st.sampled_from([8, 1, 0, -3, 2.5])),
        lora_dropout=draw(st.sampled_from([0.0, 0.3])),
        target_r=draw(st.integers(1, 4)),
        bias=draw(st.sampled_from(["none", "all", "lora_only"])),
        init_lora_weights=draw(st.booleans()),
        target_modules=modules,
        rank_pattern={f"{m}.lora_E": draw(masks) for m in sorted(pruned)} or None,
    )


@settings(max_examples=25, deadline=None)
@given(base=bases, data=st.data(), seed=st.integers(0, 99))
def test_every_option(base, data, seed):
    adapter = serve(
        data.draw(configs(base)), base, seed, needs_effect=False, save_embedding_layers=False
    )
    assert adapter.method == "ADALORA" and adapter.live in ((), ("b",))


def test_the_scale_is_that_of_the_rank_before_pruning(tmp_path: Path):
    """One rank of four is left, and the scale still divides by four."""
    mask = {"model.layers.0.self_attn.q_proj.lora_E": [True, False, False, False]}
    config = make(init_r=4, target_modules=["layers.0.self_attn.q_proj"], rank_pattern=mask)
    adapter = serve(config, "plain")
    assert adapter["layers.0.self_attn.q_proj"].rank == 1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_E": [True] * 3}, "has 3 entries, but init_r is 4"),
        ({"model.layers.0.self_attn.q_proj.lora_E": [1, 0, 1, 1]}, "a list of true and false"),
        ({"model.layers.0.self_attn.q_proj": [True] * 4}, "needed names like"),
        ({"model.layers.9.self_attn.q_proj.lora_E": [True] * 4}, "needed names like"),
        (7, "needed an object"),
    ],
)
def test_masks_that_fit_nothing_are_refused(pattern, message, tmp_path: Path):
    folder = save_adapter(make(init_r=4, target_modules=["q_proj"]), "plain", tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": pattern}))
    with pytest.raises(AdapterError, match=f"rank_pattern.*{message}"):
        load_peft(folder, CONFIGS["plain"])

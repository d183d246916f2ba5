"""BD-LoRA against the PEFT library: block-diagonal A, block-diagonal B, and neither."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import BdLoraConfig
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, modules
from test_lora import patterns
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

COLUMNS = ["q_proj", "v_proj", "mlp.up", "layers.1.self_attn.k"]  # parts of paths, as PEFT has them
ROWS = ["o_proj", "down", "layers.0.self_attn.k"]


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([1, 2, 4, 8]),
    t=st.integers(1, 3),
    swapped=st.booleans(),
    rslora=st.booleans(),
    lora_bias=st.booleans(),
    bias=st.sampled_from(["none", "all", "lora_only"]),
    init=st.sampled_from([True, False, "pissa", "olora", "gaussian"]),
    alpha_pattern=patterns(st.integers(1, 40)),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(
    n, t, swapped, rslora, lora_bias, bias, init, alpha_pattern, modules, base, seed
):
    a, b = (ROWS, COLUMNS) if swapped else (COLUMNS, ROWS)
    config = quiet(
        peft.LoraConfig,
        r=n * t,
        use_rslora=rslora,
        lora_bias=lora_bias and init in (True, False),
        bias=bias,
        init_lora_weights=init,
        alpha_pattern=alpha_pattern,
        target_modules=modules,
        use_bdlora=BdLoraConfig(
            target_modules_bd_a=a, target_modules_bd_b=b, nblocks=n, match_strict=False
        ),
    )
    adapter = serve(config, base, seed, tolerance=1e-4)
    assert adapter.method == "BDLORA" and set(adapter.live) <= {"b"}


GOOD = {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": [], "nblocks": 2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (GOOD | {"nblocks": 3}, "nblocks has to divide r"),
        (GOOD | {"nblocks": 0}, "needed match_strict, nblocks"),
        (GOOD | {"nblocks": True}, "needed match_strict, nblocks"),
        (GOOD | {"more": 1}, "needed match_strict, nblocks"),
        (GOOD | {"target_modules_bd_a": "q_proj"}, "needed match_strict, nblocks"),
        (GOOD | {"target_modules_bd_b": 5}, "needed match_strict, nblocks"),
        (GOOD | {"target_modules_bd_a": ["v_proj"]}, "with match_strict it has to name .*q_proj"),
        (GOOD | {"target_modules_bd_b": ["self_attn"]}, "both lists name .*q_proj"),
        (GOOD | {"target_modules_bd_b": ["q_proj"]}, "two lists that share no name"),
        (["q_proj"], "needed an object"),
    ],
)
def test_lists_that_name_no_side_are_refused(fields, named, tmp_path: Path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_bdlora=BdLoraConfig(**GOOD))
    path = save_adapter(config, "plain", tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bdlora": fields}))
    with pytest.raises(AdapterError, match=f"use_bdlora.*{named}"):
        load_peft(tmp_path, CONFIGS["plain"])

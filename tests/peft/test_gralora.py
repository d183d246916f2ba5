"""GraLoRA against the PEFT library: grids of every size, with and without a plain LoRA beside."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, modules
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.GraloraConfig:
    return quiet(peft.GraloraConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    k=st.sampled_from([1, 2, 4, 8]),
    t=st.integers(1, 4),
    hybrid=st.integers(0, 3),
    alpha=st.sampled_from([64, 3, 0.5, -2]),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "gralora_only"]),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(k, t, hybrid, alpha, init, bias, modules, base, seed):
    config = make(
        r=k * t,
        gralora_k=k,
        hybrid_r=hybrid,
        alpha=alpha,
        gralora_dropout=0.3,
        init_weights=init,
        bias=bias,
        target_modules=modules,
    )
    adapter = serve(config, base, seed)
    assert adapter.method == "GRALORA" and set(adapter.live) <= {"b"}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("gralora_k", 3, "divide r"), ("gralora_k", 16, "divide r"), ("hybrid_r", -1, "0 or more")],
)
def test_a_grid_that_does_not_fit_is_refused(field, value, named, tmp_path: Path):
    path = (
        save_adapter(make(r=4, gralora_k=2, target_modules=["q_proj"]), "plain", tmp_path)
        / "adapter_config.json"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(AdapterError, match=f"{field}.*{named}"):
        load_peft(tmp_path, CONFIGS["plain"])

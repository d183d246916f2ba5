"""Which modules are adapted: our reading of the config against PEFT's own function."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft.base import Base
from scute_jax.peft.options import Options
from scute_jax.peft.targets import targeted

BASE = Base.from_config(CONFIGS["deeper"])
ENDS = [
    "q_proj",
    "proj",
    "self_attn.v_proj",
    "mlp",
    "lm_head",
    "embed_tokens",
    "model.layers.1.mlp.up_proj",
    "layers.2.self_attn.o_proj",
    "1.mlp.down_proj",
]
REGEXES = [".*", r".*_proj", r"model\.layers\.[01]\..*(q|up)_proj", "lm_head", "(?!x)", "q_proj"]
lists = st.lists(st.sampled_from(ENDS), max_size=4)
names = st.one_of(lists, st.sampled_from(REGEXES))


def read(**fields) -> tuple[str, ...]:
    options = Options({"peft_type": "LORA"} | fields, Path("adapter_config.json"))
    return targeted(options, BASE)


@settings(max_examples=300, deadline=None)
@given(
    wanted=names,
    excluded=st.one_of(st.none(), names),
    layers=st.one_of(st.none(), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3)),
    patterns=st.one_of(
        st.none(), st.sampled_from(["layers", "h", "l.*s", []]), st.just(["h", "layers"])
    ),
    saved=st.one_of(st.none(), lists),
)
def test_as_peft_matches(wanted, excluded, layers, patterns, saved):
    tuners = pytest.importorskip("peft.tuners.tuners_utils", reason="the oracle is PEFT")
    if layers is None or isinstance(wanted, str):
        layers = patterns = None  # PEFT refuses them then, see below
    fields = {
        "target_modules": wanted,
        "exclude_modules": excluded,
        "layers_to_transform": layers,
        "layers_pattern": patterns,
        "modules_to_save": saved,
    }
    config = SimpleNamespace(**fields, target_parameters=None)
    modules = ["model.embed_tokens", *(p.module for p in BASE.projections)]
    expected = tuple(m for m in modules if tuners.check_target_module_exists(config, m))
    if expected:
        assert read(**fields) == expected
    else:
        with pytest.raises(AdapterError, match="it names no module of this base"):
            read(**fields)


def test_all_linear_is_every_projection_but_the_head():
    every = tuple(p.module for p in BASE.projections[:-1])
    assert read(target_modules="all-linear") == read(target_modules="All-Linear") == every
    assert len(every) == 21


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": "["}, r"target_modules.*'\[' is not a regular expression"),
        ({"target_modules": ["q_proj"], "exclude_modules": "("}, "exclude_modules.*regular"),
        ({"target_modules": 3}, "target_modules.*needed a string or a list of strings"),
        ({"target_modules": ["q_proj", None]}, "target_modules.*needed a string or a list"),
        ({"target_modules": ".*", "layers_to_transform": 0}, "layers_to_transform.*pattern"),
        ({"target_modules": ".*", "layers_pattern": "h"}, "layers_pattern.*pattern"),
        ({"target_modules": ["q_proj"], "layers_pattern": "h"}, "needs layers_to_transform"),
        ({"target_modules": ["q_proj"], "layers_to_transform": "0"}, "layer index or a list"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [True]}, "layer index or a list"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "("},
            "layers_pattern.*regular expression",
        ),
        ({"target_modules": []}, "names no module of this base"),
        ({"target_modules": None, "peft_type": "NEW"}, "target_modules.*state it"),
    ],
)
def test_malformed_and_contradictory_fields_are_refused(fields: dict, message: str):
    with pytest.raises(AdapterError, match=message):
        read(**fields)

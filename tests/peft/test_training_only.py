"""VeLoRA and MonteCLoRA against the PEFT library: at inference both are LoRA."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import MontecloraConfig, VeloraConfig
from peft_oracle import peft, quiet, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft

velora = st.builds(
    VeloraConfig,
    num_groups=st.sampled_from([2, 4, 8]),
    scale=st.floats(0.5, 2),
    init_type=st.sampled_from(["random", "batch_average", "batch_average_once"]),
)
monteclora = st.builds(
    MontecloraConfig,
    num_samples=st.integers(1, 4),
    use_entropy=st.booleans(),
    sample_scaler=st.floats(1e-4, 1),
    buffer_size=st.integers(1, 4),
)


@settings(max_examples=12, deadline=None)
@given(
    variant=st.one_of(
        velora.map(lambda config: {"velora_config": config}),
        monteclora.map(lambda config: {"monteclora_config": config}),
    ),
    r=st.integers(1, 6),
    rslora=st.booleans(),
    lora_bias=st.booleans(),
    bias=st.sampled_from(["none", "all"]),
    init=st.sampled_from([True, False, "orthogonal", "olora"]),
    modules=st.sets(st.sampled_from(MODULES), min_size=1),
    base=st.sampled_from(["plain", "biased"]),
)
def test_every_option(variant, r, rslora, lora_bias, bias, init, modules, base):
    config = quiet(
        peft.LoraConfig,
        r=2 * r,  # orthogonal needs an even rank
        use_rslora=rslora,
        lora_bias=lora_bias and init in (True, False),  # PEFT takes it with no other
        bias=bias,
        init_lora_weights=init,
        target_modules=list(modules),
        **variant,
    )
    adapter = serve(config, base, tolerance=1e-4 if init == "olora" else 1e-5)
    assert adapter.method in ("VELORA", "MONTECLORA") and set(adapter.live) <= {"b"}


@pytest.mark.parametrize(
    ("field", "config"),
    [("velora_config", VeloraConfig(num_groups=4)), ("monteclora_config", MontecloraConfig())],
)
def test_what_is_not_understood_is_refused(field, config, tmp_path: Path):
    folder = save_adapter(
        peft.LoraConfig(r=3, target_modules=["q_proj"], **{field: config}), "plain", tmp_path
    )
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {field: fields[field] | {"at_inference": True}}))
    with pytest.raises(AdapterError, match=f"{field}.*of unknown meaning is 'at_inference'"):
        load_peft(folder, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {field: None}))
    with pytest.raises(AdapterError, match="of no use: .*lora_(velora|monteclora)"):
        load_peft(folder, CONFIGS["plain"])
    path.write_text(json.dumps(fields | {"use_dora": True}))
    with pytest.raises(AdapterError, match="is set as well, and no adapter is both"):
        load_peft(folder, CONFIGS["plain"])

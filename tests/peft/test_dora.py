"""DoRA against the PEFT library: the scale is computed from the base's weights at load."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError, Term
from scute_jax.peft import load_peft
from scute_jax.peft.dora import _norms_on_device, column_norms


@settings(max_examples=12, deadline=None)
@given(
    r=st.integers(1, 8),
    alpha=st.integers(1, 24),
    rslora=st.booleans(),
    bias=st.sampled_from(["none", "all", "lora_only"]),
    init=st.sampled_from([True, "pissa", "olora"]),
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    base=st.sampled_from(["plain", "biased", "qwen2", "tied"]),
)
def test_every_option(r, alpha, rslora, bias, init, modules, base):
    if base == "tied" and init is not True:
        modules = modules - {"lm_head"} or {"q_proj"}
    config = quiet(
        peft.LoraConfig,
        use_dora=True,
        r=r,
        lora_alpha=alpha,
        use_rslora=rslora,
        bias=bias,
        init_lora_weights=init,
        rank_pattern={"v_proj": 2},
        target_modules=list(modules),
    )
    # PEFT saves the head that PiSSA changed as if it were the base's; leave it out of the file.
    adapter = serve(config, base, tolerance=1e-4, save_embedding_layers=False)
    assert adapter.method == "DORA"
    assert set(adapter.live) in ({"s"}, {"s", "b"})


def test_both_spellings_of_the_magnitude_load_alike(tmp_path: Path):
    folder = save_adapter(
        peft.LoraConfig(use_dora=True, r=3, target_modules=["q_proj"]), "plain", tmp_path
    )
    params = random_params("plain")
    bare = load_peft(folder, CONFIGS["plain"], params)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert any(key.endswith("lora_magnitude_vector") for key in tensors)
    spelt = {k + ".weight" if k.endswith("vector") else k: v for k, v in tensors.items()}
    save_file(spelt, folder / "adapter_model.safetensors")
    adapter = load_peft(folder, CONFIGS["plain"], params)
    assert adapter.version == bare.version
    compare(adapter, folder, "plain")


@pytest.mark.parametrize("kind", ["mapping", "torch", "bfloat16", "object", "folder"])
def test_the_base_is_read_in_every_form(kind: str, tmp_path: Path):
    import torch
    from flax import struct

    @struct.dataclass
    class Linear:
        weight: np.ndarray
        bias: np.ndarray | None

    class Params:
        def linear(self, site: str) -> Linear:
            key = f"model.{site}"
            return Linear(arrays[f"{key}.weight"].T, arrays.get(f"{key}.bias"))

    folder = save_adapter(
        peft.LoraConfig(use_dora=True, r=3, target_modules=["q_proj", "up_proj"]),
        "biased",
        tmp_path,
    )
    arrays = random_params("biased")
    params = {
        "mapping": arrays,
        "torch": {k: torch.nn.Parameter(torch.tensor(v)) for k, v in arrays.items()},
        "bfloat16": {k: torch.tensor(v).bfloat16() for k, v in arrays.items()},
        "object": Params(),
        "folder": tmp_path,
    }[kind]
    save_file(arrays, tmp_path / "model.safetensors")
    adapter = load_peft(folder, CONFIGS["biased"], params)
    if kind == "bfloat16":
        rounded = load_peft(folder, CONFIGS["biased"], arrays)
        s, t = (a["layers.0.mlp.up_proj"].s for a in (adapter, rounded))
        assert 0 < np.abs(s - t).max() < 0.02
    else:
        compare(adapter, folder, "biased")


def test_without_the_base_it_says_what_to_pass(tmp_path: Path):
    folder = save_adapter(
        peft.LoraConfig(use_dora=True, target_modules=["q_proj"]), "plain", tmp_path
    )
    message = r"layers\.0\.self_attn\.q_proj.*DoRA divides by the norm.*Pass params="
    with pytest.raises(AdapterError, match=message):
        load_peft(folder, CONFIGS["plain"])
    with pytest.raises(AdapterError, match=r"params has no tensor 'model\.layers\.0"):
        load_peft(folder, CONFIGS["plain"], {})
    with pytest.raises(AdapterError, match=r"params.*mlp|params.*self_attn.*different models"):
        load_peft(folder, CONFIGS["plain"], random_params("qwen2"))


def test_norms_are_those_of_the_sum():
    rng = np.random.default_rng(0)
    W, A, B = (rng.normal(size=s).astype(np.float32) for s in ((150, 70), (150, 3), (3, 70)))

    expected = np.linalg.norm(W.astype(np.float64) + 2.0 * A.astype(np.float64) @ B, axis=0)
    assert np.allclose(column_norms(W, (Term(A, B, c=2.0),)), expected, rtol=3e-7)


def test_norms_on_an_accelerator_are_those_on_the_host():
    rng = np.random.default_rng(0)
    W, A, B = (rng.normal(size=s).astype(np.float32) for s in ((600, 70), (600, 3), (3, 70)))
    on_device = _norms_on_device(W, [(A, 2 * B), (A, B)])
    assert np.allclose(on_device, column_norms(W, (Term(A, B, c=2.0), Term(A, B))), rtol=1e-6)

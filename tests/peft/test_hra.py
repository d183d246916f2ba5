"""HRA against the PEFT library: reflections one after the other, and made orthogonal first."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.HRAConfig:
    return quiet(peft.HRAConfig, **fields)


@settings(max_examples=25, deadline=None)
@given(
    r=st.integers(1, 20),
    gs=st.booleans(),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "hra_only"]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, gs, init, bias, modules, base, seed):
    config = make(r=r, apply_GS=gs, init_weights=init, bias=bias, target_modules=modules)
    adapter = serve(config, base, seed, save_embedding_layers=False)
    assert adapter.method == "HRA" and set(adapter.live) <= {"b"}
    assert {form.rank for form in adapter.sites.values() if form.terms} == {r}


def damaged(tmp_path: Path, gs: bool, change) -> Path:
    folder = save_adapter(make(r=3, apply_GS=gs, target_modules=["q_proj"]), "plain", tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    for vectors in tensors.values():
        change(vectors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_vectors_without_a_direction_are_refused(tmp_path: Path):
    for scale in (0.0, 1e30, 1e-30):

        def change(u: np.ndarray, scale: float = scale) -> None:
            u[:, 1] *= scale

        folder = damaged(tmp_path / str(scale), False, change)
        with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.q_proj.*hra_u is zero or"):
            load_peft(folder, CONFIGS["plain"], random_params("plain"))


def test_vectors_in_the_span_of_others_have_no_orthogonal_part(tmp_path: Path):
    def repeat(u: np.ndarray) -> None:
        u[:, 2] = u[:, 0] - u[:, 1]

    with pytest.raises(AdapterError, match="column 2 of hra_u lies in the span.*apply_GS"):
        load_peft(damaged(tmp_path / "a", True, repeat), CONFIGS["plain"], random_params("plain"))
    folder = damaged(tmp_path / "b", False, repeat)
    assert load_peft(folder, CONFIGS["plain"], random_params("plain")).sites


def test_it_needs_the_weights_of_the_base(tmp_path: Path):
    folder = save_adapter(make(r=3, target_modules=["q_proj"]), "plain", tmp_path)
    with pytest.raises(AdapterError, match="HRA reflects the input of W.*params="):
        load_peft(folder, CONFIGS["plain"])

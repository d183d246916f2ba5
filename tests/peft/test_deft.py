"""DEFT against the PEFT library: both projectors, with and without the injection."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from safetensors.numpy import load_file, save_file
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.DeftConfig:
    return quiet(peft.DeftConfig, **fields)


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 30),
    method=st.sampled_from(["relu", "qr"]),
    para=st.booleans(),
    alpha=st.sampled_from([None, 0, 8, 3, -2]),
    init=st.booleans(),
    bias=st.sampled_from(["none", "all", "deft_only"]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, method, para, alpha, init, bias, modules, base, seed):
    config = make(
        r=min(r, 20) if method == "qr" else r,  # columns that are far from dependent
        decomposition_method=method,
        para=para,
        alpha=alpha,
        init_scale=2.0,
        init_weights=init,
        deft_dropout=0.3,
        bias=bias,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, tolerance=1e-4, save_embedding_layers=False)
    assert adapter.method == "DEFT" and set(adapter.live) <= {"b"}
    ranks = {
        min(config.r, form.terms[0].B.shape[1]) for form in adapter.sites.values() if form.terms
    }
    assert {form.rank for form in adapter.sites.values() if form.terms} == ranks


def test_columns_that_depend_on_each_other_are_refused_for_qr_alone(tmp_path: Path):
    for method in ("qr", "relu"):
        config = make(r=3, decomposition_method=method, target_modules=["q_proj"])
        folder = save_adapter(config, "plain", tmp_path / method)
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        for key, array in tensors.items():
            if key.endswith("deft_P"):
                array[:, 1] = 2 * array[:, 0]
        save_file(tensors, path)
        if method == "qr":
            with pytest.raises(AdapterError, match="columns of deft_P depend on each other"):
                load_peft(folder, CONFIGS["plain"], random_params("plain"))
        else:
            assert load_peft(folder, CONFIGS["plain"], random_params("plain")).sites

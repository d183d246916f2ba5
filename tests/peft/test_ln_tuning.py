"""Norms with weights of their own, by LN tuning or modules_to_save, against the PEFT library."""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import base_model, peft, quiet, save_adapter, torch
from tiny_checkpoints import CONFIGS, random_params
from vocabulary_oracle import own_weight

from scute_jax import AdapterError, NormalForm
from scute_jax.peft import load_peft
from scute_jax.peft.base import Base
from scute_jax.peft.saved_modules import STEEPEST, norm_form

NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
numbers = st.floats(-3, 3, width=32)


@settings(max_examples=200, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(numbers, st.one_of(numbers, st.sampled_from([0.0, -0.0, 1e-30, 1e-42, 1e-3]))),
        min_size=1,
        max_size=20,
    )
)
def test_any_weight_over_any_other(pairs):
    own, base = np.array(pairs, np.float32).T
    form = norm_form(own, base)
    np.testing.assert_allclose(own_weight(form, np.float64(base)), own, rtol=1e-6, atol=1e-44)
    assert form.s is None or np.abs(form.s).max() <= STEEPEST
    assert form.S is None or not (np.abs(own[form.S.rows]) <= np.abs(base[form.S.rows])).any()


def test_a_weight_that_did_not_change_is_nothing():
    base = np.array([1.0, 0.0, -2.0], np.float32)
    assert norm_form(base, base).live == ()


def serve(config, name: str, seed: int = 0):
    """The adapter of what PEFT saves over norms with zeros, every norm compared with PEFT's."""
    params = dict(random_params(name))
    rng = np.random.default_rng(4)
    for key in [key for key in params if "norm" in key]:
        params[key] = (1 + 0.3 * rng.normal(size=48)).astype(np.float32)
        params[key][[0, 17]] = 0
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_adapter(config, name, Path(folder), seed)
        base = base_model(name)
        base.load_state_dict({key: torch.tensor(value) for key, value in params.items()})
        model = peft.PeftModel.from_pretrained(base, folder).eval()
        adapter = load_peft(folder, CONFIGS[name], params)
    x = rng.normal(size=(5, 48)).astype(np.float32)
    normal = x / np.sqrt((np.float64(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    for norm in Base.from_config(CONFIGS[name]).norms:
        weight = np.float64(params[f"{norm.module}.weight"])
        ours = normal * own_weight(adapter.sites.get(norm.site, NormalForm()), weight)
        with torch.no_grad():
            module = model.base_model.model.get_submodule(norm.module)
            theirs = module(torch.tensor(x)).double().numpy()
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    return adapter


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["plain", "tied", "qwen2"]),
    targets=st.one_of(
        st.none(),
        st.sets(st.sampled_from([*NORMS, "1.input_layernorm", "model.norm"]), min_size=1),
        st.sampled_from([r".*norm", r"model\.layers\.1\..*norm"]),
    ),
    excluded=st.one_of(st.none(), st.just(["0.input_layernorm"])),
    saved=st.one_of(st.none(), st.just(["post_attention_layernorm"])),
    seed=st.integers(0, 99),
)
def test_ln_tuning(name, targets, excluded, saved, seed):
    targets = targets if targets is None or isinstance(targets, str) else sorted(targets)
    if saved and (targets or [name == "qwen2" and saved[0]]) == saved:
        saved = None  # nothing would be left to target
    config = quiet(
        peft.LNTuningConfig,
        target_modules=targets,
        exclude_modules=excluded,
        modules_to_save=saved,
    )
    adapter = serve(config, name, seed)
    assert adapter.method == "LN_TUNING" and adapter.live in (("s",), ("s", "S"))


@pytest.mark.parametrize(
    "saved", [["norm"], ["input_layernorm"], ["model.norm"], ["0.input_layernorm"]]
)
def test_modules_to_save_of_any_method(saved: list):
    config = quiet(peft.LoraConfig, target_modules=["q_proj"], modules_to_save=saved)
    found = {site for site in serve(config, "plain") if "norm" in site}
    every = [n.module for n in Base.from_config(CONFIGS["plain"]).norms]
    assert found == {m.removeprefix("model.") for m in every if m.endswith(saved[0])}


def test_a_copy_of_a_projection_is_refused(tmp_path: Path):
    config = quiet(peft.LNTuningConfig, target_modules=["norm", "q_proj"])
    folder = save_adapter(config, "plain", tmp_path)
    with pytest.raises(AdapterError, match="q_proj: LN tuning of a module that is no norm"):
        load_peft(folder, CONFIGS["plain"], random_params("plain"))


def test_the_base_is_needed(tmp_path: Path):
    folder = save_adapter(quiet(peft.LNTuningConfig, target_modules=["norm"]), "plain", tmp_path)
    with pytest.raises(AdapterError, match=r"model\.norm: the base's own weight.*Pass params="):
        load_peft(folder, CONFIGS["plain"])
    lacking = {k: v for k, v in random_params("plain").items() if k != "model.norm.weight"}
    with pytest.raises(AdapterError, match=r"model\.norm: params lacks the weight of this norm"):
        load_peft(folder, CONFIGS["plain"], lacking)

"""PSOFT against the PEFT library: every shape of R, both ways to the singular vectors."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, with_head
from tiny_checkpoints import CONFIGS, random_params

from scute_jax import AdapterError
from scute_jax.peft import load_peft


def make(**fields) -> peft.PsoftConfig:
    return quiet(peft.PsoftConfig, **fields)


@settings(max_examples=40, deadline=None)
@given(
    r=st.integers(1, 24),
    alpha=st.sampled_from([32, 3, 0.5]),
    init=st.sampled_from(["psoft_init", "pissa_init"]),
    svd=st.sampled_from(["full", "full", "lowrank"]),
    niter=st.integers(0, 12),
    random_seed=st.integers(0, 9),
    orth=st.sampled_from([True, True, False]),
    mags=st.tuples(st.booleans(), st.booleans()),
    neumann=st.booleans(),
    terms=st.integers(1, 8),
    radius=st.sampled_from([None, 0.9, 0.1]),
    modules=with_head,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(
    r, alpha, init, svd, niter, random_seed, orth, mags, neumann, terms, radius, modules, base, seed
):
    config = make(
        r=r,
        psoft_alpha=alpha,
        psoft_dropout=0.3,
        ab_svd_init=init,
        psoft_svd=svd,
        psoft_svd_lowrank_niter=niter,
        random_seed=random_seed,
        psoft_orth=orth,
        psoft_mag_a=mags[0],
        psoft_mag_b=mags[1],
        use_cayley_neumann=neumann,
        num_cayley_neumann_terms=terms,
        cayley_neumann_eps=radius,
        target_modules=modules,
    )
    # Without all three, an R of one number has nothing to train.
    has_effect = (r > 1 and (terms > 1 or not neumann)) or not orth or any(mags)
    adapter = serve(
        config, base, seed, tolerance=1e-4, needs_effect=has_effect, save_embedding_layers=False
    )
    assert adapter.method == "PSOFT" and adapter.live == ()
    assert {form.rank for form in adapter.sites.values()} == {r}
    assert any("signs of torch" in note for note in adapter.info["notes"])


def load(folder: Path, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return load_peft(folder, CONFIGS["plain"], random_params("plain"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(make(r=3, target_modules=["q_proj"]), "plain", tmp_path)


def test_every_load_warns_that_a_gpu_finds_other_signs(folder: Path):
    with pytest.warns(UserWarning, match="made with its base on a GPU gives other text"):
        load(folder)


def test_without_torch_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(AdapterError, match=r"q_proj: .*torch's own SVD.*torch is not installed"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"r": 49}, "'r'.*shorter side"),
        ({"psoft_alpha": 0}, "psoft_alpha.*above 0"),
        ({"psoft_alpha": -1, "ab_svd_init": "pissa_init"}, "psoft_alpha.*above 0"),
        ({"ab_svd_init": "other"}, "ab_svd_init.*'psoft_init', 'pissa_init'"),
        ({"psoft_svd": "other"}, "psoft_svd.*'full', 'lowrank'"),
        ({"psoft_svd": "lowrank", "random_seed": 2**70}, "random_seed.*64 bits"),
        ({"use_cayley_neumann": True, "cayley_neumann_eps": 2}, "cayley_neumann_eps.*0 and 1"),
        ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 0}, "terms.*at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(fields: dict, named: str, folder: Path):
    with pytest.raises(AdapterError, match=named):
        load(folder, **fields)

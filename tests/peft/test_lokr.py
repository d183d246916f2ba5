"""LoKr against the PEFT library: every split of the widths, whole and factored parts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lokr.layer import factorization
from peft_oracle import compare, peft, quiet, serve
from targets_drawn import bases, modules
from test_lora import patterns
from tiny_checkpoints import CONFIGS, write

from scute_jax.kronecker import expanded
from scute_jax.peft import load_peft, save_peft
from scute_jax.peft.lokr import split

ranks = st.integers(1, 9)


@settings(max_examples=30, deadline=None)
@given(
    r=ranks,
    alpha=st.one_of(st.integers(1, 32), st.just(-3), st.floats(0.5, 9.0)),
    factor=st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 8, 12, 24, 48, 80, 100]),
    both=st.booleans(),
    rank_pattern=patterns(ranks),
    alpha_pattern=patterns(st.integers(1, 40)),
    init=st.sampled_from([True, False, "lycoris"]),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(
    r, alpha, factor, both, rank_pattern, alpha_pattern, init, modules, base, seed
):
    config = quiet(
        peft.LoKrConfig,
        r=r,
        alpha=alpha,
        decompose_factor=factor,
        decompose_both=both,
        rank_dropout=0.2,
        module_dropout=0.3,
        rank_dropout_scale=True,
        init_weights=init,
        target_modules=modules,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )
    adapter = serve(config, base, seed)
    assert adapter.method == "LOKR" and set(adapter.live) <= {"K"}
    for form in adapter.sites.values():
        (term,) = expanded(form).terms
        d_in, d_out = term.A.shape[0], term.B.shape[1]
        assert term.rank <= min(d_in, d_out)
        (a, b), (m, n) = split(d_out, factor), split(d_in, factor)
        cheaper = a * m + b * n < term.rank * (d_in + d_out)
        assert bool(form.K) == cheaper and bool(form.terms) != cheaper


@pytest.mark.parametrize("factor, numbers", [(-1, 2 * 64 * 64), (4, 4 * 8 * (4096 + 4096))])
def test_a_tenant_of_a_large_base_holds_what_is_least(factor: int, numbers: int, tmp_path: Path):
    """At 4096 wide, rank 8: two factors of 64 by 64, where a term would have rank 512."""
    side = 4096 // split(4096, factor)[0]
    module, rng = "base_model.model.model.layers.0.self_attn.o_proj", np.random.default_rng(0)
    shapes = {"w1": (4096 // side,) * 2, "w2_a": (side, 8), "w2_b": (8, side)}
    tensors = {f"{module}.lokr_{k}": np.float32(rng.normal(size=s)) for k, s in shapes.items()}
    config = {"peft_type": "LOKR", "r": 8, "alpha": 4, "decompose_factor": factor}
    folder = write(tmp_path, config | {"target_modules": ["o_proj"]}, tensors)
    base = CONFIGS["plain"] | {"hidden_size": 4096, "num_hidden_layers": 1, "head_dim": 1024}
    adapter = load_peft(folder, base | {"num_attention_heads": 4})
    assert adapter.nbytes == 4 * numbers


def test_it_is_saved_as_the_lora_that_it_is(tmp_path: Path):
    config = quiet(peft.LoKrConfig, r=2, alpha=3, target_modules=["q_proj", "down_proj"])
    adapter = serve(config, "biased", 3)
    assert adapter.live == ("K",)
    save_peft(adapter, tmp_path)
    compare(adapter, tmp_path, "biased")
    again = load_peft(tmp_path, CONFIGS["biased"])
    assert again.method == "LORA" and again.live == ()


@pytest.mark.parametrize("factor", [-5, -1, 0, 1, 2, 3, 7, 16, 64, 999])
def test_the_split_is_that_of_peft(factor: int):
    for width in (1, 2, 7, 24, 36, 48, 97, 576, 1536, 49152):
        assert split(width, factor) == factorization(width, factor), width

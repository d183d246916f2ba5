"""LoKr against the PEFT library: every split of the widths, whole and factored parts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lokr.layer import factorization
from peft_oracle import peft, quiet, serve
from targets_drawn import bases, modules
from test_lora import patterns

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
    assert adapter.method == "LOKR" and adapter.live == ()
    assert all(
        form.rank <= min(form.terms[0].A.shape[0], form.terms[0].B.shape[1])
        for form in adapter.sites.values()
    )


@pytest.mark.parametrize("factor", [-5, -1, 0, 1, 2, 3, 7, 16, 64, 999])
def test_the_split_is_that_of_peft(factor: int):
    for width in (1, 2, 7, 24, 36, 48, 97, 576, 1536, 49152):
        assert split(width, factor) == factorization(width, factor), width

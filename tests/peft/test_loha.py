"""LoHa against the PEFT library, on both sides of the rank at which its factors are whole."""

from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, serve
from targets_drawn import bases, modules
from test_lora import patterns

ranks = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(
    r=ranks,
    alpha=st.one_of(st.integers(1, 32), st.just(-3), st.floats(0.5, 9.0)),
    rank_pattern=patterns(ranks),
    alpha_pattern=patterns(st.integers(1, 40)),
    init=st.booleans(),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, alpha, rank_pattern, alpha_pattern, init, modules, base, seed):
    config = peft.LoHaConfig(
        r=r,
        alpha=alpha,
        rank_dropout=0.2,
        module_dropout=0.3,
        use_effective_conv2d=True,
        init_weights=init,
        target_modules=modules,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )
    adapter = serve(config, base, seed)
    assert adapter.method == "LOHA" and adapter.live == ()


def test_the_rank_is_no_more_than_the_shorter_side():
    small = serve(peft.LoHaConfig(r=4, target_modules=["q_proj", "k_proj"]), "plain")
    large = serve(peft.LoHaConfig(r=9, target_modules=["q_proj", "k_proj"]), "plain")
    assert [form.rank for form in small.sites.values()] == [16, 16, 16, 16]
    assert [form.rank for form in large.sites.values()] == [48, 24, 48, 24]

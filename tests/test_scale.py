"""Adapters of any strength, alone and stacked, against the plain formula in float64."""

from functools import reduce

import hypothesis.strategies as st
import numpy as np
import pytest
from forms import (
    apply_over,
    evaluate,
    extended_forms,
    normal,
    random_blocks,
    random_form,
    random_kronecker,
    random_sparse,
    random_term,
    shared_pairs,
)
from hypothesis import given, settings

import scute_jax as sj
from scute_jax.entries import entries
from scute_jax.kronecker import expanded
from scute_jax.normal_form import TokenRows
from scute_jax.peft import methods
from scute_jax.scale import scaled_form

RNG = np.random.default_rng(0)
D_IN, D_OUT = 24, 10
W, X, BIAS = normal(RNG, D_IN, D_OUT), normal(RNG, 6, D_IN), normal(RNG, D_OUT)
PAIRS = shared_pairs()
FACTORS = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 3.0])


def base(x):
    return x @ np.float64(W) + np.float64(BIAS)


def over(form: sj.NormalForm, factor: float, below):
    """The function x -> below(x) + factor (F(x) - below(x)), F the form over `below`."""
    return lambda x: below(x) + factor * (apply_over(form, below, x) - below(x))


def assert_close(form: sj.NormalForm, expected: np.ndarray) -> None:
    error = np.abs(evaluate(form, W, X, BIAS) - expected).max()
    assert error <= 2e-5 * np.abs(expected).max()


def acting(form: sj.NormalForm) -> int:
    return len(form.P) + len(form.Q) + (form.R is not None) + (form.s is not None)


@given(extended_forms(D_IN, D_OUT, PAIRS), FACTORS)
@settings(max_examples=150, deadline=None)
def test_a_scale_is_that_of_the_effect_or_refused(form, factor):
    if acting(form) > 1 and factor not in (0, 1):
        with pytest.raises(sj.AdapterError, match=r"its effect on the base is a product \(\w \w"):
            scaled_form(form, factor)
    else:
        assert_close(scaled_form(form, factor), over(form, factor, base)(np.float64(X)))


@pytest.mark.parametrize("slot", ["R", "v", "P", "ordered P", "Q", "ordered Q", "s", "S", "K"])
def test_each_slot_alone_takes_a_scale(slot):
    rng, order = np.random.default_rng(3), 1 if "ordered" in slot else None
    form = random_form(
        rng, D_IN, D_OUT, "sb" if slot == "s" else "b", {"R": 4, "v": 1}.get(slot)
    ).replace(
        P=(random_blocks(rng, D_IN, 3, order),) if "P" in slot else (),
        Q=(random_blocks(rng, D_OUT, 2, order),) if "Q" in slot else (),
        S=random_sparse(rng, D_IN, D_OUT, 9) if slot == "S" else None,
        K=(random_kronecker(rng, D_IN, D_OUT, 4, 2),) if slot == "K" else (),
        terms=(random_term(rng, D_IN, D_OUT, 3, "cdeu"),),
    )
    for factor in (-0.5, 0.3, 2.0):
        expected = over(form, factor, base)(np.float64(X))
        assert np.abs(expected - base(np.float64(X))).max() > 0.1
        assert_close(scaled_form(form, factor), expected)


@st.composite
def method_forms(draw) -> tuple[str, sj.NormalForm]:
    """A form with the slots of one of the registered methods, and the name of the method.

    Rows of the vocabulary are for themselves, below.
    """
    method = draw(st.sampled_from([m for m in methods() if "rows" not in m.live]))
    rng, live = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), method.live
    orders = st.sampled_from([None, 1, 2])
    if set(live) & set("deu"):
        terms = [random_term(rng, D_IN, D_OUT, 0, live, draw(st.sampled_from(PAIRS)))]
    elif set(live) <= set("sb") and live != "b":  # scales alone, or a LoRA under them
        ranks = draw(st.lists(st.sampled_from([1, 5, 16]), min_size=not live, max_size=2))
        terms = [random_term(rng, D_IN, D_OUT, r, "cde") for r in ranks]
    else:
        terms = []
    block = draw(st.sampled_from([1, 2, 3, 4])) if "R" in live else None
    form = random_form(rng, D_IN, D_OUT, live, block, terms)
    if method.name == "IA3":  # one of its two kinds
        form = form.replace(**{draw(st.sampled_from("Rs")): None})
    return method.name, form.replace(
        P=(random_blocks(rng, D_IN, 3, draw(orders)),) if "P" in live else (),
        Q=(random_blocks(rng, D_OUT, 2, draw(orders)),) if "Q" in live else (),
        S=random_sparse(rng, D_IN, D_OUT, 9) if "S" in live else None,
        K=(random_kronecker(rng, D_IN, D_OUT, 4, 2),) if "K" in live else (),
    )


@given(st.lists(st.tuples(method_forms(), FACTORS), min_size=2, max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_methods_of_any_strength_stack_as_one_after_the_other(parts):
    """In both orders, and as one segment whose ranks are those of all owned terms together."""
    for ordered in (parts, parts[::-1]):
        below, forms = base, []
        for (_, form), factor in ordered:
            used = factor if acting(form) <= 1 else 1.0
            below = over(form, used, below)
            forms.append(scaled_form(form, used))
        if any(
            f.S is not None and any(turns(g) for g in forms[k + 1 :]) for k, f in enumerate(forms)
        ):
            with pytest.raises(sj.AdapterError, match="sparse delta under an adapter that rotates"):
                reduce(sj.stack, forms)
            continue
        stacked = reduce(sj.stack, forms)
        assert_close(stacked, below(np.float64(X)))
        assert len(entries(stacked).get("factors", ())) <= 1
        ranks = [t.rank for f in forms for t in expanded(f).terms]
        assert sum(t.rank for t in expanded(stacked).terms) == sum(ranks)


def turns(form: sj.NormalForm) -> bool:
    return bool(form.P or form.Q or form.R is not None)


def test_replaced_tokens_over_a_scaled_adapter_and_not_below_it():
    ids, new = np.array([3, 20]), normal(RNG, 2, D_OUT)
    rows = sj.NormalForm(rows=TokenRows(ids, new))
    half = scaled_form(random_form(RNG, D_IN, D_OUT, "sb"), 0.5)
    stacked = sj.stack(half, rows)
    np.testing.assert_array_equal(stacked.rows.ids, ids)
    np.testing.assert_array_equal(stacked.rows.rows, new)
    assert_close(stacked.replace(rows=None), evaluate(half, W, X, BIAS))
    with pytest.raises(sj.AdapterError, match="put the one that replaces rows last"):
        sj.stack(rows, half)


def test_stacks_of_scaled_adapters_run_in_one_batch():
    lora = random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 4)])
    dora = random_form(RNG, D_IN, D_OUT, "sb", terms=[random_term(RNG, D_IN, D_OUT, 5)])
    oft = random_form(RNG, D_IN, D_OUT, block=4)
    forms = [
        sj.stack(scaled_form(lora, 0.5), scaled_form(dora, 2.0)),
        sj.stack(sj.stack(scaled_form(oft, 0.5), scaled_form(lora, -1.0)), dora),
    ]
    y = sj.apply_normal_form(sj.site_params(W, forms, BIAS), X, sj.segments(np.arange(6) % 2, 2))
    x = np.float64(X)
    first = over(dora, 2.0, over(lora, 0.5, base))(x)
    second = over(dora, 1.0, over(lora, -1.0, over(oft, 0.5, base)))(x)
    expected = np.where(np.arange(6)[:, None] % 2, second, first)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def adapter(**sites) -> sj.Adapter:
    return sj.Adapter(sites=sites, method="LORA", version="v1", metadata=(("notes", ()),))


def test_an_adapter_scales_site_by_site_and_is_another_version():
    one = adapter(q=random_form(RNG, D_IN, D_OUT, "s"), k=random_form(RNG, D_IN, D_OUT, "b"))
    half, double = sj.scaled(one, 0.5), sj.scaled(one, 2)
    assert sj.scaled(one, 1.0) is one and sj.scaled(one, np.float32(1)) is one
    assert len({one.version, half.version, double.version}) == 3
    assert sj.scaled(one, 0.5).version == half.version and half.method == "0.5*LORA"
    np.testing.assert_allclose(half["k"].b, one["k"].b / 2)
    np.testing.assert_allclose(double["q"].s, 2 * one["q"].s - 1, rtol=1e-6)
    assert sj.scaled(one, 0)["q"] == sj.NormalForm()


def test_what_cannot_be_scaled_is_refused_by_site_and_slots():
    boft = adapter(q=random_form(RNG, D_IN, D_OUT, "s", block=4))
    with pytest.raises(sj.AdapterError, match=r"q: its effect on the base is a product \(R s\)"):
        sj.scaled(boft, 0.5)
    rows = adapter(lm_head=sj.NormalForm(rows=TokenRows(np.array([3]), normal(RNG, 1, 4))))
    with pytest.raises(sj.AdapterError, match="lm_head: it replaces 1 rows of the vocabulary"):
        sj.scaled(rows, 0.5)
    assert sj.scaled(rows, 0)["lm_head"] == sj.NormalForm()


@pytest.mark.parametrize("factor", [True, float("nan"), float("inf"), "1", None, 1j])
def test_a_scale_is_a_finite_number(factor):
    with pytest.raises(ValueError, match="the scale of an adapter is"):
        sj.scaled(adapter(), factor)

"""The byte model against bytes counted by hand."""

import numpy as np
import pytest
from forms import (
    random_blocks,
    random_form,
    random_kronecker,
    random_sparse,
    random_term,
    shared_pairs,
)

import scute_jax as sj
from scute_jax.byte_model import fused
from scute_jax.normal_form import TokenRows

RNG = np.random.default_rng(0)
D_IN, D_OUT = 24, 10


def test_each_route_counts_what_it_moves():
    lora = random_form(RNG, D_IN, D_OUT, "s", terms=[random_term(RNG, D_IN, D_OUT, 3)])
    turned = random_form(RNG, D_IN, D_OUT, block=4)
    ia3 = random_form(RNG, D_IN, D_OUT, "s")
    vera = [
        random_form(
            RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 0, "de", shared_pairs()[0])]
        )
        for _ in range(3)
    ]
    rank = vera[0].terms[0].rank
    sparse = sj.NormalForm(S=random_sparse(RNG, D_IN, D_OUT, 13))
    forms = [lora, turned, ia3, *vera, sparse, sj.NormalForm(), lora]
    rows = [2, 3, 4, 1, 1, 0, 2, 50, 0]
    cost = sj.byte_cost(forms, rows, D_IN, D_OUT, itemsize=2)
    assert cost["low rank"] == sj.Cost(
        2 * (3 * (D_IN + D_OUT) + D_OUT), 2 * 2 * (D_IN + 2 * D_OUT), 2
    )
    assert cost["vectors"] == sj.Cost(2 * D_OUT, 2 * 4 * 2 * D_OUT, 0)
    assert cost["input transform"] == sj.Cost(2 * D_IN * 4, 2 * 2 * sum(rows) * D_IN, 1)
    shared = rank * (D_IN + D_OUT) + 2 * (rank + D_OUT)  # the third tenant has no row
    assert cost["shared factors"] == sj.Cost(2 * shared, 2 * 2 * (D_IN + 2 * D_OUT), 3)
    assert cost["sparse"] == sj.Cost(13 * (2 + 4) + 4 * (D_OUT + 1), 2 * 2 * (13 + 2 * D_OUT), 1)
    assert set(cost) == {"low rank", "vectors", "input transform", "shared factors", "sparse"}


def test_a_route_that_no_row_needs_costs_nothing():
    forms = [sj.NormalForm(), random_form(RNG, D_IN, D_OUT, "s", block=4)]
    assert sj.byte_cost(forms, [5, 0], D_IN, D_OUT) == {}
    with pytest.raises(ValueError, match="one count per form"):
        sj.byte_cost(forms, [5], D_IN, D_OUT)


def test_every_pass_is_counted_and_fused_slices_share_their_launches():
    turned = sj.NormalForm(P=(random_blocks(RNG, D_IN, 4, 1), random_blocks(RNG, D_IN, 3, 2)))
    cost = sj.byte_cost([turned], [7], D_IN, D_OUT)["input transform"]
    assert cost == sj.Cost(2 * D_IN * (4 + 3), 2 * 2 * 2 * 7 * D_IN, 2)
    lora = random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 3)])
    site = sj.byte_cost([lora], [1], D_IN, D_OUT)
    assert fused([site, site, site]).launches == 2
    assert fused([site, site]).bytes == 2 * site["low rank"].bytes


def test_products_of_one_shape_share_their_launches():
    one, two = (random_kronecker(RNG, D_IN, D_OUT, *split) for split in ((4, 2), (6, 5)))
    forms = [sj.NormalForm(K=K) for K in ((one,), (one, one), (two,), (one,))]
    cost = sj.byte_cost(forms, [3, 1, 2, 0], D_IN, D_OUT)
    own = 3 * (4 * 2 + 6 * 5) + (6 * 5 + 4 * 2)  # the fourth tenant has no row
    rows = (3 + 1 + 2) * (D_IN + 2 * D_OUT)
    assert cost == {"kronecker": sj.Cost(2 * own, 2 * rows, 4)}


def test_a_norm_is_updated_in_float32_and_rounded_behind_it():
    d, rows = 6, [3, 2, 9, 0]
    forms = [random_form(RNG, d, d, "s"), random_form(RNG, d, d, "sb"), sj.NormalForm()]
    forms.append(forms[0])  # without a row
    (cost,) = sj.byte_cost(forms, rows, d, d, place="norm").values()
    assert cost == sj.Cost(2 * 3 * d, 8 * d * (3 + 2) + 8 * d * sum(rows), 2)
    cost = sj.byte_cost(forms, rows, d, d, itemsize=4, place="norm")
    assert cost == {"norm": sj.Cost(4 * 3 * d, 8 * d * (3 + 2), 1)}  # nothing to round
    sparse = sj.NormalForm(s=forms[0].s, S=random_sparse(RNG, d, d, 2))
    (cost,) = sj.byte_cost([sparse], [5], d, d, place="norm").values()
    assert cost == sj.Cost(
        2 * d + 2 * (2 + 4) + 4 * (d + 1), 5 * (8 * d + 4 * (2 + 2 * d) + 8 * d), 3
    )
    assert sj.byte_cost(forms, [0, 0, 7, 0], d, d, place="norm") == {}
    for form in (
        random_form(RNG, d, d, block=2),
        random_form(RNG, d, d, terms=[random_term(RNG, d, d, 2)]),
    ):
        with pytest.raises(ValueError, match=r"forms\[1\] has (R|terms): no slots of place='norm'"):
            sj.byte_cost([forms[0], form], [1, 1], d, d, place="norm")


def test_a_token_looks_up_its_own_row_of_a():
    vocab, d = 50, 6
    lora = sj.NormalForm(s=np.ones(d), terms=(random_term(RNG, vocab, d, 3),))
    forms, rows = [lora, lora, random_form(RNG, vocab, d, "b"), sj.NormalForm()], [3, 0, 2, 8]
    (cost,) = sj.byte_cost(forms, rows, vocab, d, place="embedding").values()
    assert cost == sj.Cost(2 * (3 * 3 + 3 * d + d) + 2 * d, 8 * d * (3 + 2), 2)
    cost = sj.byte_cost(forms[2:], rows[2:], vocab, d, place="embedding")
    assert cost == {"embedding": sj.Cost(2 * d, 8 * d * 2, 1)}
    pair = shared_pairs(vocab, d)[0]
    form = random_form(RNG, vocab, d, terms=[random_term(RNG, vocab, d, 0, "de", pair)])
    with pytest.raises(ValueError, match="has d, e, shared pairs: no slots of place='embedding'"):
        sj.byte_cost([form], [1], vocab, d, place="embedding")


def test_replaced_tokens_are_looked_up_and_multiplied_with():
    vocab, d, rows = 50, 6, [3, 2, 0, 8]
    four, two = (TokenRows(np.arange(k), np.ones((k, d))) for k in (4, 2))
    forms = [sj.NormalForm(rows=own) for own in (four, two, two, None)]
    cost = sj.byte_cost(forms, rows, vocab, d, place="embedding")
    assert cost == {"tokens": sj.Cost(4 * (4 + 2) + 2 * d * (3 + 2), 8 * d * (3 + 2), 2)}
    cost = sj.byte_cost(forms, rows, d, vocab)  # the head
    every = 2 * d + 4 * (4 + 2) + 8 * vocab  # x, the logits of all replaced tokens, a copy
    taken = 8 * (3 * 4 + 2 * 2)
    assert cost == {"tokens": sj.Cost((4 + 2) * (2 * d + 4), sum(rows) * every + taken, 3)}
    assert sj.byte_cost(forms, [0, 0, 0, 8], d, vocab) == {}


def test_time_is_bytes_over_bandwidth_and_launches():
    machine = sj.Machine("any", bandwidth=1e6, cache_bandwidth=4e6, cache_bytes=1000, launch=1e-6)
    assert sj.Cost(2000, 400, 3).seconds(machine) == pytest.approx(2e-3 + 1e-4 + 3e-6)
    assert sj.Cost(0, 800, 0).seconds(machine) == pytest.approx(8e-4)

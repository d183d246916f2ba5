"""The adapter bank: any sequence of inserts, replacements and evictions, one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import (
    evaluate_rows,
    extended_forms,
    normal,
    random_form,
    random_kronecker,
    random_term,
    shared_pairs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax import bank_pools
from scute_jax.apply import SiteParams
from scute_jax.bank import AdapterBank, BankFull
from scute_jax.capacity import capacity_for

D_IN, D_OUT, K = 24, 10, 3
RNG = np.random.default_rng(0)
W = normal(RNG, D_IN, D_OUT)
PAIRS = shared_pairs()
WIDTHS = {"q": (D_IN, D_OUT), "o": (D_OUT, D_IN)}


def adapter(form, version="v", site="q"):
    return sj.Adapter(sites={site: sj.fold(form)}, method="ANY", version=version)


def outputs(bank, ids, x):
    params = SiteParams(jnp.asarray(W), None, bank.slots["q"])
    return np.asarray(sj.apply_normal_form(params, jnp.asarray(x), sj.segments(ids, K)))


@given(st.lists(extended_forms(pairs=PAIRS), min_size=4, max_size=6), st.data())
@settings(max_examples=12, deadline=None)
def test_any_history_leaves_exactly_the_residents(pool, data):
    adapters = [adapter(form, str(i)) for i, form in enumerate(pool)]
    bank = AdapterBank(WIDTHS, capacity_for(adapters, K))
    resident: dict[int, int] = {}
    for _ in range(12):
        i = data.draw(st.sampled_from(sorted(set(range(len(pool))) - set(resident.values()))))
        action = data.draw(st.sampled_from(["insert", "replace", "clear"]))
        if action == "insert" and len(resident) < K:
            resident[bank.insert(adapters[i])] = i
        elif resident:
            slot = data.draw(st.sampled_from(sorted(resident)))
            if action == "clear":
                bank.clear(slot)
                del resident[slot]
            else:
                bank.replace(slot, adapters[i])
                resident[slot] = i
    there = [pool[resident[k]] if k in resident else sj.NormalForm() for k in range(K)]
    x, ids = normal(RNG, 12, D_IN), np.arange(12) % (K + 1) - 1
    expected = evaluate_rows(there, ids, W, x)
    if "q" in bank.slots:
        np.testing.assert_allclose(outputs(bank, ids, x), expected, atol=1e-4)


def test_exchanging_adapters_never_recompiles():
    pool = [
        random_form(RNG, D_IN, D_OUT, "sb", terms=[random_term(RNG, D_IN, D_OUT, 40)]),
        random_form(RNG, D_IN, D_OUT, block=4),
        random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 0, "de", PAIRS[0])]),
        random_form(RNG, D_IN, D_OUT, block=1),
        sj.NormalForm(K=(random_kronecker(RNG, D_IN, D_OUT, 4, 2),) * 2),
    ]
    adapters = [adapter(form, str(i)) for i, form in enumerate(pool)]
    bank = AdapterBank(WIDTHS, capacity_for(adapters, 2))
    step = jax.jit(
        lambda slots, x: sj.apply_normal_form(
            SiteParams(jnp.asarray(W), None, slots["q"]), x, sj.segments(np.array([0, 1, -1]), 2)
        )
    )
    x = jnp.asarray(normal(RNG, 3, D_IN))
    for a, b in ((0, 1), (2, 3), (4, 2), (3, 0)):
        slots = [bank.insert(adapters[a]), bank.insert(adapters[b])]
        expected = evaluate_rows([pool[a], pool[b]], [0, 1, -1], W, x)
        np.testing.assert_allclose(step(bank.slots, x), expected, atol=1e-4)
        for slot in slots:
            bank.clear(slot)
    assert step._cache_size() == 1


def test_nothing_of_an_evicted_adapter_is_left():
    evil = random_form(RNG, D_IN, D_OUT, "sb", block=4, terms=[random_term(RNG, D_IN, D_OUT, 20)])
    evil = jax.tree.map(lambda a: a * np.float32(np.nan), evil)
    good = random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 17)])
    bank = AdapterBank(WIDTHS, capacity_for([adapter(evil), adapter(good)], 1))
    bank.clear(bank.insert(adapter(evil)))
    x = normal(RNG, 6, D_IN)
    np.testing.assert_allclose(outputs(bank, np.zeros(6, int), x), x @ W, atol=1e-5)
    bank.insert(adapter(good))
    expected = evaluate_rows([good], np.zeros(6, int), W, x)
    np.testing.assert_allclose(outputs(bank, np.zeros(6, int), x), expected, atol=1e-4)


def test_a_refused_insert_or_replace_changes_nothing():
    small = random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 4)])
    large = random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 64)])
    bank = AdapterBank(WIDTHS, capacity_for([adapter(small)], 1))
    slot = bank.insert(adapter(small))
    x = normal(RNG, 6, D_IN)
    before = outputs(bank, np.zeros(6, int), x)
    with pytest.raises(BankFull, match="slots"):
        bank.insert(adapter(small))
    with pytest.raises(
        sj.AdapterError, match="q: the adapter takes 4 entries of factors .*grow the bank"
    ):
        bank.replace(slot, adapter(large))
    with pytest.raises(sj.AdapterError, match="down: the bank has no room at this site"):
        bank.replace(slot, adapter(small, site="down"))
    with pytest.raises(ValueError, match="slot 5 of the bank holds no adapter"):
        bank.clear(5)
    np.testing.assert_array_equal(outputs(bank, np.zeros(6, int), x), before)


def test_a_pair_is_there_once_however_many_share_it():
    veras = [
        adapter(
            random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, 0, "de", PAIRS[1])]),
            str(i),
        )
        for i in range(8)
    ]
    capacity = capacity_for(veras, 8)
    assert capacity.pairs == 1
    bank = AdapterBank(WIDTHS, capacity)
    for vera in veras:
        bank.insert(vera)
    pairs = bank.slots["q"].shared.pairs
    assert pairs.A.shape == (3, 16, D_IN)  # 37 ranks in pages of 16, once
    np.testing.assert_array_equal(np.asarray(pairs.A).reshape(-1, D_IN)[:37], PAIRS[1][1].T)


def test_capacity_holds_any_k_of_the_adapters():
    ranks = [1, 16, 17, 100, 40]
    pool = [
        adapter(random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, r)]))
        for r in ranks
    ]
    capacity = capacity_for(pool, 2)
    assert capacity.entries["q"]["factors"] == 7 + 3 and capacity.sizes["q"]["factors"] == 7
    assert capacity.covers(capacity_for(pool[:2], 2)) and not capacity_for(pool[:2], 2).covers(
        capacity
    )


def test_tenants_of_one_pair_bring_the_widths_that_others_left_out():
    """A pair is cut to the widths of the sites that use it; two tenants may use different sites."""
    A, B = normal(RNG, D_IN, 5), normal(RNG, 5, D_OUT)
    narrow, wide = ("p", A[:D_OUT], B), ("p", A, B)

    def vera(site, d_in, pair):
        term = random_term(RNG, d_in, D_OUT, 0, "de", pair)
        return adapter(random_form(RNG, d_in, D_OUT, terms=[term]), site, site)

    first, second = vera("o", D_OUT, narrow), vera("q", D_IN, wide)
    widths = {"q": (D_IN, D_OUT), "o": (D_OUT, D_OUT)}
    bank = AdapterBank(widths, capacity_for([first, second], 2))
    assert bank.capacity.pairs == 1
    bank.insert(first)
    slot = bank.insert(second)
    x, ids = normal(RNG, 5, D_IN), np.full(5, slot)
    params = SiteParams(jnp.asarray(W), None, bank.slots["q"])
    ours = sj.apply_normal_form(params, jnp.asarray(x), sj.segments(ids, 2))
    expected = evaluate_rows([second["q"]], np.zeros(5, int), W, x)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("action", ["insert", "replace", "clear"])
def test_a_bank_in_which_a_write_failed_halfway_is_lost(action, monkeypatch):
    """Books and tables may differ then: a slot that counts as free can still name an adapter."""
    forms = {s: random_form(RNG, *w, terms=[random_term(RNG, *w, 3)]) for s, w in WIDTHS.items()}
    both = sj.Adapter({site: sj.fold(form) for site, form in forms.items()}, "ANY", "v")
    bank = AdapterBank(WIDTHS, capacity_for([both] * K, K))
    bank.insert(both)
    assert not bank.lost
    write, calls = bank_pools._put_entries, iter(range(9))

    def stopped(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(bank_pools, "_put_entries", stopped)
    with pytest.raises(KeyboardInterrupt):
        if action == "insert":
            bank.insert(both)
        elif action == "replace":
            bank.replace(0, both)
        else:
            bank.clear(0)
    assert bank.lost


def test_what_is_resident_does_not_follow_the_callers_array():
    """Small entries are sent again with later writes of their layer, as they were."""
    own, second = np.ones(D_OUT, np.float32), normal(RNG, D_IN)
    first = sj.Adapter({"layers.0.q": sj.NormalForm(b=own)}, "ANY", "1")
    later = sj.Adapter({"layers.0.o": sj.NormalForm(b=second)}, "ANY", "2")
    widths = {f"layers.0.{site}": width for site, width in WIDTHS.items()}
    bank = AdapterBank(widths, capacity_for([first, later], K))
    bank.insert(first)
    own[:] = 7
    bank.insert(later)
    (values,) = {tuple(np.asarray(v)) for v in bank.slots["layers.0.q"].shift.values if v.any()}
    assert values == (1,) * D_OUT

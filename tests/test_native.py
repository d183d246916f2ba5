"""Adapters through Orbax and back: the same bits, the same identity."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from forms import extended_forms, random_form, random_term, shared_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax.native import restore_adapter, save_adapter

RNG = np.random.default_rng(0)


def adapter(*forms):
    sites = {f"layers.{i}.self_attn.q_proj": form for i, form in enumerate(forms)}
    return sj.Adapter(sites=sites, method="ANY", version="v1")


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@given(st.lists(extended_forms(pairs=shared_pairs()), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None)
def test_any_adapter_comes_back(tmp_path_factory, forms):
    written = adapter(*forms)
    path = tmp_path_factory.mktemp("native") / "a"
    save_adapter(written, path)
    same(restore_adapter(path), written)


def test_dtypes_and_device_arrays_come_back(tmp_path):
    form = random_form(RNG, 24, 10, "sb", block=4, terms=[random_term(RNG, 24, 10, 3)])
    half = jax.tree.map(lambda a: np.asarray(a).astype(ml_dtypes.bfloat16), form)
    written = adapter(form, half, jax.tree.map(jnp.asarray, form))
    save_adapter(written, tmp_path / "a")
    same(restore_adapter(tmp_path / "a"), written)


def test_what_is_there_is_not_overwritten_and_what_is_not_is_named(tmp_path):
    save_adapter(adapter(random_form(RNG, 24, 10, "s")), tmp_path / "a")
    with pytest.raises(sj.AdapterError, match="something already"):
        save_adapter(adapter(random_form(RNG, 24, 10, "s")), tmp_path / "a")
    with pytest.raises(sj.AdapterError, match="holds no adapter"):
        restore_adapter(tmp_path)

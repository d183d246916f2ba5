"""Norms, the embedding and replaced tokens of many adapters against the plain formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import evaluate, normal, random_form, random_term

import scute_jax as sj
from scute_jax.apply import apply_fused
from scute_jax.apply_embedding import apply_embedding
from scute_jax.apply_norm import apply_norm
from scute_jax.normal_form import Sparse, TokenRows
from scute_jax.slots import pack_site

VOCAB, D = 30, 12
RNG = np.random.default_rng(0)
E, WEIGHT = normal(RNG, VOCAB, D), normal(RNG, D)
IDS = np.array([2, -1, 0, 3, 1, 0, 4, 2, -1, 5, 3, 0, 1], np.int32)


def token_rows(*ids: int) -> TokenRows:
    return TokenRows(np.array(ids, np.int32), normal(RNG, len(ids), D))


def embeddings() -> list[sj.NormalForm]:
    def form(slots="", terms=(), rows=None):
        return random_form(RNG, VOCAB, D, slots, terms=terms).replace(rows=rows)

    return [
        form(terms=[random_term(RNG, VOCAB, D, 5)]),
        form(rows=token_rows(3, 7, 30, 31)),
        form("sb", [random_term(RNG, VOCAB, D, 18)], token_rows(5)),
        form(),
        form(rows=token_rows(7)),
        form("s"),
    ]


def poisoned(slots):
    """The slots with NaN in every place of the pools that no adapter uses."""
    tokens = slots.tokens
    unused = np.asarray(tokens.ids) < 0
    rows = jnp.where(unused[:, :, None], jnp.nan, tokens.rows)
    A = slots.factors.A.at[0, 5:].set(jnp.nan)
    factors = slots.factors.replace(A=A, B=slots.factors.B.at[0, 5:].set(jnp.nan))
    return slots.replace(tokens=tokens.replace(rows=rows), factors=factors)


@pytest.mark.parametrize("tile", [1, 16])
def test_the_embedding_of_each_row(tile: int):
    forms, token = embeddings(), RNG.integers(0, VOCAB, len(IDS)).astype(np.int32)
    token[[0, 4, 6, 7]] = 5, 31, 7, 3
    slots = poisoned(pack_site(forms, VOCAB, D, jnp.float32))
    seg = sj.segments(IDS, len(forms), tile=tile)
    ours = np.asarray(jax.jit(apply_embedding)(E, slots, token, seg))
    for row, (i, t) in enumerate(zip(IDS, token, strict=True)):
        form = sj.NormalForm() if i < 0 else forms[i]
        if form.rows is not None and t in form.rows.ids:
            expected = form.rows.rows[list(form.rows.ids).index(t)]
        else:
            expected = evaluate(form, E, np.eye(VOCAB)[t : t + 1])[0]
        np.testing.assert_allclose(ours[row], expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [1, 16])
def test_the_logits_of_each_row(tile: int):
    W, x = E.T.copy(), normal(RNG, len(IDS), D)

    def form(slots="", terms=(), rows=None):
        return random_form(RNG, D, VOCAB, slots, terms=terms).replace(rows=rows)

    forms = [
        form(terms=[random_term(RNG, D, VOCAB, 5)]),
        form(rows=token_rows(3, 7, 30, 31)),
        form("s", [random_term(RNG, D, VOCAB, 18)], token_rows(5)),
        form(),
        form(rows=token_rows(29)),
        form("b"),
    ]
    params = sj.site_params(jnp.asarray(W), forms)
    params = params.replace(slots=poisoned(params.slots))
    seg = sj.segments(IDS, len(forms), tile=tile)
    (wide,) = jax.jit(apply_fused)((params,), x, seg)
    ours = np.asarray(sj.apply_normal_form(params, x, seg))
    assert wide.shape == (len(IDS), VOCAB + 4) and ours.shape == (len(IDS), VOCAB)
    np.testing.assert_allclose(wide[:, :VOCAB], ours, rtol=1e-5, atol=1e-6)
    for row, i in enumerate(IDS):
        own = sj.NormalForm() if i < 0 else forms[i]
        expected = np.full(VOCAB + 4, -np.inf)
        expected[:VOCAB] = evaluate(own.replace(rows=None), W, x[row : row + 1])[0]
        if own.rows is not None:
            expected[own.rows.ids] = own.rows.rows @ x[row]
        np.testing.assert_allclose(wide[row], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("how", ["reference", "pallas"])
def test_the_norm_of_each_row(how: str):
    zeros = WEIGHT.copy()
    zeros[[2, 9]] = 0
    at = np.array([2, 9], np.int32)
    forms = [
        random_form(RNG, D, D, "s"),
        random_form(RNG, D, D, "sb").replace(S=Sparse(at, at, normal(RNG, 2))),
        sj.NormalForm(),
        random_form(RNG, D, D, "b"),
        sj.NormalForm(S=Sparse(at, at, normal(RNG, 2))),
        random_form(RNG, D, D, "s"),
    ]
    x = normal(RNG, len(IDS), D)
    slots = pack_site(forms, D, D, jnp.float32)
    run = jax.jit(partial(apply_norm, implementation=how))
    ours = np.asarray(run(x, zeros, slots, sj.segments(IDS, len(forms), tile=16)))
    for row, i in enumerate(IDS):
        form = sj.NormalForm() if i < 0 else forms[i]
        expected = evaluate(form, np.diag(zeros), x[row : row + 1])[0]
        np.testing.assert_allclose(ours[row], expected, rtol=2e-5, atol=2e-5)


def test_rows_under_another_adapter_are_not_stacked():
    first = sj.NormalForm(rows=token_rows(3))
    for second in (
        random_form(RNG, D, VOCAB, "s"),
        sj.NormalForm(terms=(random_term(RNG, D, VOCAB, 2),)),
    ):
        sj.stack(second, first)
        with pytest.raises(sj.AdapterError, match="put the one that replaces rows last"):
            sj.stack(first, second)


def test_what_the_forward_pass_does_not_compute_is_refused():
    from scute_jax.models.adapters import for_llama

    rotation = random_form(RNG, D, D, block=3)
    for site, form, message in (
        ("norm", rotation, "norm: its form has R"),
        ("layers.0.input_layernorm", rotation, "input_layernorm: its form has R"),
        ("embed_tokens", rotation, "embed_tokens: its form has R"),
        ("norm", sj.NormalForm(rows=token_rows(3)), "norm: its form has rows"),
        (
            "layers.0.mlp.up_proj",
            sj.NormalForm(rows=token_rows(3)),
            "rows replace tokens, and only",
        ),
    ):
        with pytest.raises(sj.AdapterError, match=message):
            for_llama(sj.Adapter({site: form}, method="ANY", version="1"))

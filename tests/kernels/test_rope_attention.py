"""Rope, the writes and attention in one, against the three steps of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_paged_rope import SHAPES, batch, row_by_row

from scute_jax.kernels import rope_attention


def attended(turned, k_pages, v_pages, table, start, rows):
    """Causal attention of each turned query over the pages of its sequence."""
    size, dh, hkv = len(turned) // len(table), turned.shape[2], k_pages.shape[1]
    out = np.full(turned.shape, np.nan)
    for i, own in enumerate(table):
        k, v = (p[own].swapaxes(1, 2).reshape(-1, hkv, dh) for p in (k_pages, v_pages))
        for j in range(rows[i]):
            end = start[i] + j + 1
            for head, q in enumerate(turned[i * size + j]):
                of_kv = head // (turned.shape[1] // hkv)
                score = k[:end, of_kv] @ q / dh**0.5
                share = np.exp(score - score.max())
                out[i * size + j, head] = share @ v[:end, of_kv] / share.sum()
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["pallas", "reference"])
def test_what_is_attended_and_written(name, split, dtype, how):
    args = batch(name, dtype, split)
    exact = jax.tree.map(lambda a: np.asarray(a, None if a.dtype == "int32" else np.float64), args)
    turned, *pages = row_by_row(*exact)
    expected = attended(turned, *pages, *exact[-3:])
    ours = rope_attention(*args, implementation=how)
    there = ~np.isnan(expected)
    assert [a.dtype for a in ours] == [dtype] * 3 and there.any() and not there.all()
    error = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    np.testing.assert_allclose(np.asarray(ours[0], np.float64)[there], expected[there], atol=error)
    for a, b in zip(ours[1:], pages, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("how", ["pallas", "reference"])
def test_what_nobody_wrote_may_hold_anything(how):
    qkv, k_pages, v_pages, *rest = batch("decoding", "float32", False)
    table, start, rows = map(np.asarray, rest[-3:])
    page = k_pages.shape[2]
    bad_k, bad_v = np.asarray(k_pages).copy(), np.asarray(v_pages).copy()
    for i, own in enumerate(table):
        for position in range(start[i], len(own) * page):
            place = own[position // page], slice(None), position % page
            bad_k[place], bad_v[place] = np.nan, np.inf
    pages = map(jnp.asarray, (bad_k, bad_v))
    clean = rope_attention(qkv, k_pages, v_pages, *rest, implementation=how)[0]
    again = rope_attention(qkv, *pages, *rest, implementation=how)[0]
    assert rows.any() and np.isfinite(np.asarray(clean)[rows > 0]).all()
    np.testing.assert_array_equal(np.asarray(again)[rows > 0], np.asarray(clean)[rows > 0])

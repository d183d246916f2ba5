"""Turning and writing in one kernel, against the definition and a loop over rows in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import normal

from scute_jax.kernels.paged_rope import pallas_triton, reference

PARTS = (1, 3, 2)  # of q, k and v
INTERPRETED = jax.default_backend() != "gpu"
TWINS = {
    "pallas": partial(pallas_triton.paged_rope, interpret=INTERPRETED),
    "reference": reference.paged_rope,
}
SHAPES = {  # blocks, tokens of a block, hq, hkv, dh, page
    "decoding": (9, 1, 8, 2, 16, 4),
    "a group of three": (7, 1, 9, 3, 64, 16),
    "narrow heads": (5, 1, 6, 6, 12, 16),
    "prefill": (4, 24, 6, 2, 20, 16),
}


def batch(name, dtype, split):
    """Arguments whose blocks are empty, part full and full, and whose pages are in no order."""
    n, size, hq, hkv, dh, page = SHAPES[name]
    rng, width = np.random.default_rng(0), 6
    start = rng.integers(0, width * page - size + 1, n)
    rows = rng.integers(0, size + 1, n)
    rows[:2] = 0, size
    start[1] = width * page - size  # to the very end of the last page
    table = rng.permutation(n * width).reshape(n, width)
    angle = (start[:, None] + np.arange(size)).reshape(-1, 1) * 0.3 ** np.arange(dh // 2)
    if split:
        heads = zip(PARTS, (hq, hkv, hkv), strict=True)
        qkv = tuple(jnp.asarray(normal(rng, parts, n * size, h, dh)) for parts, h in heads)
    else:
        qkv = (jnp.asarray(normal(rng, 1, n * size, hq + 2 * hkv, dh)),)
    pages = [jnp.asarray(normal(rng, n * width, hkv, page, dh), dtype) for _ in range(2)]
    waves = [jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin)]
    return qkv, *pages, *waves, *(jnp.asarray(a, jnp.int32) for a in (table, start, rows))


def row_by_row(qkv, k_pages, v_pages, cos, sin, table, start, rows):
    """The same in float64, one token after the other; queries that are not there are nan."""
    hkv = k_pages.shape[1]
    q, k, v = np.split(
        np.concatenate([parts.sum(0) for parts in qkv], axis=1), (-2 * hkv, -hkv), axis=1
    )
    size, half, page = len(q) // len(table), q.shape[2] // 2, k_pages.shape[2]
    turned, k_pages, v_pages = np.full(q.shape, np.nan), k_pages.copy(), v_pages.copy()
    for i, own in enumerate(table):
        for j in range(rows[i]):
            row, position = i * size + j, start[i] + j
            wave = cos[row] + 1j * sin[row]
            to = own[position // page], slice(None), position % page
            v_pages[to] = v[row]
            for x, out in ((q[row], turned[row]), (k[row], k_pages[to])):
                z = (x[:, :half] + 1j * x[:, half:]) * wave
                out[:, :half], out[:, half:] = z.real, z.imag
    return turned, k_pages, v_pages


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", ["pallas", "reference"])
def test_rows_are_turned_and_written(name, dtype, split, how):
    args = batch(name, dtype, split)
    exact = jax.tree.map(lambda a: np.asarray(a, None if a.dtype == "int32" else np.float64), args)
    expected = row_by_row(*exact)
    ours = TWINS[how](*args)
    there = ~np.isnan(expected[0])
    assert [a.dtype for a in ours] == [dtype] * 3 and there.any() and not there.all()
    error = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for a, b, mask in zip(ours, expected, (there, ..., ...), strict=True):
        a = np.asarray(a, np.float64)
        np.testing.assert_allclose(a[mask], b[mask], rtol=error, atol=1e-6)
    written = np.asarray(ours[1] != args[1]).any(axis=(1, 3)).sum()
    assert written == np.asarray(args[-1]).sum()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_has_the_bits_of_the_definition(name, dtype):
    args = batch(name, dtype, False)
    ours, expected = (jax.jit(twin)(*args) for twin in TWINS.values())
    there = ~np.isnan(row_by_row(*jax.tree.map(np.asarray, args))[0])
    np.testing.assert_array_equal(np.asarray(ours[0])[there], np.asarray(expected[0])[there])
    for a, b in zip(ours[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

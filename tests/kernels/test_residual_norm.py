"""The residual stream and its norm: both implementations against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from forms import normal

from scute_jax.kernels import residual_norm


@pytest.mark.parametrize("t, d, parts", [(1, 24, 1), (5, 576, 24), (3, 256, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["pallas", "reference"])
def test_a_row_is_added_and_normalised(t, d, parts, dtype, how):
    rng, eps = np.random.default_rng(0), 1e-2
    x, added = 0.2 * normal(rng, t, d), 0.2 * normal(rng, parts, t, d)
    weight = jnp.asarray(normal(rng, d), dtype if parts > 1 else "float32")
    y, h = residual_norm(*map(jnp.asarray, (x, added)), weight, eps, dtype, implementation=how)
    assert (y.dtype, h.dtype) == ("float32", dtype)
    expected = np.float64(x) + np.float64(added).sum(axis=0)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    scaled = expected / np.sqrt((expected**2).mean(axis=1, keepdims=True) + eps)
    error = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    expected = scaled * np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(h, np.float64), expected, rtol=error, atol=1e-5)

"""Normal random numbers against torch itself: fewer than sixteen, whole groups, and a last one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_jax.peft.torch_normal import torch_normal

torch = pytest.importorskip("torch", reason="torch is the oracle of its own random numbers")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(2**63), 2**64 - 1),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.floats(0.01, 3),
)
def test_normal_numbers_are_those_of_torch(seed, shape, std):
    generator = torch.Generator().manual_seed(seed)
    theirs = torch.normal(mean=0.0, std=std, size=shape, generator=generator).numpy()
    ours = torch_normal(seed, shape, std)
    assert ours.dtype == np.float32 and ours.shape == shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())

"""Torch's generator without torch: bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_jax.peft.torch_random import TorchGenerator

REASON = "the oracle is torch, which is not installed here"


def test_a_known_draw():
    """torch.empty(4).uniform_(-1, 1, generator=torch.Generator().manual_seed(0)), torch 2.13."""
    drawn = TorchGenerator(0).uniform((4,), -1.0, 1.0)
    expected = ["-0x1.eaa8p-8", "0x1.12a8bcp-1", "-0x1.a5662cp-1", "-0x1.78cdp-1"]
    assert drawn.dtype == np.float32
    assert [float(v).hex() for v in drawn] == [float.fromhex(e).hex() for e in expected]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100)),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    high=st.floats(0.0078125, 8, width=32),
    around=st.booleans(),
)
def test_uniform_is_torch_s(seed, shape, high, around):
    torch = pytest.importorskip("torch", reason=REASON)
    generator = torch.Generator("cpu").manual_seed(seed)
    ours = TorchGenerator(seed)
    low = -high if around else 0.0
    for _ in range(2):  # the second draw goes on where the first ended
        theirs = torch.empty(shape).uniform_(low, high, generator=generator).numpy()
        assert np.array_equal(ours.uniform(shape, low, high), theirs)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("r", "d_in", "d_out"), [(1, 1, 1), (3, 48, 80), (256, 576, 1536)])
def test_projections_are_those_of_peft(seed, r, d_in, d_out):
    torch = pytest.importorskip("torch", reason=REASON)
    pytest.importorskip("peft.tuners", reason=REASON)
    from peft.tuners.vera.model import _kaiming_init

    generator = torch.Generator("cpu").manual_seed(seed)
    ours = TorchGenerator(seed)
    for shape in ((r, d_in), (d_out, r)):
        assert np.array_equal(
            ours.kaiming_uniform(shape), _kaiming_init(shape, generator=generator).numpy()
        )


@pytest.mark.parametrize("seed", [0, 777, -3, 2**40 + 5])
@pytest.mark.parametrize("n", [1, 2, 3, 100, 9999])
def test_permutations(n: int, seed: int):
    torch = pytest.importorskip("torch", reason="torch is the oracle of its own random numbers")
    whole = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    for count in {1, (n + 1) // 2, n}:
        assert (TorchGenerator(seed).permutation(n, count) == whole[:count]).all()

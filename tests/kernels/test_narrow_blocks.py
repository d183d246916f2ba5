"""Rotations in blocks narrower than a tensor-core product, where blocks straddle programs."""

import jax.numpy as jnp
import numpy as np
import pytest
from forms import normal

from scute_jax.kernels import block_rotate
from scute_jax.kernels.pools import Rotation
from scute_jax.kernels.tiles import make_tiles

SLOTS = np.array([-1, -1, 0, 0, 0, 0, 0, 1, 2, 2, 3])  # adapter 1 turns nothing
ROW = np.array([1, -1, 0, 2])  # and 3 has numbers that are none


def case(m: int, ordered: bool, dtype: str, pool: str):
    rng, d = np.random.default_rng(m), 600 // m * m
    R = 0.3 * normal(rng, 3, d // m, m, m)
    R[2] = np.nan
    order = rng.permutation(d) if ordered else np.arange(d)
    x, R = jnp.asarray(normal(rng, len(SLOTS), d), dtype), jnp.asarray(R, pool)
    rotation = Rotation(R, jnp.asarray(ROW), jnp.asarray(order) if ordered else None)
    expected = np.array(x, np.float64)
    for t, k in enumerate(SLOTS):
        if k >= 0 and ROW[k] >= 0:
            row = np.float64(x[t])[order].reshape(-1, m)
            turned = np.einsum("jp,jpq->jq", row, np.float64(R[ROW[k]]))
            expected[t, order] += turned.reshape(-1)
    return x, rotation, expected


@pytest.mark.parametrize(
    "m, ordered, dtype, pool",
    [
        (2, True, "float32", "bfloat16"),
        (3, False, "float32", "float32"),
        (5, True, "bfloat16", "bfloat16"),
        (7, False, "float16", "float16"),
        (15, True, "float32", "float32"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_narrow_blocks_are_the_formula(m, ordered, dtype, pool, size):
    x, rotation, expected = case(m, ordered, dtype, pool)
    slot = jnp.asarray(SLOTS, jnp.int32)
    tiles = make_tiles(slot, len(ROW), size)
    (y,) = block_rotate((x,), (rotation,), tiles, slot, implementation="pallas")
    assert y.dtype == x.dtype
    rounding = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    sound = SLOTS < 3
    error = np.abs(np.float64(y) - expected)[sound]
    assert (error <= rounding * np.abs(expected[sound]) + 2e-6).all()
    assert np.isnan(np.asarray(y)[~sound]).all()
    untouched = (SLOTS < 0) | (SLOTS == 1)
    np.testing.assert_array_equal(np.asarray(y)[untouched], np.asarray(x)[untouched])


def test_a_row_turns_alike_beside_other_rows():
    x, rotation, _ = case(5, False, "float32", "float32")

    def turn(x, slots):
        slot = jnp.asarray(slots, jnp.int32)
        tiles = make_tiles(slot, 4, 8)
        return block_rotate((x,), (rotation,), tiles, slot, implementation="pallas")[0]

    first = turn(x, SLOTS)
    alone = turn(jnp.roll(x, 3, axis=0).at[3:8].set(x[2:7]), [0] * 8 + [2] * 3)
    np.testing.assert_array_equal(np.asarray(alone)[3:8], np.asarray(first)[2:7])

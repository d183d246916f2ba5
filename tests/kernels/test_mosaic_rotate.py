"""The input transform on Mosaic GPU: its numbers where jax can interpret it, and its lowering.

Entries of R that no adapter uses hold NaN, and one adapter turns its rows into NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import normal
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from scute_jax.kernels import mosaic
from scute_jax.kernels.block_rotate import pallas, reference
from scute_jax.kernels.block_rotate.tile import RotateTile
from scute_jax.kernels.pools import Rotation
from scute_jax.kernels.tiles import make_tiles
from scute_jax.segments import block_segments

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
NARROW = RotateTile(columns=64, mosaic=True)
SORTED = np.repeat([-1, 0, 1, 2, 3, 4], [7, 70, 13, 0, 1, 64])
BLOCKS = [3, -1, 0, 1], [64, 0, 13, 40]  # adapters of blocks of rows, and how many rows they have
ROW = np.array([1, -1, 3, 2, 0])  # adapter 1 turns nothing, and entry 2 is NaN


def batch(layout):
    """Tiles, and the adapter of each row."""
    if layout == "sorted":
        slot = jnp.asarray(SORTED, jnp.int32)
        return make_tiles(slot, len(ROW), 64), slot
    seg = block_segments(*(jnp.asarray(a, jnp.int32) for a in BLOCKS), 64, len(ROW))
    return seg.tiles, seg.slot


def arrays(layout, m, dtype):
    """The arguments of the transform, of two slices."""
    rng, (tiles, slot) = np.random.default_rng(0), batch(layout)
    d = max(m, 64) + m

    def rows():
        x = normal(rng, slot.shape[0], d)
        x[slot < 0, 3] = x[slot == 1, 0] = np.nan
        return jnp.asarray(x, dtype)

    def rotation(row):
        R = 0.3 * normal(rng, 4, d // m, m, m)
        R[2] = np.nan
        return Rotation(jnp.asarray(R, dtype), jnp.asarray(row, jnp.int32))

    return (rows(), rows()), (rotation(ROW), rotation(ROW[::-1])), tiles, slot


def lowered(args, tile) -> str:
    with use_abstract_mesh(AbstractMesh((1,), ("one",), abstract_device=H200)):
        traced = jax.jit(lambda *a: pallas.block_rotate(*a, tile)).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_it_lowers(m, dtype):
    assert "mosaic_gpu" in lowered(arrays("sorted", m, dtype), NARROW)


@pytest.mark.skipif(mosaic.INTERPRETER is None, reason="this jax cannot interpret Mosaic GPU")
@pytest.mark.parametrize(
    "layout, m, dtype",
    [
        ("sorted", 16, "bfloat16"),
        ("sorted", 32, "bfloat16"),
        ("blocks", 32, "float16"),
        ("blocks", 64, "bfloat16"),
        ("sorted", 128, "bfloat16"),
    ],
)
def test_against_the_definition(layout, m, dtype):
    xs, rotation, tiles, slot = arrays(layout, m, dtype)
    ours = pallas.block_rotate(xs, rotation, tiles, slot, NARROW, interpret=True)
    for y, x, R in zip(ours, xs, rotation, strict=True):
        expected = np.asarray(reference.block_rotate(x, R, tiles), np.float64)
        y = np.asarray(y, np.float64)
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(y), nan)
        bound = 2**-7 if dtype == "bfloat16" else 2**-10  # one step of the output
        assert (np.abs(y - expected)[~nan] <= bound * np.abs(expected[~nan]) + 2e-6).all()


def test_triton_takes_what_mosaic_does_not():
    def backends(xs, rotation, tiles, slot, **changes):
        own = tuple(R.replace(**changes) for R in rotation)
        text = lowered((xs, own, tiles, slot), RotateTile(mosaic=True))
        return "triton" in text, "mosaic_gpu" in text

    xs, rotation, tiles, slot = args = arrays("sorted", 32, "bfloat16")
    values, order = rotation[0].values, jnp.arange(xs[0].shape[1], dtype=jnp.int32)
    assert backends(*args) == (False, True)
    assert backends(*args, values=values.astype(jnp.float32)) == (True, False)
    assert backends(*args, values=jnp.zeros((4, 12, 8, 8), xs[0].dtype)) == (True, False)
    assert backends(*args, order=order) == (True, False)
    assert backends(*arrays("sorted", 32, "float32")) == (True, False)
    assert backends(xs, rotation, make_tiles(slot, len(ROW), 16), slot) == (True, False)
    assert "mosaic_gpu" not in lowered(args, RotateTile())

"""The arrays of a bank: entries of any dtype and size arrive where they belong, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax import bank_pools
from scute_jax.bank_pools import Pools

SITES = ("layers.0.q", "layers.0.up", "layers.1.q", "layers.1.up", "lm_head")
WIDTHS = {"q": 7, "up": 3, "lm_head": 40_001}  # odd ones, and one whose entry travels by itself


def pools(dtype) -> tuple[Pools, dict]:
    """Scales of every site (three entries, two slots) as a bank makes them, and copies of them."""
    arrays = {}
    for site in SITES:
        width = WIDTHS[site.rpartition(".")[2]]
        arrays[site, "scale/values"] = jnp.zeros((3, width), dtype)
        arrays[site, "scale/row"] = jnp.full((2,), -1, jnp.int32)
    copies = {key: np.array(array) for key, array in arrays.items()}
    return Pools(arrays.items(), {site: (5, 5) for site in SITES}), copies


def read(made: Pools) -> dict:
    slots = made.read(made.view(lambda site, slots: slots))
    found = {(site, "scale/values"): slots[site].scale.values for site in slots}
    return found | {(site, "scale/row"): slots[site].scale.row for site in slots}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_entries_arrive_in_their_arrays_and_nothing_else_changes(dtype):
    made, expected = pools(dtype)
    rng = np.random.default_rng(1)
    for _ in range(6):
        writes = {}
        for key in expected:
            count = rng.integers(0, 3)
            for index in rng.permutation(len(expected[key]))[:count]:
                if key[1] == "scale/row":
                    value = int(rng.integers(-1, 3))
                    expected[key][index] = value
                else:
                    width = expected[key].shape[1]
                    value = np.float32(rng.normal(size=rng.integers(width // 2, width + 1)))
                    expected[key][index] = np.pad(value, (0, width - len(value)))
                writes.setdefault(key, []).append((int(index), value))
        made.put(writes)
        found = read(made)
        assert set(found) == set(expected)
        for key, array in expected.items():
            assert found[key].dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(found[key]), array, err_msg=str(key))


def test_layers_that_are_alike_share_one_program():
    jax.clear_caches()
    made, _ = pools("float32")
    made.warm_up()
    programs = bank_pools._put_entries._cache_size()
    assert programs == 2  # one for the layers, and one for the head
    made.put({(site, "scale/row"): [(0, 1)] for site in SITES})
    assert bank_pools._put_entries._cache_size() == programs
    assert all(array[0] == 1 for key, array in read(made).items() if key[1] == "scale/row")


def test_a_view_has_the_sites_of_which_something_is_kept():
    made, _ = pools("float32")
    view = made.view(lambda site, slots: slots if site == "lm_head" else type(slots)())
    assert set(made.read(view)) == {"lm_head"}


def test_a_write_that_took_an_array_with_it_shows():
    made, _ = pools("float32")
    assert not made.lost
    next(iter(read(made).values())).delete()
    assert made.lost

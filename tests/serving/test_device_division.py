"""How the memory of a device is divided between weights, adapters and the KV cache."""

import gc

import jax
import pytest
from lora_engine import ask, base, lora, new_engine, tokens

from scute_jax.models.errors import ModelError
from scute_jax.serving import Engine, EngineOptions, OutOfDeviceMemory
from scute_jax.serving.options import ACTIVATION_SHARE, GPU_SHARE

LIMIT = 800_000
SHARE = GPU_SHARE - ACTIVATION_SHARE


def live() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


class Device:
    """A device of LIMIT bytes that holds the weights and what was made since."""

    def __init__(self):
        self.weights = sum(leaf.nbytes for leaf in jax.tree.leaves(base()[1]))
        self.before = live()

    @property
    def used(self) -> int:
        return self.weights + live() - self.before

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": LIMIT, "bytes_in_use": self.used}


@pytest.fixture
def device(monkeypatch) -> Device:
    base()
    gc.collect()  # or engines of tests before would go in the middle of this one
    made = Device()
    monkeypatch.setattr(jax, "local_devices", lambda: [made])
    return made


def engine(**given) -> Engine:
    config, params = base()
    shapes = {"max_adapters": 3, "prefill_blocks": (2,), "decode_rows": (4,), "steps": 4}
    return Engine(config, params, None, EngineOptions(**(shapes | given)))


def cache_bytes(served: Engine) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(served._parts.runner._cache))


def test_the_cache_takes_what_weights_and_registered_adapters_leave(device):
    served = engine()
    for seed in range(3):
        served.add_adapter(f"t{seed}", lora(seed, rank=64, scale=0.1))
    tokens(served.generate([ask(f"t{seed}") for seed in range(3)]))
    bank, cache = served._residency.nbytes, cache_bytes(served)
    assert bank > 3 * 64 * 248 * 4
    assert device.weights + bank + cache <= SHARE * LIMIT
    assert device.weights + bank + cache > 0.98 * SHARE * LIMIT
    device.before = live()  # as if the device were empty but for the weights
    assert cache_bytes(engine()) > cache + bank // 8


def test_adapters_of_rank_16_find_room_however_late_they_come(device):
    served = engine()
    tokens(served.generate([ask()]))
    cache = cache_bytes(served)
    for seed in range(3):
        served.add_adapter(f"t{seed}", lora(seed, rank=16))
    tokens(served.generate([ask(f"t{seed}") for seed in range(3)]))
    assert served._residency.nbytes > 0 and cache_bytes(served) == cache
    assert device.weights + served._residency.nbytes + cache <= SHARE * LIMIT


def test_a_cache_of_stated_bytes_is_as_large_as_stated(device):
    served = engine(memory=150_000)
    served.add_adapter("t", lora(0, rank=64, scale=0.1))
    tokens(served.generate([ask("t")]))
    assert 150_000 - 3072 < cache_bytes(served) <= 150_000


def test_adapters_that_leave_no_cache_cost_their_own_requests_only(device):
    served = engine(memory=0.5)
    served.add_adapter("t", lora(0, rank=160, scale=0.01))
    own, other = served.generate([ask("t"), ask()])
    assert own.finish_reason == "error" and "which leaves none for a KV cache" in own.error
    assert "fewer adapters at a time" in own.error
    assert tokens([other]) == tokens(new_engine().generate([ask()]))
    with pytest.raises(ModelError, match="for the KV cache"):
        engine(memory=0.2)


def test_a_bank_that_does_not_fit_costs_its_own_requests_only(monkeypatch):
    served = new_engine()
    served.add_adapter("t", lora(0))

    def no_room(capacity):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(served._residency, "_rebuild", no_room)
    own, other = served.generate([ask("t"), ask()])
    assert own.finish_reason == "error" and "max_adapters=" in own.error
    assert tokens([other])


def test_a_cache_that_does_not_fit_says_so(monkeypatch):
    served = new_engine()

    def no_room(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("scute_jax.models.cache.KVCache.create", no_room)
    with pytest.raises(OutOfDeviceMemory, match="KV cache of 128 pages; give it less"):
        served.warm_up()
    monkeypatch.undo()
    assert tokens(served.generate([ask()]))


def test_nothing_is_divided_before_it_is_needed():
    served = new_engine()
    served.add_adapter("t", lora(0))
    served.step()
    served.cancel_waiting()
    stats = served.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0 and set(stats.adapters) == {
        None,
        "t",
    }
    assert not served.busy and served._opened is None
    served.submit(ask("t"))
    assert served.busy and served._opened is not None

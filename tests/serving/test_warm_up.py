"""Compilations: all of them in the warm-up; figures; registration that stays flat."""

import time

import numpy as np
from lora_engine import ask, lora, new_engine, tokens

from scute_jax import Adapter, NormalForm
from scute_jax.capacity import capacity_for
from scute_jax.identity import content_version


def scales(seed: int) -> Adapter:
    """An (IA)3-like adapter."""
    s = np.float32(1 + 0.3 * np.random.default_rng(seed).normal(size=24))
    sites = {"layers.0.self_attn.v_proj": NormalForm(s=s)}
    return Adapter(sites, "IA3", content_version([f"scales {seed}"]))


def compiled(engine, requests) -> int:
    before = engine.stats().compilations
    tokens(engine.generate(requests))
    return engine.stats().compilations - before


def everything(names) -> list:
    """Requests of every kind of sampling for each adapter."""
    kinds = [{}, {"temperature": 0.8}, {"logprobs": 2}, {"prompt_logprobs": 0}]
    kinds += [{"temperature": 1.0, "top_k": 5, "prompt_logprobs": 3}]
    return [ask(n, 5 + 7 * i, 6, i, **kind) for i, n in enumerate(names) for kind in kinds]


def test_nothing_compiles_after_the_warm_up():
    engine = new_engine()
    engine.add_adapter("a", lora(0))
    engine.add_adapter("s", scales(0))
    said = []
    engine.warm_up(lambda done, total, what: said.append((done, total, what)))
    assert [done for done, _, _ in said] == list(range(said[0][1] + 1))
    assert any("decode of 4 rows" in what and "factors" in what for _, _, what in said)
    assert engine.stats().compilations > 0
    assert compiled(engine, everything([None, "a", "s"])) == 0
    for request in everything([None, "a", "s"]):
        assert compiled(engine, [request]) == 0


def test_an_adapter_that_fits_never_compiles_anything():
    engine = new_engine()
    engine.add_adapter("first", lora(0, rank=16))
    engine.warm_up()
    for seed in range(1, 8):  # more than fit, of ranks up to that of the first
        engine.add_adapter(f"t{seed}", lora(seed, rank=2 * seed))
        assert compiled(engine, everything(["first", f"t{seed}"])) == 0
    engine.add_adapter("first", lora(50, rank=3))
    engine.remove_adapter("t3")
    assert compiled(engine, everything(["first", "t1", "t2", "t4"])) == 0
    assert compiled(engine, [ask(["first", "t1"]), ask("t2", scale=0.5)]) == 0


def test_all_slots_hold_adapters_that_came_one_by_one():
    engine = new_engine()
    for seed in range(3):
        engine.add_adapter(f"t{seed}", lora(seed, rank=40))
        tokens(engine.generate([ask(f"t{seed}")]))
    assert engine.stats().slots_used == 3 and engine.stats().loads == 3


def test_a_warm_up_leaves_requests_in_flight_alone():
    engine = new_engine()
    engine.add_adapter("a", lora(0))
    request = ask("a", tokens=30)
    (expected,) = tokens(engine.generate([request]))
    stream = engine.stream([request])
    next(stream)
    engine.warm_up()
    assert list(stream)[-1].completion.token_ids == expected


def test_the_bank_grows_a_few_times_however_many_adapters_are_larger_than_those_before():
    engine = new_engine(max_adapters=4)
    shapes = set()
    for rank in range(1, 257, 5):
        engine.add_adapter(f"r{rank}", lora(rank, rank=rank, scale=0.5 / rank))
        engine._residency.prepare()
        capacity = engine._residency._bank.capacity
        shapes.add(str((capacity.entries, capacity.sizes)))
        largest = [lora(0, rank=r) for r in range(max(1, rank - 15), rank + 1, 5)]
        assert capacity.covers(capacity_for(largest, 4))
    assert len(shapes) <= 8


def test_the_thousandth_adapter_costs_what_the_tenth_costs():
    engine = new_engine()
    seconds = []
    adapters = [lora(seed) for seed in range(1000)]
    for i, adapter in enumerate(adapters):
        began = time.perf_counter()
        engine.add_adapter(f"t{i}", adapter)
        seconds.append(time.perf_counter() - began)
    assert np.median(seconds[-100:]) < 3 * np.median(seconds[10:110])


def test_figures_of_adapters_pages_and_slots():
    engine = new_engine(pages=60)
    for seed in range(4):
        engine.add_adapter(f"t{seed}", lora(seed))
    requests = [ask(f"t{i % 3}", 20, 9, i) for i in range(6)] + [ask(length=600), ask(["t0", "t1"])]
    tickets = [engine.submit(request) for request in requests]
    engine.step()
    during = engine.stats()
    assert during.running == 4 and during.waiting == 3
    assert sum(a.running for a in during.adapters.values()) == 4
    assert sum(a.waiting for a in during.adapters.values()) == 3
    assert during.pages_used > 0 and during.slots_used == 3 - during.slots_free > 0
    while engine.busy:
        engine.step()
    after = engine.stats()
    assert all(ticket.sink.take().completion for ticket in tickets)
    assert after.pages_used == after.running == after.waiting == 0
    assert after.pages_free + after.pages_idle == 60 and after.pages_idle > 0
    assert after.adapters["t0"].tokens == 18 and after.adapters["t0"].finished == 2
    assert after.adapters["t0"].seconds_to_first_token > after.adapters["t0"].seconds_per_token > 0
    assert after.adapters["t3"].resident == "host" and after.adapters["t3"].slot is None
    assert after.adapters[None].resident == "device" and after.adapters[None].tokens == 0
    assert after.adapters["t0", "t1"].tokens == 10
    on_device = [a for a in after.adapters.values() if a.slot is not None]
    assert len(on_device) == after.slots_used == 3
    assert after.compilations > 0 and after.loads >= 4
    engine.remove_adapter("t0")
    assert "t0" not in engine.stats().adapters and ("t0", "t1") not in engine.stats().adapters

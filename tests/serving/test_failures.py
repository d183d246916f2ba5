"""When things go wrong: device memory, poisoned adapters, cancels, removals; others go on."""

import jax
import numpy as np
import pytest
from lora_engine import alone, ask, lora, new_engine, tokens

from scute_jax import Adapter, AdapterError, NormalForm, bank_pools
from scute_jax.bank import AdapterBank
from scute_jax.serving import OutOfDeviceMemory
from scute_jax.serving import engine as engine_module

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nmore"


def three(**options):
    engine = new_engine(**options)
    for seed in range(3):
        engine.add_adapter(f"t{seed}", lora(seed))
    return engine


def requests(count: int = 8):
    names = ("t0", "t1", None, "t2")
    return [ask(names[i % 4], 5 + 3 * i, 12, i) for i in range(count)]


def clean(engine) -> bool:
    """Whether nothing is left behind."""
    stats = engine.stats()
    return stats.pages_used == stats.running == stats.waiting == 0 and not engine.busy


class Failing:
    """A step that runs out of memory at some of its calls, and takes its donated cache with it."""

    def __init__(self, step, fails, lost=True):
        self.step, self.fails, self.lost, self.calls = step, fails, lost, 0

    def __call__(self, params, slots, cache, rows, plan, **how):
        self.calls += 1
        if self.fails(self.calls):
            if self.lost:
                jax.tree.map(lambda array: array.delete(), (cache, rows))
            raise jax.errors.JaxRuntimeError(FULL)
        return self.step(params, slots, cache, rows, plan, **how)


@pytest.mark.parametrize("which", ["_prefill", "_decode"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_ran_out_of_memory_is_done_again(which, ahead):
    engine = three(ahead=ahead)
    expected = alone(three(), requests())
    step = getattr(engine._parts.runner, which)
    setattr(engine._parts.runner, which, Failing(step, lambda call: call in (2, 5, 9)))
    assert tokens(engine.generate(requests())) == expected
    assert engine.stats().out_of_memory >= 2 and engine.stats().preemptions > 0
    assert clean(engine)
    tokens(engine.generate(requests()))
    assert engine._parts.scheduler.allowed == engine._parts.scheduler.limits.rows


def test_where_memory_never_suffices_each_request_says_so_and_the_engine_lives_on():
    engine = three()
    step = engine._parts.runner._decode
    engine._parts.runner._decode = Failing(step, lambda call: True, lost=False)
    for completion in engine.generate(requests(5)):
        assert completion.finish_reason == "error"
        assert "ran out of memory while this request ran" in completion.error
        assert "memory=" in completion.error and "allocate 123 bytes" in completion.error
    assert clean(engine)
    engine._parts.runner._decode = step
    assert tokens(engine.generate(requests())) == alone(three(), requests())


def test_a_second_failure_in_a_row_costs_one_request_and_no_other():
    engine = three()
    step = engine._parts.runner._decode
    engine._parts.runner._decode = Failing(step, lambda call: call in (2, 3))
    completions = engine.generate(requests(4))
    failed = [i for i, c in enumerate(completions) if c.finish_reason == "error"]
    assert len(failed) == 1 and failed != [0], "the first to arrive is never the youngest"
    expected = alone(three(), requests(4))
    for i, completion in enumerate(completions):
        assert i in failed or completion.token_ids == expected[i]


def test_another_error_of_a_step_is_not_taken_for_full_memory():
    engine = three()

    def broken(*args, **how):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    engine._parts.runner._decode = broken
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        engine.generate(requests(1))


@pytest.mark.parametrize("lost", [False, True])
def test_an_adapter_that_finds_no_room_on_the_device_fails_alone(monkeypatch, lost):
    engine = three()
    before = tokens(engine.generate(requests()))
    bank_insert, bank_replace = AdapterBank.insert, AdapterBank.replace

    def check(bank, adapter):
        if adapter.version == lora(9).version:
            if lost:
                jax.tree.map(lambda array: array.delete(), bank.slots)
            raise jax.errors.JaxRuntimeError(FULL)

    def insert(bank, adapter, slot=None):
        check(bank, adapter)
        return bank_insert(bank, adapter, slot)

    def replace(bank, slot, adapter):
        check(bank, adapter)
        bank_replace(bank, slot, adapter)

    monkeypatch.setattr(AdapterBank, "insert", insert)
    monkeypatch.setattr(AdapterBank, "replace", replace)
    engine.add_adapter("large", lora(9))
    *others, last = engine.generate([*requests(), ask("large")])
    assert tokens(others) == before
    assert last.finish_reason == "error"
    assert "no memory left for large" in last.error and "max_adapters=" in last.error
    assert clean(engine)


@pytest.mark.parametrize("stop", [jax.errors.JaxRuntimeError(FULL), KeyboardInterrupt()])
def test_an_eviction_that_fails_halfway_leaves_nothing_behind(monkeypatch, stop):
    """Its slot goes to the next adapter, which has other slots: nothing of the first may act."""
    rng = np.random.default_rng(3)
    widths = {"layers.0.self_attn.q_proj": 72, "layers.0.mlp.up_proj": 80}
    scales = {site: np.float32(1 + 0.5 * rng.normal(size=width)) for site, width in widths.items()}
    forms = {site: NormalForm(s=scale) for site, scale in scales.items()}
    other = Adapter(forms, "IA3", "scales")
    engine, plain = new_engine(), new_engine()
    plain.add_adapter("other", other)
    expected = tokens(plain.generate([ask("other"), ask()]))
    engine.add_adapter("t", lora(0))
    engine.add_adapter("other", other)
    engine.warm_up()
    tokens(engine.generate([ask("t")]))

    def stopped(*args):
        raise stop

    with monkeypatch.context() as broken:
        broken.setattr(bank_pools, "_put_entries", stopped)
        if isinstance(stop, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.remove_adapter("t")
        else:
            engine.remove_adapter("t")
    assert tokens(engine.generate([ask("other"), ask()])) == expected
    engine.add_adapter("t2", lora(1))
    assert tokens(engine.generate([ask("other"), ask(), ask("t2")]))[:2] == expected


def long_requests():
    """Prompts of several pages, which the next request with the same prompt would share."""
    return [ask(("t0", None)[i % 2], 40 + 3 * i, 12, i) for i in range(5)]


@pytest.mark.parametrize("which", ["_prefill", "_decode"])
@pytest.mark.parametrize("ran", [False, True])
def test_after_an_interrupt_nothing_is_shared_that_was_not_computed(which, ran):
    engine, expected = three(), alone(three(), long_requests())
    runner = engine._parts.runner
    step = getattr(runner, which)

    def stopped(*args, **how):
        if ran:
            step(*args, **how)
        raise KeyboardInterrupt

    setattr(runner, which, stopped)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(long_requests())
    setattr(runner, which, step)
    assert tokens(engine.generate(long_requests())) == expected
    assert clean(engine)


@pytest.mark.parametrize("where", ["_prefill", "_decode", "generated"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_requests_go_on_after_an_interrupt(where, ahead, monkeypatch):
    engine, expected = three(ahead=ahead), alone(three(), long_requests())
    place = engine_module if where == "generated" else engine._parts.runner
    step, calls = getattr(place, where), iter(range(99))

    def at_times(*args, **how):
        if next(calls) in (1, 3, 6):
            raise KeyboardInterrupt
        return step(*args, **how)

    monkeypatch.setattr(place, where, at_times)
    tickets, interrupts = [engine.submit(request) for request in long_requests()], 0
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert tokens([ticket.sink.take().completion for ticket in tickets]) == expected
    assert clean(engine)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_poisoned_adapter_is_refused_when_it_is_added(number):
    engine = three()
    good = lora(5)
    poisoned = good.sites["layers.0.mlp.up_proj"]
    poisoned.terms[0].B[2, 3] = number
    with pytest.raises(AdapterError, match=r"t0: layers\.0\.mlp\.up_proj.*B.* not finite"):
        engine.add_adapter("t0", Adapter(good.sites, "LORA", "x"))
    assert tokens(engine.generate(requests())) == alone(three(), requests())


def test_memory_that_sites_share_is_looked_at_in_each_of_its_views():
    numbers = np.ones(48, np.float32)
    numbers[40] = np.nan  # past the end of the first view
    sites = {
        "layers.0.self_attn.v_proj": NormalForm(s=numbers[:24]),
        "layers.0.self_attn.o_proj": NormalForm(s=numbers),
    }
    with pytest.raises(AdapterError, match=r"o_proj.*\.s.* not finite"):
        new_engine().add_adapter("t", Adapter(sites, "IA3", "x"))


def test_numbers_that_overflow_at_run_time_end_their_own_requests_only():
    engine = three()
    huge = {"layers.0.self_attn.v_proj": NormalForm(s=np.full(24, 3e38, np.float32))}
    engine.add_adapter("huge", Adapter(huge, "IA3", "huge"))
    expected = alone(three(), requests())
    for _ in range(3):  # the pages that held its numbers go to the others
        bad = [ask("huge", 40, 9, seed) for seed in range(3)]
        completions = engine.generate([*bad, *requests()])
        for completion in completions[:3]:
            assert completion.finish_reason == "error" and completion.token_ids == ()
            assert completion.error == "huge gave logits that are not numbers."
        assert tokens(completions[3:]) == expected
    assert clean(engine) and engine.stats().adapters["huge"].failed == 9


def test_a_bank_that_was_lost_is_filled_again(monkeypatch):
    plain, engine = three(), three()
    for each in (plain, engine):
        each.add_adapter("t3", lora(3))
    asked = [ask("t0", 5, 60, 0), *(ask(f"t{seed}", 5, 6, seed) for seed in (1, 2, 3))]
    expected = alone(plain, asked)
    replace, failed = AdapterBank.replace, []

    def full(bank, slot, adapter):  # once: it takes the arrays with it, and no bank finds room
        if failed:
            return replace(bank, slot, adapter)
        failed.append(slot)
        jax.tree.map(lambda array: array.delete(), bank.slots)
        raise jax.errors.JaxRuntimeError(FULL)

    def no_room(capacity):
        monkeypatch.delattr(engine._residency, "_rebuild")
        raise jax.errors.JaxRuntimeError(FULL)

    engine._residency.prepare()
    monkeypatch.setattr(AdapterBank, "replace", full)
    monkeypatch.setattr(engine._residency, "_rebuild", no_room)
    assert tokens(engine.generate(asked)) == expected
    assert failed and engine.stats().out_of_memory == 1 and clean(engine)


@pytest.mark.parametrize("which", ["_prefill", "_decode"])
def test_a_warm_up_without_memory_says_so_and_leaves_requests_alone(which):
    engine, request = three(), ask("t0", 30, 40)
    expected = alone(three(), [request])
    stream = engine.stream([request])
    next(stream)
    step = getattr(engine._parts.runner, which)
    setattr(engine._parts.runner, which, Failing(step, lambda call: call == 2))
    with pytest.raises(OutOfDeviceMemory, match="for the steps; give the KV cache less"):
        engine.warm_up()
    assert [list(stream)[-1].completion.token_ids] == expected and clean(engine)
    engine.warm_up()


def test_a_bank_that_finds_no_room_to_grow_stays_as_it_was(monkeypatch):
    engine = three()
    before = tokens(engine.generate(requests()))
    engine.add_adapter("large", lora(9, rank=64, scale=0.1))
    rebuild, grown = engine._residency._rebuild, engine._residency._bank.capacity

    def no_room(capacity):
        if capacity != grown:
            raise jax.errors.JaxRuntimeError(FULL)
        rebuild(capacity)

    monkeypatch.setattr(engine._residency, "_rebuild", no_room)
    with pytest.raises(OutOfDeviceMemory, match="3 adapters of the sizes that are registered"):
        engine.warm_up()
    *others, last = engine.generate([*requests(), ask("large")])
    assert tokens(others) == before
    assert last.finish_reason == "error" and "max_adapters=" in last.error
    monkeypatch.undo()
    assert tokens(engine.generate([ask("large")])) and clean(engine)


def test_a_removed_adapter_leaves_the_device_once_its_last_request_is_done():
    engine = three()
    stream = engine.stream([ask("t0", tokens=30)])
    next(stream)
    waiting = engine.submit(ask("t0", tokens=3, seed=1))
    engine.remove_adapter("t0")
    assert engine.stats().slots_used == 1
    assert len(list(stream)[-1].completion.token_ids) == 30
    while engine.busy:
        engine.step()
    assert waiting.sink.take().completion.finish_reason == "length"
    assert engine.stats().slots_used == 0

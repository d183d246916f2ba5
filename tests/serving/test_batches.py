"""What goes wrong in engines that batch adapters, as cases: rows that leak, stale state, names.

Each case is one that users of such engines reported. Every test compares with the same request
alone in an engine, which test_exactness.py in turn holds to the PEFT library.
"""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the adapters are made by the PEFT library, which needs torch")

from engines import make_engine  # noqa: E402

import scute_jax as sj  # noqa: E402
from scute_jax.serving import Request, SamplingParams  # noqa: E402

RNG = np.random.default_rng(0)


def ask(adapter=None, length=20, tokens=8, seed=0, ids=None, **sampling):
    if ids is None:
        ids = np.random.default_rng(seed).integers(3, 97, length).tolist()
    params = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "logprobs": 0} | sampling)
    return Request(prompt_token_ids=ids, adapter=adapter, sampling=params)


def texts(completions):
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


def alone(engine, requests):
    return texts([engine.generate([request])[0] for request in requests])


def test_rows_with_and_without_adapters_side_by_side(engine):
    requests = [ask(a, seed=i) for i, a in enumerate([None, "lora", None, "lora", "dora", None])]
    assert texts(engine.generate(requests)) == alone(engine, requests)


def test_adapters_in_any_order_with_rows_that_come_and_go(engine):
    order = ["lora", "oft", "lora", "dora", "oft", None, "vera", "lora", "ia3", "rslora"]
    requests = [ask(a, 5 + 7 * i, 3 + 5 * (i % 4), i) for i, a in enumerate(order * 3)]
    assert texts(engine.generate(requests)) == alone(engine, requests)


def test_a_shared_prefix_under_different_weights_is_not_shared(engine):
    prefix = RNG.integers(3, 97, 600).tolist()
    anchors = [ask(a, ids=prefix, tokens=30) for a in ("lora", "oft")]
    short = [ask(("lora", "oft")[i % 2], ids=prefix[:40] + [i + 3]) for i in range(11)]
    requests = [anchors[0], *short, anchors[1]]
    assert texts(engine.generate(requests)) == alone(engine, requests)


def test_cancelled_requests_leave_the_others_alone(engine):
    requests = [ask(("lora", "oft", None)[i % 3], 30, 40, i) for i in range(9)]
    expected = alone(engine, requests)
    cancelled = engine.stream(requests[:4])
    next(cancelled)
    cancelled.close()
    assert texts(engine.generate(requests)) == expected
    assert engine._parts.pages.held == 0 and not engine.busy


def test_warmed_up_with_one_adapter_then_all_at_once(folders):
    engine = make_engine(folders, ["lora"], max_adapters=9)
    engine.generate([ask("lora")])
    names = [name for name in folders if name != "base"]
    for name in names:
        engine.add_adapter(name, folders[name])
    requests = [ask(name, seed=i) for i, name in enumerate(names)]
    assert texts(engine.generate(requests)) == alone(engine, requests)


def test_a_replaced_adapter_answers_anew(folders):
    engine = make_engine(folders, ["lora", "dora"])
    prompt = RNG.integers(3, 97, 80).tolist()
    engine.add_adapter("x", folders["lora"])
    first = texts(engine.generate([ask("x", ids=prompt)]))
    engine.add_adapter("x", folders["dora"])
    second = texts(engine.generate([ask("x", ids=prompt)]))
    assert first == texts(engine.generate([ask("lora", ids=prompt)])) != second
    assert second == texts(engine.generate([ask("dora", ids=prompt)]))


def test_requests_in_flight_finish_on_the_weights_they_began_with(folders):
    engine = make_engine(folders, ["lora", "dora"])
    engine.add_adapter("x", folders["lora"])
    request = ask("x", tokens=40)
    expected = texts(engine.generate([ask("lora", tokens=40)]))
    stream = engine.stream([request])
    next(stream)
    engine.add_adapter("x", folders["dora"])
    engine.remove_adapter("lora")
    last = list(stream)[-1].completion
    assert [last.token_ids] == expected


def test_a_failed_replacement_leaves_the_old_adapter(folders, tmp_path):
    engine = make_engine(folders, ["lora"])
    expected = texts(engine.generate([ask("lora")]))
    with pytest.raises(sj.AdapterError, match="does not exist"):
        engine.add_adapter("lora", tmp_path / "nowhere")
    assert texts(engine.generate([ask("lora")])) == expected


def test_base_rows_do_not_change_when_adapters_are_there(folders):
    plain, mixed = make_engine(folders, []), make_engine(folders, ["lora", "oft", "vera"])
    request = ask(length=9, logprobs=0)
    (before,) = plain.generate([request])
    mixed.generate([ask("lora", 60, 30), ask("oft", 60, 30), ask("vera", 60, 30)])
    beside = mixed.generate([request, ask("lora", 60, 30), ask("vera", 50, 20)])[0]
    assert beside.token_ids == before.token_ids
    np.testing.assert_allclose(beside.logprobs, before.logprobs, atol=2e-6)


def test_an_unknown_name_is_an_error_and_never_the_base(engine):
    wrong, right = engine.generate([ask("lroa"), ask("lora")])
    assert wrong.finish_reason == "error" and wrong.token_ids == () and wrong.text == ""
    assert "no adapter is called 'lroa'; there are: dora, ia3" in wrong.error
    assert right.error is None and len(right.token_ids) == 8


def test_a_removed_adapter_gives_its_slot_back(folders):
    engine = make_engine(folders, ["lora", "dora"], max_adapters=2)
    engine.generate([ask("lora"), ask("dora")])
    engine.remove_adapter("lora")
    assert [info.resident for info in engine.adapters()] == [True]
    assert len(engine._residency._bank.free) == 1
    engine.add_adapter("oft", folders["oft"])
    assert len(texts(engine.generate([ask("oft"), ask("dora")]))) == 2


def test_more_adapters_than_slots_take_turns(folders):
    engine = make_engine(folders, max_adapters=1)
    names = ["lora", "dora", "oft", "vera"]
    requests = [ask(name, seed=i) for i, name in enumerate(names * 2)]
    assert texts(engine.generate(requests)) == alone(engine, requests)
    assert len(engine._residency.resident()) == 1


def test_a_larger_rank_than_any_before_makes_the_bank_grow(folders):
    engine = make_engine(folders, ["lora"])
    before = texts(engine.generate([ask("lora")]))
    engine.add_adapter("rslora", folders["rslora"])  # ranks up to 33 after rank 5
    both = engine.generate([ask("lora"), ask("rslora")])
    assert texts(both)[:1] == before
    wide = make_engine(folders, ["lora", "rslora"])
    assert texts(both) == texts(wide.generate([ask("lora"), ask("rslora")]))


def test_loading_again_reads_the_files_once_each_time(folders, monkeypatch):
    import scute_jax.serving.engine as module

    reads = []
    load = module.load_peft
    monkeypatch.setattr(module, "load_peft", lambda *a, **k: reads.append(a) or load(*a, **k))
    engine = make_engine(folders, [])
    for _ in range(10):
        engine.add_adapter("x", folders["lora"])
        engine.generate([ask("x", tokens=2)])
    assert len(reads) == 10 and len(engine._residency.resident()) == 1


def test_stacks_are_served_in_both_orders(engine, folders):
    orders = [("lora", "oft"), ("oft", "lora"), ("ia3-out", "dora"), ("vera", "ia3", "lora")]
    requests = [ask(list(order), seed=5) for order in orders]
    completions = engine.generate(requests)
    assert texts(completions) == alone(engine, requests)
    assert completions[0].token_ids != completions[1].token_ids
    assert [c.adapter for c in completions] == orders


def test_a_prompt_that_is_too_long_or_broken_fails_alone(folders):
    engine = make_engine(folders, ["lora"], memory=1 << 20)
    room = engine.max_context
    bad = [ask("lora", room), ask(ids=[5, 97]), ask(ids=[])]
    completions = engine.generate([*bad, ask("lora")])
    assert [c.finish_reason for c in completions] == ["error"] * 3 + ["length"]
    for completion, message in zip(
        completions, [f"has {room} tokens", "holds 97; ids run", "no tokens"], strict=False
    ):
        assert message in completion.error

"""The async interface: streams side by side, consumers that stop reading or leave, closing."""

import asyncio
import threading

import pytest
from lora_engine import alone, ask, lora, new_engine

from scute_jax.serving import AsyncEngine, EngineStopped, Overloaded


def two(**options):
    engine = new_engine(**options)
    engine.add_adapter("a", lora(0))
    engine.add_adapter("b", lora(1))
    return engine


def requests(count: int = 12, tokens: int = 20):
    return [ask(("a", None, "b")[i % 3], 4 + i, tokens, i) for i in range(count)]


def run(test):
    """Runs a coroutine, which has a minute."""
    return asyncio.run(asyncio.wait_for(test, 60))


async def collect(stream):
    return [chunk async for chunk in stream]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_streams_side_by_side_give_the_texts_of_each_alone():
    expected = alone(two(), requests())

    async def main():
        async with AsyncEngine(two()) as served:
            return await asyncio.gather(*(collect(served.stream(r)) for r in requests()))

    streams = run(main())
    assert any(len(chunks) > 1 for chunks in streams)  # a slow reader finds pieces joined
    for chunks, ids in zip(streams, expected, strict=True):
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == ids
        assert [c.completion is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].completion.token_ids == ids


def test_a_consumer_that_stops_reading_holds_nobody_up():
    expected = alone(two(), requests())

    async def main():
        async with AsyncEngine(two()) as served:
            stalled = [served.stream(r) for r in requests(8, tokens=200)]
            first = [await anext(stream) for stream in stalled]  # and reads no more
            others = await asyncio.gather(*(served.generate(r) for r in requests()))
            await until(lambda: not served.engine.busy)
            stats = served.engine.stats()
            assert stats.running == stats.pages_used == 0
            rest = [await collect(stream) for stream in stalled]
            return others, list(zip(first, rest, strict=True))

    others, stalled = run(main())
    assert [c.token_ids for c in others] == expected
    for first, rest in stalled:
        assert len(rest) == 1, "everything that was not read is one piece"
        assert first.token_ids + rest[0].token_ids == rest[0].completion.token_ids
        assert len(rest[0].completion.token_ids) == 200


def test_a_consumer_that_leaves_cancels_its_request():
    async def main():
        async with AsyncEngine(two()) as served:
            stream = served.stream(ask("a", tokens=400))
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(served.generate(ask("b", tokens=400)))
            await until(lambda: served.engine.stats().running)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not served.engine.busy)
            stats = served.engine.stats()
            assert stats.running == stats.waiting == stats.pages_used == 0
            assert stats.adapters["a"].tokens < 400
            at_once = asyncio.create_task(served.generate(ask("b", tokens=400)))
            await asyncio.sleep(0)
            at_once.cancel()  # while it is being tokenized
            await asyncio.gather(at_once, return_exceptions=True)
            await until(lambda: not served.engine.busy and not served._submitting)
            assert not served._open and served._taken == 0

    run(main())


def test_more_streams_than_allowed_are_refused_at_once():
    async def main():
        async with AsyncEngine(two(), max_open=2) as served:
            streams = [served.stream(r) for r in requests(2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(Overloaded, match="2 streams are open"):
                await served.generate(ask("a"))
            await streams[0].aclose()
            return await served.generate(ask("a"))

    assert len(run(main()).token_ids) == 10


def test_a_request_that_cannot_be_served_says_why():
    async def main():
        async with AsyncEngine(two()) as served:
            return await served.generate(ask("nobody"))

    completion = run(main())
    assert completion.finish_reason == "error" and "no adapter is called" in completion.error


@pytest.mark.parametrize("drain", [True, False])
def test_closing_drains_or_cancels_and_then_takes_no_more(drain):
    async def main():
        served = AsyncEngine(two())
        await served.__aenter__()
        tasks = [asyncio.create_task(served.generate(r)) for r in requests(9, tokens=60)]
        await until(lambda: served.engine.stats().running)
        await served.close(drain=drain)
        completions = await asyncio.gather(*tasks)
        with pytest.raises(EngineStopped, match="takes no requests"):
            await served.generate(ask("a"))
        return completions

    reasons = {c.finish_reason for c in run(main())}
    assert reasons == {"length"} if drain else "cancelled" in reasons
    assert not [t for t in threading.enumerate() if t.name == "scute-engine"]


def test_it_is_entered_once():
    async def main():
        served = AsyncEngine(two())
        async with served:
            with pytest.raises(RuntimeError, match="entered once"):
                await served.__aenter__()
            assert len(await collect(served.stream(requests(1)[0])))
        with pytest.raises(RuntimeError, match="entered once"):
            await served.__aenter__()

    run(main())


def test_an_engine_that_fails_tells_every_stream():
    async def main():
        engine = two()
        async with AsyncEngine(engine) as served:
            streams = [served.stream(r) for r in requests(3, tokens=300)]
            for stream in streams:
                await anext(stream)

            def broken(work):
                raise RuntimeError("the device is gone")

            engine._parts.runner.decode = broken
            for stream in streams:
                with pytest.raises(EngineStopped, match="failed: the device is gone"):
                    await collect(stream)
            with pytest.raises(EngineStopped, match="the device is gone"):
                await served.generate(ask("a"))

    run(main())


def test_adapters_come_and_go_while_streams_run():
    expected = alone(two(), requests(6, tokens=60))

    async def main():
        engine = two()
        async with AsyncEngine(engine) as served:
            tasks = [asyncio.create_task(served.generate(r)) for r in requests(6, tokens=60)]
            await until(lambda: engine.stats().running)
            for seed in range(20):
                await asyncio.to_thread(engine.add_adapter, "new", lora(40 + seed))
                await served.generate(ask("new", tokens=2))
            await asyncio.to_thread(engine.remove_adapter, "new")
            return [c.token_ids for c in await asyncio.gather(*tasks)]

    assert run(main()) == expected

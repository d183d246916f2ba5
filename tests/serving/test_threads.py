"""What several threads share: a lock that is given in turn, a mailbox that holds one piece."""

import threading
import time

import pytest
from lora_engine import alone, ask, lora, new_engine, tokens

from scute_jax.serving.mailbox import Mailbox
from scute_jax.serving.request import Chunk
from scute_jax.serving.turns import FairLock


def test_a_thread_that_asks_gets_its_turn_from_one_that_never_rests():
    lock, stop, turns = FairLock(), threading.Event(), []

    def greedy():
        while not stop.is_set():
            with lock, lock:  # the one that holds it may enter again
                time.sleep(0.002)

    worker = threading.Thread(target=greedy)
    worker.start()
    try:
        for _ in range(20):
            began = time.monotonic()
            with lock:
                turns.append(time.monotonic() - began)
    finally:
        stop.set()
        worker.join()
    assert len(turns) == 20 and sorted(turns)[10] < 0.1


def test_turns_come_in_the_order_of_asking():
    lock, order, threads = FairLock(), [], []

    def enter(number):
        with lock:
            order.append(number)

    with lock:
        for number in range(6):
            threads.append(threading.Thread(target=enter, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_a_lock_is_free_again_after_an_error():
    lock = FairLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert lock._owner is None


def test_a_mailbox_holds_one_piece_however_many_come():
    calls = []
    box = Mailbox(lambda: calls.append(1))
    for i in range(1000):
        box.put(Chunk("x", "ab", (i,)))
    assert len(calls) == 1
    piece = box.take()
    assert piece.text == "ab" * 1000 and piece.token_ids == tuple(range(1000))
    assert box.take() is None
    box.put(Chunk("x", "c", (0,)))
    assert len(calls) == 2


def test_two_threads_generate_on_one_engine():
    engine = new_engine()
    for seed in range(4):
        engine.add_adapter(f"t{seed}", lora(seed))
    requests = [ask(f"t{i % 4}", 5 + i, 15, i) for i in range(16)]
    expected, ours = alone(engine, requests), {}

    def serve(part):
        ours[part] = tokens(engine.generate(requests[part::2]))

    threads = [threading.Thread(target=serve, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ours[0], ours[1]] == [expected[0::2], expected[1::2]]

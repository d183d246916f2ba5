"""Same seed, same text: alone, in any batch, in any order, after preemption."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_engine import alone, ask, lora, new_engine, tokens

from scute_jax.serving.sampling import SamplingRows, sample


def engine_of(pages: int):
    engine = new_engine(pages)
    for seed in range(5):
        engine.add_adapter(f"t{seed}", lora(seed))
    return engine


def requests():
    """Greedy and sampled, filtered or not; of five adapters, a stack, a scale and the base."""
    who = [f"t{i}" for i in range(5)] + [None, ["t0", "t3"]]
    how = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    ]
    made = [ask(who[i % 7], 3 + 4 * i, 8 + 2 * i, i, **how[i % 4]) for i in range(20)]
    return [*made, ask("t1", 40, 30, 3, scale=0.5, temperature=1.0)]


@pytest.fixture(scope="module")
def expected():
    return alone(engine_of(200), requests())


@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_of_arrival(expected, seed):
    order = np.random.default_rng(seed).permutation(len(expected)).tolist()
    ours = tokens(engine_of(200).generate([requests()[i] for i in order]))
    assert ours == [expected[i] for i in order]


def test_in_any_company(expected):
    engine = engine_of(200)
    for first in range(0, 21, 3):
        few = slice(first, first + 3)
        assert tokens(engine.generate(requests()[few])) == expected[few]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_whatever_generator_the_process_has_made_the_default(impl):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 97)), jnp.float32)
    rows = SamplingRows(jnp.ones(5), jnp.ones(5), jnp.zeros(5, int), jnp.arange(5, dtype="uint32"))
    position = jnp.arange(5) + 3
    with jax.default_prng_impl(impl):
        whole = sample(logits, rows, position)
        args = (logits, rows, position)
        own = [sample(*jax.tree.map(lambda a, i=i: a[i : i + 1], args))[0] for i in range(5)]
    assert whole.tolist() == own == sample(*args).tolist()


def test_after_preemptions(expected):
    engine = engine_of(13)
    assert tokens(engine.generate(requests())) == expected
    assert engine.stats().preemptions > 3


def test_with_arrivals_and_cancels_between_the_steps(expected):
    engine, rng = engine_of(13), np.random.default_rng(0)
    tickets, others = [], []
    for request in requests():
        tickets.append(engine.submit(request))
        others.append(engine.submit(ask("t2", int(rng.integers(1, 60)), 50, int(rng.integers(99)))))
        for _ in range(int(rng.integers(3))):
            engine.step()
        engine.cancel(others[int(rng.integers(len(others)))])
    while engine.busy:
        engine.step()
    assert [t.sink.take().completion.token_ids for t in tickets] == expected


def test_another_seed_draws_another_text(expected):
    last = requests()[-1]
    other = replace(last, sampling=replace(last.sampling, seed=4))
    assert tokens(engine_of(200).generate([last, other])) != [expected[-1]] * 2

"""What the benchmarks time: every layer of a loop is computed, and its bytes are those it moves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax.bench import layer as pools
from scute_jax.bench.layer import LLAMA_8B, TINY, Load, turned_form
from scute_jax.bench.timing import kernel_us, time_work
from scute_jax.bench.work import (
    QUICK,
    Effort,
    Op,
    expand_work,
    riding_work,
    rotate_work,
    shared_work,
    sparse_work,
    update_work,
)
from scute_jax.kernels import segmented_update
from scute_jax.kernels.precision import einsum

LOAD = Load(8, (3, 16, 20), TINY)


def test_the_bytes_are_those_of_the_byte_model():
    uniform, block = Load(8, (16,) * 4, TINY), 32
    rotated = uniform.cost(turned_form(block))
    assert rotate_work(uniform, block, QUICK).nbytes == rotated.bytes
    shared = uniform.cost(uniform.shared_form)
    again = 2 * LOAD.rows * (2 * TINY.hidden + TINY.hidden)  # x, once more for k, v and up
    assert shared_work(uniform, QUICK).nbytes + again == shared.bytes and shared.launches == 12
    cost = LOAD.cost(LOAD.low_rank_form)
    assert update_work(LOAD, QUICK).nbytes + again == cost.bytes and cost.launches == 8
    outs = 3 * TINY.hidden + 2 * TINY.kv + 2 * TINY.ff
    scaled = update_work(LOAD, QUICK, s=True).nbytes - update_work(LOAD, QUICK).nbytes
    assert scaled == 2 * LOAD.adapters * outs


def test_a_layer_of_llama():
    load = Load(16, (16,) * 16)
    assert load.layer is LLAMA_8B
    assert 32 * load.factor_bytes() == 1_342_177_280


def test_every_layer_of_every_round_is_computed():
    effort = Effort(distinct=0, layers=2, call_us=100, repeats=1)
    work = update_work(LOAD, effort, Op("reference"), s=True)
    rounds, (state, stack) = work.per_call // 2, work.args
    assert rounds >= 2 and len(stack) == 2
    (xs, hs), tiles = state, LOAD.segments().tiles
    for layer in rounds * stack:
        for name, (parts, scale) in layer.items():
            none = (None,) * len(parts)
            hs = hs | {name: segmented_update(hs[name], xs[name], parts, scale, none, tiles)}
    ours = work.step(*work.args)[1]
    for a, b, before in zip(*map(jax.tree.leaves, (ours, hs, state[1])), strict=True):
        a, b, before = (np.asarray(m, np.float32) for m in (a, b, before))
        moved = np.abs(b - before).max()
        assert moved > 0 and np.abs(a - b).max() <= 0.02 * moved


@pytest.mark.parametrize("adapters", [True, False])
def test_each_layer_of_base_products_has_results_of_its_own(adapters):
    """What the next layer overwrites unread, XLA would not compute."""
    work = riding_work(LOAD, QUICK, Op("reference"), adapters=adapters)
    (xs, hs), layers = work.args
    after = work.step(*work.args)[1]
    assert len(hs) == len(layers) == 2
    for layer in layers:
        ((key, groups),) = layer.items()
        for name, (Ws, parts) in groups.items():
            none, tiles = (None,) * len(Ws), LOAD.segments().tiles
            h = tuple(einsum("ti,io->to", xs[name], W) for W in Ws)
            if adapters:
                h = segmented_update(h, xs[name], parts, none, none, tiles)
            for a, b in zip(after[key][name], h, strict=True):
                a = np.asarray(a).reshape(b.shape)
                assert np.abs(a - np.asarray(b)).max() <= 0.02 * np.abs(b).max()


@pytest.mark.parametrize(
    "make",
    [
        lambda load, op: update_work(load, QUICK, op),
        lambda load, op: rotate_work(load, 32, QUICK, op),
        lambda load, op: shared_work(load, QUICK, op),
        lambda load, op: sparse_work(load, QUICK, op),
    ],
)
def test_the_kernels_compute_what_the_reference_does(make, monkeypatch: pytest.MonkeyPatch):
    """With stronger adapters than those that are timed, which hardly show in bfloat16."""
    normal, load = pools._normal, Load(9, (3, 16, 20), TINY)
    strong = partial(strongly, normal)
    monkeypatch.setattr(pools, "_normal", strong)
    works = [make(load, Op(how)) for how in ("pallas", "reference")]
    ours, reference = (jax.tree.leaves(work.step(*work.args)) for work in works)
    before = jax.tree.leaves(works[0].args[0])
    moved = [
        np.abs(np.float32(b) - np.float32(x)).max() for b, x in zip(reference, before, strict=True)
    ]
    assert sum(m > 0.5 for m in moved) == 7  # the output of each projection
    for a, b, most in zip(ours, reference, moved, strict=True):
        assert np.abs(np.float32(a) - np.float32(b)).max() <= 0.03 * most


def strongly(normal, key, shape, scale, dtype):
    return normal(key, shape, max(scale, 0.5), dtype)


def test_the_expand_alone_adds_the_shrink_of_before():
    work = expand_work(LOAD, QUICK)
    (low, hs), stack = work.args
    assert set(low) == set(hs) == set(stack[0])
    moved = work.step(*work.args)[1]
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(hs), strict=True):
        assert bool(jnp.any(a != b))


def test_times_of_a_machine_without_a_gpu():
    work = rotate_work(LOAD, 32, QUICK, Op("reference"))
    times = time_work(work, repeats=2)
    assert times.wall > 0 and times.spread >= 0
    if jax.default_backend() != "gpu":
        assert kernel_us(work.step, *work.args) == {} and times.busy == 0

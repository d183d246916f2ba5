"""The search of tiles: that it goes downhill, leaves out what fails, and writes what it found."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from scute_jax.bench import tune
from scute_jax.bench.layer import LLAMA_8B, TINY, Load
from scute_jax.bench.tune import ADAPTERS, Found, Task, changes, descend, neighbours, write
from scute_jax.bench.work import QUICK, Op, Work, rotate_work
from scute_jax.kernels import tuning
from scute_jax.kernels.block_rotate.tile import RotateTile


@dataclass(frozen=True)
class First:
    columns: int = 64
    pipelined: bool = False


@dataclass(frozen=True)
class Second:
    num_warps: int = 1


START = (First(), Second())


def test_a_neighbour_differs_in_one_number():
    assert list(neighbours(START)) == [
        (First(columns=128), Second()),
        (First(columns=32), Second()),
        (First(pipelined=True), Second()),
        (First(), Second(num_warps=2)),
    ]


def test_it_goes_downhill_through_fields_of_both():
    asked = []

    def times_of(candidates):
        asked.extend(candidates)
        return [
            10 * abs(math.log2(first.columns / 256)) + 5 * first.pipelined + 40 / second.num_warps
            for first, second in candidates
        ]

    assert descend(START, times_of)[0] == First(columns=256)
    assert len(asked) == len(set(asked)) > 10


def test_what_fails_or_saves_nothing_is_left():
    def times_of(candidates):
        failing = [first.columns != 64 or second.num_warps > 1 for first, second in candidates]
        return [
            math.inf if fails else 99.0 if first.pipelined else 100.0
            for fails, (first, _) in zip(failing, candidates, strict=True)
        ]

    assert descend(START, times_of) == START


def test_what_is_found_is_what_the_kernel_gets(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path, device = tmp_path / "table.json", jax.devices()[0].device_kind
    path.touch()
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    task = Task("rotate", 64, (First,), tuning.bucket(rows=64), partial(rotate_work))
    other = replace(task, bucket=tuning.bucket(rows=16))
    write(path, device, Found(task, (First(columns=128),), 2.0, 1.0))
    write(path, device, Found(other, (First(pipelined=True),), 2.0, 1.0))
    assert tuning.tuned(First, rows=50) == First(columns=128)
    assert tuning.tuned(First, rows=5) == First(pipelined=True)
    write(path, device, Found(task, (First(),), 2.0, 2.0))  # a later search finds nothing
    assert tuning.tuned(First, rows=50) == First()
    assert tuning.tuned(First, rows=5) == First(pipelined=True)


def test_a_candidate_with_other_numbers_counts_as_failed():
    x = jnp.ones((4, 8), jnp.bfloat16)

    def work(factor):
        return Work(jax.jit(lambda x: [x * jnp.asarray(factor, x.dtype)]), (x,), 1, 1)

    expected = work(2).step(x)
    assert math.isfinite(tune._us(work(2.01), expected, 1))
    assert tune._us(work(3), expected, 1) == math.inf
    assert tune._us(work(math.nan), expected, 1) == math.inf
    assert tune._us(None, expected, 1) == math.inf


def test_a_search_on_a_kernel(monkeypatch: pytest.MonkeyPatch):
    """Interpreted, so that the times mean nothing: it runs, and says what it tried."""
    default, other, odd = ((RotateTile(num_stages=n),) for n in (RotateTile().num_stages, 7, 99))
    load = Load(16, (1,) * ADAPTERS, TINY)

    def work(op):
        if op.tiles == odd:
            raise ValueError("no room in shared memory")
        return rotate_work(load, 32, QUICK, op)

    monkeypatch.setattr(tune, "neighbours", lambda tiles: [other, odd])
    said: list[str] = []
    found = tune.tune(Task("rotate", 16, (RotateTile,), "rows<=16", work), 1, said.append)
    assert found.tiles in (default, other) and 0 < found.best_us <= found.default_us
    assert len(said) == 3 and "defaults: " in said[0]
    assert "RotateTile.num_stages=99: inf us" in said[2]


def test_the_tasks_are_of_every_kind_and_each_bucket_is_searched_once():
    found = [(kind, task.bucket) for task in tune.tasks(LLAMA_8B, QUICK) for kind in task.kinds]
    assert {kind for kind, _ in found} == set(tune.KINDS)
    assert len(found) == len(set(found))
    assert changes((First(columns=128), Second())) == "First.columns=128"
    assert Op(tiles=START).tiles == START

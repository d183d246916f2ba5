"""The search of tiles: from the defaults, one field doubled or halved at a time, while it pays.

Fields are found by dataclasses.fields, so that a kernel may change its tile without a word here.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scute_jax.bench.layer import LLAMA_8B, Layer, Load
from scute_jax.bench.timing import walls_in_turn
from scute_jax.bench.work import (
    Effort,
    Op,
    Work,
    riding_work,
    rotate_work,
    shared_work,
    sparse_work,
    update_work,
)
from scute_jax.kernels import tuning
from scute_jax.kernels.block_rotate.tile import RotateTile
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.segmented_linear.plan import LinearTile
from scute_jax.kernels.segmented_shrink.pallas_triton import ShrinkTile
from scute_jax.kernels.shared_factors.pallas_triton import SharedTile
from scute_jax.kernels.sparse_update.pallas_triton import SparseTile

KINDS = (ShrinkTile, ExpandTile, LinearTile, RotateTile, SharedTile, SparseTile)
GAIN = 0.98  # of the time before: less than that is noise
ROUNDS = 5
ADAPTERS, BLOCK = 16, 32

Tiles = tuple[Any, ...]  # one of each kind of a task
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """Tiles that are searched together, the bucket of the table that they are for, and the op."""

    op: str
    rows: int
    kinds: tuple[type, ...]
    bucket: str
    work: Callable[[Op], Work]

    @property
    def name(self) -> str:
        return f"{self.op}, {self.bucket}"


@dataclass(frozen=True)
class Found:
    """The best tiles of a task, and microseconds of a layer before and after."""

    task: Task
    tiles: Tiles
    default_us: float
    best_us: float


def tasks(layer: Layer = LLAMA_8B, effort: Effort = Effort()) -> Iterator[Task]:  # noqa: B008
    """What is searched: 16 adapters on one layer, at the upper edge of each bucket."""
    few, many = (16, 64, 256), (1024, 4096, 8192)
    shapes = [(rows, 16) for rows in few + many]
    shapes += [(rows, rank) for rank in (64, 256) for rows in few]
    for rows, rank in shapes:
        work = partial(update_work, Load(rows, (rank,) * ADAPTERS, layer), effort)
        bucket = tuning.bucket(rows=rows, rank=rank)
        yield Task("update", rows, (ShrinkTile, ExpandTile), bucket, work)
    for rows, (group, (d_in, outs)) in product((16, 64), layer.groups.items()):
        load = Load(rows, (16,) * ADAPTERS, layer)
        work = partial(riding_work, load, effort, groups=(group,))
        bucket = tuning.bucket(rows=rows, depth=d_in, columns=sum(outs))
        yield Task("linear", rows, (LinearTile,), bucket, work)
    for rows in (64, *many):
        work = partial(rotate_work, Load(rows, (1,) * ADAPTERS, layer), BLOCK, effort)
        yield Task("rotate", rows, (RotateTile,), tuning.bucket(rows=rows, block=BLOCK), work)
    for rows in (*few, 1024):
        work = partial(shared_work, Load(rows, (256,) * ADAPTERS, layer), effort)
        yield Task("shared", rows, (SharedTile,), tuning.bucket(rows=rows, rank=256), work)
    for rows in (16, 64, 1024):
        work = partial(sparse_work, Load(rows, (16,) * ADAPTERS, layer), effort)
        yield Task("sparse", rows, (SparseTile,), tuning.bucket(rows=rows), work)


def tune(task: Task, repeats: int, say: Say) -> Found:
    """The best tiles for a task, confirmed beside the defaults; the defaults where none is better.

    A candidate that does not compile, or whose numbers are not those of the defaults, is left out.
    """
    default = tuple(kind() for kind in task.kinds)
    plain = task.work(Op(tiles=default))
    expected = plain.step(*plain.args)

    def times_of(candidates: Sequence[Tiles]) -> list[float]:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda tiles: _compiled(task, tiles), candidates))
        times = []
        for tiles, work in zip(candidates, made, strict=True):
            times.append(_us(work, expected, repeats))
            say(f"  {changes(tiles) or 'defaults'}: {times[-1]:.1f} us")
        return times

    best = descend(default, times_of)
    found = task.work(Op(tiles=best))
    before, after = map(statistics.median, walls_in_turn([plain, found], 2 * repeats))
    if after > GAIN * before:
        best, after = default, before
    return Found(task, best, before, after)


def descend(start: Tiles, times_of: Callable[[Sequence[Tiles]], list[float]]) -> Tiles:
    """The tiles from which no single change saves time, for at most `ROUNDS` changes."""
    best, known = start, dict(zip([start], times_of([start]), strict=True))
    for _ in range(ROUNDS):
        near = [tiles for tiles in neighbours(best) if tiles not in known]
        known |= zip(near, times_of(near), strict=True)
        leader = min(known, key=lambda tiles: known[tiles])
        if not known[leader] <= GAIN * known[best]:
            break
        best = leader
    return best


def neighbours(tiles: Tiles) -> Iterator[Tiles]:
    """The tiles with one number doubled or halved, or one switch turned."""
    for at, tile in enumerate(tiles):
        for field in fields(tile):
            value = getattr(tile, field.name)
            values = [not value] if isinstance(value, bool) else [2 * value, value // 2]
            for new in values:
                if isinstance(new, bool) or new > 0:
                    yield (*tiles[:at], replace(tile, **{field.name: new}), *tiles[at + 1 :])


def changes(tiles: Tiles) -> str:
    """How the tiles differ from the defaults."""
    return ", ".join(
        f"{type(tile).__name__}.{name}={value}"
        for tile in tiles
        for name, value in _entry(tile).items()
    )


def write(path: Path, device: str, found: Found) -> None:
    """Puts the tiles into the table of a file; an entry that is all defaults is taken out.

    A new file begins with the table of the package.
    """
    is_new = not path.exists() or not path.stat().st_size
    table = deepcopy(tuning.read_table(tuning.PACKAGED if is_new else path))
    of_device = table.setdefault(device, {})
    for tile in found.tiles:
        buckets = of_device.setdefault(type(tile).__name__, {})
        buckets.pop(found.task.bucket, None)
        if entry := _entry(tile):
            buckets[found.task.bucket] = entry
    path.write_text(json.dumps(table, indent=1) + "\n")


def _entry(tile: Any) -> dict[str, int]:
    default = asdict(type(tile)())
    return {name: value for name, value in asdict(tile).items() if value != default[name]}


def _compiled(task: Task, tiles: Tiles) -> Work | None:
    try:
        work = task.work(Op(tiles=tiles))
        return replace(work, step=jax.jit(work.step).lower(*work.args).compile())
    except Exception:  # too large for the shared memory of this GPU, say
        return None


def _us(work: Work | None, expected: Any, repeats: int) -> float:
    """Microseconds of a layer; infinite if it does not run or computes something else."""
    try:
        if work is None or not _alike(work.step(*work.args), expected):
            return math.inf
        return statistics.median(walls_in_turn([work], repeats)[0])
    except jax.errors.JaxRuntimeError:  # more registers than a launch may ask for, say
        return math.inf


@jax.jit
def _alike(ours: Any, expected: Any) -> jax.Array:
    """No number is off by more than sums in another order explain, in bfloat16 over many layers."""

    def close(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.abs(a - b).max() <= 0.1 * jnp.abs(b).max()

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(close, ours, expected))))

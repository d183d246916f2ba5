"""Times of a work: by the clock, and of its kernels on the device by the profiler."""

import glob
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.profiler import ProfileData

from scute_jax.bench.work import Work


@dataclass(frozen=True)
class Times:
    """Microseconds of one layer. `wall` is what counts: launches, gaps and loop included."""

    wall: float
    spread: float  # of the middle half of the calls
    kernels: dict[str, float]  # name -> device time; empty where there is no GPU
    launches: float

    @property
    def busy(self) -> float:
        return sum(self.kernels.values())


def time_work(work: Work, repeats: int) -> Times:
    """Clock and profiler of one work."""
    (walls,) = walls_in_turn([work], repeats)
    walls.sort()
    middle = walls[len(walls) // 4 : len(walls) - len(walls) // 4]
    kernels = kernel_us(work.step, *work.args)
    return Times(
        wall=statistics.median(walls),
        spread=middle[-1] - middle[0],
        kernels={name: us / work.per_call for name, (_, us) in kernels.items()},
        launches=sum(count for count, _ in kernels.values()) / work.per_call,
    )


def walls_in_turn(works: Sequence[Work], repeats: int) -> list[list[float]]:
    """Microseconds of a layer by the clock, `repeats` of each work, one after the other in turn.

    Two calls of each, with the compilation, do not count.
    """
    for work in works:
        for _ in range(2):
            jax.block_until_ready(work.step(*work.args))
    walls: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, own in zip(works, walls, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(work.step(*work.args))
            own.append((time.perf_counter() - began) / work.per_call * 1e6)
    return walls


def kernel_us(step: Callable, *args) -> dict[str, tuple[int, float]]:
    """Name -> (launches, microseconds on the device) of the kernels of one call, warmed up before.

    Numbers that XLA appends to a name are left out. Empty where jax runs on no GPU.
    """
    if jax.default_backend() != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*args))
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = [
            (event.name, event.duration_ns)
            for plane in ProfileData.from_file(file).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    by_name = defaultdict(list)
    for name, duration in events:
        by_name[name.rstrip("_0123456789")].append(duration / 1e3)
    return {name: (len(d), sum(d)) for name, d in sorted(by_name.items())}

"""How times are taken on a GPU: inside one jit, launches as in serving."""

import glob
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

MIB = 1 << 20


def median_us(step: Callable, *args, repeats: int = 20, per_call: int = 1) -> tuple[float, float]:
    """Median and spread (of the middle half), in microseconds, of one of `per_call` parts.

    `step` is jitted and returns something that depends on all its work. The first two calls, with
    the compilation, do not count.
    """
    for _ in range(2):
        jax.block_until_ready(step(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append((time.perf_counter() - began) / per_call * 1e6)
    times.sort()
    middle = times[len(times) // 4 : len(times) - len(times) // 4]
    return statistics.median(times), middle[-1] - middle[0]


def kernel_us(step: Callable, *args) -> dict[str, tuple[int, float]]:
    """Name -> (launches, median microseconds on the device) of the kernels of one call.

    The entry "busy" is the sum of all, "span" the time from the first to the end of the last.
    """
    for _ in range(2):
        jax.block_until_ready(step(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*args))
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = [
            (event.name, event.start_ns, event.duration_ns)
            for plane in ProfileData.from_file(file).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    by_name = defaultdict(list)
    for name, _, duration in events:
        by_name[name].append(duration / 1e3)
    table = {name: (len(d), statistics.median(d)) for name, d in sorted(by_name.items())}
    first = min(start for _, start, _ in events)
    last = max(start + duration for _, start, duration in events)
    table["busy"] = (len(events), sum(d for _, _, d in events) / 1e3)
    table["span"] = (1, (last - first) / 1e3)
    return table


def copy_bandwidth(mib: int = 256) -> float:
    """Bytes per second that a copy of `mib` MiB reads and writes."""
    x = jnp.ones((mib * MIB // 4,), jnp.float32)

    @jax.jit
    def copies(x):
        return jax.lax.fori_loop(0, 16, lambda _, x: x + 1, x)

    us, _ = median_us(copies, x, per_call=16)
    return 2 * mib * MIB / (us * 1e-6)

"""Device times of the kernels of one call, from the profiler."""

import glob
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable

import jax
from jax.profiler import ProfileData


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

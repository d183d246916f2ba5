"""The constants of the byte model, measured on the machine at hand."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from scute_jax.byte_model import Machine
from scute_jax.kernels.launch_probe import one_block

MIB = 1 << 20
CACHE = {  # bytes of the last cache, by what jax calls the device; NVIDIA's data sheets
    "NVIDIA H200": 60 * MIB,
    "NVIDIA H100 80GB HBM3": 50 * MIB,
    "NVIDIA A100-SXM4-80GB": 40 * MIB,
    "NVIDIA RTX A6000": 6 * MIB,
}
OTHER_CACHE = 32 * MIB
CHAIN = 200  # launches in a row


def measure() -> Machine:
    """Copies and a chain of launches, a second or two on a GPU.

    Bandwidth: a copy of 256 MiB, bytes read plus written. Cache: the fastest of copies of 1/16, 1/8
    and 1/4 of it. Launch: a chain of 200 kernels of one block.
    """
    name = jax.devices()[0].device_kind
    cache = CACHE.get(name, OTHER_CACHE)
    return Machine(
        name=name,
        bandwidth=copy_bandwidth(256 * MIB),
        cache_bandwidth=max(copy_bandwidth(cache // part) for part in (16, 8, 4)),
        cache_bytes=cache,
        launch=_launch_seconds(),
    )


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


def copy_bandwidth(size: int) -> float:
    """Bytes per second that a copy of `size` bytes reads and writes."""
    copies, rounds = 40, 1 if size >= 64 * MIB else 5
    x = jnp.ones((size // 4,), jnp.float32)
    chain = _chain(lambda x: x + 1, copies, rounds)
    us, _ = median_us(chain, x, repeats=7, per_call=copies * rounds)
    return 2 * size / (us * 1e-6)


def _launch_seconds() -> float:
    chain = _chain(one_block, CHAIN, 10)
    us, _ = median_us(chain, jnp.zeros((32,), jnp.float32), per_call=CHAIN * 10)
    return us * 1e-6


def _chain(step: Callable, launches: int, rounds: int) -> Callable:
    """`rounds` times `launches` kernels, one after the other, in one call.

    They are written out: a loop of a single kernel is started by the host, once each round.
    """

    def one(_, x: jax.Array) -> jax.Array:
        for _ in range(launches):
            x = jax.lax.optimization_barrier(step(x))
        return x

    return jax.jit(lambda x: jax.lax.fori_loop(0, rounds, one, x))

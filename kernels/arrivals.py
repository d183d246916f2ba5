"""How programs of one launch of a Triton kernel count each other: to wait for them, or to find out
that all the others are done. The counts are an argument that the launch overwrites."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from scute_jax.kernels.triton import pallas_call

COUNTS = 1024  # of one launch: enough for four blocks of ranks on three slices at 80 tiles
MOST_ARRAYS = 128  # that one launch makes: it has room for so many arguments

Counts = Int[Array, "counts"]


def zero_counts(n: int) -> tuple[Counts, ...]:
    """Counts for n launches, each an array of its own, made in as few launches as can be."""
    interpret = jax.default_backend() != "gpu"
    made: tuple[Counts, ...] = ()
    while len(made) < n:
        made += _zero_counts(min(n - len(made), MOST_ARRAYS), interpret)
    return made


def enough(counts: Counts | None, n: int) -> Counts:
    """The counts given if they are enough, else some that a launch of its own makes here."""
    return jnp.zeros((n,), jnp.int32) if counts is None or counts.shape[0] < n else counts


def arrive(counts_ref, i, interpret: bool):
    """Counts this program at i, and returns how many were before. All its threads have written by
    then; what those before have written may be read after a `barrier`."""
    barrier(interpret)
    return plgpu.atomic_add(counts_ref, (jnp.int32(i),), jnp.int32(1))


def wait(counts_ref, i, n: int, interpret: bool) -> None:
    """Returns when n programs are counted at i, and what they have written may be read."""

    def look(_):
        return plgpu.load(counts_ref.at[(jnp.int32(i),)], volatile=True)

    seen = jax.lax.while_loop(lambda seen: seen < n, look, jnp.int32(0))
    # Adds 0, so written that the loop stays; acquires what was written before the count.
    plgpu.atomic_add(counts_ref, (jnp.int32(i),), jnp.minimum(seen, 0))
    barrier(interpret)


def barrier(interpret: bool) -> None:
    if not interpret:
        plgpu.debug_barrier()


@partial(jax.jit, static_argnames=("n", "interpret"))
def _zero_counts(n: int, interpret: bool) -> tuple[Counts, ...]:
    def kernel(*refs):
        for ref in refs:
            plgpu.store(ref.at[jnp.arange(COUNTS)], jnp.zeros((COUNTS,), jnp.int32))

    shapes = [jax.ShapeDtypeStruct((COUNTS,), jnp.int32)] * n
    name, how = "zero_counts", {"num_warps": 4, "num_stages": 1, "interpret": interpret}
    return tuple(pallas_call(kernel, name=name, grid=(1,), out_shape=shapes, **how)())

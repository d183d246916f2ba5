"""What tells that the device has no memory left."""

import jax


class OutOfDeviceMemory(RuntimeError):
    """One adapter found no room on the device; the message says whose and what to do."""


def out_of_memory(error: BaseException) -> bool:
    """Whether jax could not allocate what a step or a copy needed."""
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, OutOfDeviceMemory)

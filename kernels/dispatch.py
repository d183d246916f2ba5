"""The one place that decides which implementation of an op runs, and how it is differentiated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax

Implementation = Literal["reference", "pallas"]


@dataclass(frozen=True)
class Op:
    """An op with its definition and its Pallas twin, which have one signature.

    The twin also takes `interpret`: kernels run interpreted where there is no GPU. Its gradient is
    that of the definition. It should be jitted by itself: a model calls it once per layer, and only
    a jitted function is traced and compiled once for all calls of one shape. `cotangent` turns that
    of the twin's result into that of the definition's, where they differ in shape.
    """

    name: str
    reference: Callable
    pallas: Callable
    cotangent: Callable = lambda cotangent: cotangent

    def __call__(self, *args, implementation: Implementation | None = None):
        """The op by the implementation asked for; None = the best that this machine has: "pallas"
        where jax runs on an NVIDIA GPU, "reference" elsewhere.

        Raises: ValueError for a name that is no implementation.
        """
        if not runs_pallas(implementation, self.name):
            return self.reference(*args)
        interpret = jax.default_backend() != "gpu"
        return _differentiable(self, interpret)(*args)


def runs_pallas(implementation: Implementation | None, name: str = "implementation") -> bool:
    """Whether this choice means the Pallas twins here; None leaves it to the machine."""
    if implementation not in (None, "reference", "pallas"):
        raise ValueError(
            f"{name}: implementation={implementation!r} is not one of 'pallas', 'reference'."
        )
    return implementation == "pallas" or (implementation is None and jax.default_backend() == "gpu")


def _differentiable(op: Op, interpret: bool) -> Callable:
    @jax.custom_vjp
    def call(*args):
        return op.pallas(*args, interpret=interpret)

    def forward(*args):
        return call(*args), args

    def backward(args, cotangent):
        return jax.vjp(op.reference, *args)[1](op.cotangent(cotangent))

    call.defvjp(forward, backward)
    return call

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
    a jitted function is traced and compiled once for all calls of one shape.
    """

    name: str
    reference: Callable
    pallas: Callable

    def __call__(self, *args, implementation: Implementation | None = None):
        """The op by the implementation asked for; None = the best that this machine has: "pallas"
        where jax runs on an NVIDIA GPU, "reference" elsewhere.

        Raises: ValueError for a name that is no implementation.
        """
        on_gpu = jax.default_backend() == "gpu"
        if implementation is None:
            implementation = "pallas" if on_gpu else "reference"
        if implementation == "reference":
            return self.reference(*args)
        if implementation == "pallas":
            return _differentiable(self.pallas, self.reference, interpret=not on_gpu)(*args)
        raise ValueError(
            f"{self.name}: implementation={implementation!r} is not one of 'pallas', 'reference'."
        )


def _differentiable(twin: Callable, reference: Callable, interpret: bool) -> Callable:
    @jax.custom_vjp
    def op(*args):
        return twin(*args, interpret=interpret)

    def forward(*args):
        return op(*args), args

    def backward(args, cotangent):
        return jax.vjp(reference, *args)[1](cotangent)

    op.defvjp(forward, backward)
    return op

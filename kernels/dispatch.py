"""The one place that decides which implementation of an op runs."""

from collections.abc import Callable, Mapping
from typing import Literal

import jax

Implementation = Literal["reference", "pallas"]


def choose(
    op: str, twins: Mapping[str, Callable], implementation: Implementation | None
) -> Callable:
    """The function that computes `op`: the one asked for, or the best that this machine has.

    None means "pallas" where the default device is an NVIDIA GPU and "reference" elsewhere.
    Raises: ValueError for a name that is no implementation.
    """
    if implementation is None:
        implementation = "pallas" if jax.default_backend() == "gpu" else "reference"
    if implementation not in twins:
        raise ValueError(
            f"{op}: implementation={implementation!r} is not one of {', '.join(sorted(twins))}."
        )
    return twins[implementation]

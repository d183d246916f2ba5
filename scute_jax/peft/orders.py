"""Blocks over permuted coordinates, their order named by its content."""

import numpy as np
from jaxtyping import Float, Int

from scute_jax.identity import content_version
from scute_jax.normal_form import Blocks


def permuted(values: Float[np.ndarray, "d/m m m"], order: Int[np.ndarray, "d"]) -> Blocks:
    """The blocks on x[order[0]], x[order[1]], ...; without an order if it changes nothing.

    Dtypes: float32. Equal orders have equal keys, whatever method made them.
    """
    values = np.asarray(values, np.float32)
    if np.array_equal(order, np.arange(len(order))):
        return Blocks(values)
    order = np.ascontiguousarray(order, np.int32)
    return Blocks(values, order, content_version([order]))

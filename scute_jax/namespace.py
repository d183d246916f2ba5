"""Where arrays are computed: numbers of a checkpoint on the host, traced ones wherever jax is."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np


def namespace(*arrays: Any) -> ModuleType:
    """numpy if every array is numpy's (loading then needs no device), jax.numpy otherwise.

    Python numbers and None do not count.
    """
    host = all(isinstance(a, np.ndarray | np.generic | int | float | None) for a in arrays)
    return np if host else jnp

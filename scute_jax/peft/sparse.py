"""The places of the entries of a sparse matrix, as checkpoints hold them."""

import numpy as np
from jaxtyping import Int

from scute_jax.peft.site import Shape, Site


def indices(site: Site, name: str, shape: Shape, limits: tuple[int, ...]) -> Int[np.ndarray, "..."]:
    """A tensor of indices, row i of it (or all of it) from 0 to limits[i] - 1, int32.

    Integers, or whole numbers in float32, which PEFT writes on Windows.
    Raises: AdapterError naming the tensor for anything else.
    """
    held = site.tensor(name, shape, integer=site.is_integer(name))
    whole = np.rint(held).astype(np.int64)
    bounds = np.array(limits).reshape(-1, *(1,) * (len(shape) - 1))
    if (whole != held).any() or (whole < 0).any() or (whole >= bounds).any():
        site.refuse(
            f"{name} has to hold whole numbers from 0 to {' and '.join(str(n - 1) for n in limits)}"
            ", the places of the entries in this weight; was the adapter made for another model?"
        )
    return whole.astype(np.int32 if max(limits) < 2**31 else np.int64)

"""Torch's CPU random numbers without torch, bit for bit.

Source: aten/src/ATen/core/MT19937RNGEngine.h and DistributionsHelper.h of PyTorch. The generator is
MT19937 seeded by Knuth's rule with the low 32 bits of the seed, which is numpy's legacy seeding.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

SMALL_PERMUTATION = (2**32 - 1) // 20  # from here on, torch.randperm follows another rule


class TorchGenerator:
    """torch.Generator("cpu").manual_seed(seed)."""

    def __init__(self, seed: int):
        state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
        self._bits = np.random.MT19937()
        self._bits.state = state

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Float[np.ndarray, "..."]:
        """torch.empty(shape).uniform_(low, high, generator=self), float32.

        u (high - low) + low with u of 24 random bits. Torch rounds once, since its loop is compiled
        to fused multiply-adds; in float64 all is exact before the one rounding that is left here,
        as long as low is 0, -high or of its size. What is rounded to `high` becomes `low`.
        """
        low32, high32 = np.float32(low), np.float32(high)
        bits = self._bits.random_raw(math.prod(shape)).reshape(shape) & 0xFFFFFF
        uniform = bits.astype(np.float64) * 2.0**-24
        uniform *= np.float64(high32 - low32)
        uniform += np.float64(low32)
        rounded = uniform.astype(np.float32)
        rounded[rounded == high32] = low32
        return rounded

    def kaiming_uniform(self, shape: tuple[int, int]) -> Float[np.ndarray, "rows columns"]:
        """Uniform in +-sqrt(6 / columns): _kaiming_init of peft/tuners/vera/model.py."""
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
        return self.uniform(shape, -bound, bound)

    def permutation(self, n: int, count: int) -> Int[np.ndarray, "count"]:
        """torch.randperm(n, generator=self)[:count], for n < SMALL_PERMUTATION.

        Fisher and Yates from the front: place i is exchanged with place i + draw % (n - i), so the
        first places are final after as many draws. Source: randperm_cpu of TensorFactories.cpp.
        """
        draws = self._bits.random_raw(min(count, n - 1)).astype(np.int64)
        order: dict[int, int] = {}  # what is not at its own place
        taken = []
        for i, draw in enumerate(draws.tolist()):
            z = i + draw % (n - i)
            taken.append(order.get(z, z))
            order[z] = order.pop(i, i)
        if count == n:  # the last one is left over
            taken.append(order.get(n - 1, n - 1))
        return np.array(taken, np.int64)

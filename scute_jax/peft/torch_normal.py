"""Torch's normal random numbers on the CPU, without torch: the draws are its own, to the last bits.

Source: aten/src/ATen/native/cpu/DistributionTemplates.h and
aten/src/ATen/core/DistributionsHelper.h of PyTorch. Torch takes logarithm, sine and cosine from
what the CPU offers, so its numbers differ between machines by about 1e-7 of the largest, and from
these by as much.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

GROUP = 16  # numbers that Box and Muller's rule makes at a time
HALF = GROUP // 2


def torch_normal(seed: int, shape: tuple[int, ...], std: float) -> Float[np.ndarray, "..."]:
    """torch.normal(0.0, std, shape, generator=torch.Generator().manual_seed(seed)), float32."""
    state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
    bits: Any = np.random.MT19937()
    bits.state = state
    count = math.prod(shape)
    if count < GROUP:
        return (_one_by_one(bits, count) * std).astype(np.float32).reshape(shape)
    whole = count // GROUP * GROUP
    numbers = _box_muller(_uniform(bits, count)[:whole], np.float32(std))
    if count > whole:  # the last group is drawn anew and overlaps the one before
        last = _box_muller(_uniform(bits, GROUP), np.float32(std))
        numbers = np.concatenate([numbers[: count - GROUP], last])
    return numbers.reshape(shape)


def _uniform(bits: Any, count: int) -> Float[np.ndarray, "count"]:
    return (bits.random_raw(count) & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)


def _box_muller(uniform: Float[np.ndarray, "count"], std: np.float32) -> Float[np.ndarray, "count"]:
    """In float32. The first half of a group holds radii, the second angles; then cosines, sines."""
    radii, angles = np.moveaxis(uniform.reshape(-1, 2, HALF), 1, 0)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - radii))
    angle = np.float32(2 * math.pi) * angles
    pairs = np.stack([radius * np.cos(angle) * std, radius * np.sin(angle) * std], axis=1)
    return pairs.reshape(-1)


def _one_by_one(bits: Any, count: int) -> Float[np.ndarray, "count"]:
    """In float64, from two draws of 53 bits for every two numbers."""
    high, low = np.moveaxis(bits.random_raw(2 * (count + count % 2)).reshape(-1, 2, 2), 2, 0)
    uniform = (((high << 32) | low) & ((1 << 53) - 1)) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:, 1]))
    angle = 2 * math.pi * uniform[:, 0]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]

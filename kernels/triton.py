"""What all kernels on Pallas' Triton backend share; nothing outside this folder knows of it."""

import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Upstream warns at each lowering that this backend will go. We know, and users can do nothing.
warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*")

MIN_SIDE = 16  # the narrowest side of a product


def power_of_two(n: int) -> int:
    """The least power of two that is at least n: sides of blocks have to be such."""
    return 1 << max(0, n - 1).bit_length()


def pallas_call(
    kernel: Callable,
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Callable:
    """`kernel` with whole arrays as refs; nested tuples of arguments are flattened."""
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )
    return lambda *args: call(*jax.tree.leaves(args))


class TileRows:
    """The rows of one tile: where they start, which of the places of a block they fill.

    A tile of one row needs no tensor cores, which would have to be filled with zeros (`one`).
    """

    def __init__(self, tile, start_ref, rows_ref, size: int):
        self.one = size == 1
        self.size = 1 if self.one else max(MIN_SIDE, power_of_two(size))
        self.tile, self.count, self.place = tile, rows_ref[tile], jnp.arange(self.size)
        self.start = start_ref[tile]
        self.row, self.held = self.start + self.place, self.place < self.count

    def of(self, ref, columns, inside):
        """These rows of an array at some columns, and the mask of what is there of them."""
        at = ref.at[self.row[:, None], columns[None, :]]
        return at, self.held[:, None] & inside[None, :]

"""What all kernels on Pallas' Mosaic GPU backend (Hopper) share; it is imported by them alone.

A program is one warpgroup and has tiles of 64 rows, the rows of one WGMMA.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of one WGMMA, and of a tile
SENT = (64, *3 * (16,), *3 * (4,), *3 * (1,))  # rows of copies from shared memory, in their order
SWIZZLE = 128  # bytes of a row of a piece: arrays of rows lie in shared memory in such pieces
INTERPRETER: Any = getattr(plgpu, "InterpretGPUParams", None)  # of newer versions of jax
HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))


def kernel(body, *, name: str, grid: dict[str, int], interpret: bool, **outputs):
    """`pl.kernel` of one warpgroup for each place of a grid of named axes, the last the fastest."""
    return pl.kernel(
        body,
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=INTERPRETER() if interpret else False,
        **outputs,
    )


def piece_width(dtype) -> int:
    """The columns of a piece."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def pieces(dtype, columns: int) -> list:
    """Shared memory for the rows of a tile at some columns."""
    width = piece_width(dtype)
    swizzle = plgpu.SwizzleTransform(SWIZZLE)
    piece = plgpu.SMEM((ROWS, width), dtype, transforms=(swizzle,))
    return [piece for _ in range(columns // width)]


def tiled(shape: tuple[int, int], dtype, width: int):
    """Shared memory that a WGMMA can read, in tiles of `width` columns."""
    swizzle = plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), swizzle))


def barriers(count: int):
    return plgpu.Barrier(num_arrivals=1, num_barriers=count)


def load(ref, layout):
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def plus_products(y, products, interpret: bool):
    """y in WGMMA layout, plus the product of each (columns, left, right) at these columns of y.

    The sum starts with y, so that no more than it is held in registers: many programs fit then.
    """
    if interpret:  # the interpreter's accumulators start with zero, and take no left in registers
        for at, left, right in products:
            first, end, _ = at.indices(y.shape[1])
            product = left[...].astype(jnp.float32) @ right[...].astype(jnp.float32)
            y = y + jnp.pad(product, ((0, 0), (first, y.shape[1] - end)))
        return y

    def scope(acc):
        acc[...] = y
        for at, left, right in products:
            plgpu.wgmma(acc.at[:, at], left, right)
        return acc[...]

    return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(y.shape))


def fetch_rows(ref, row, column, pieces_s, bars) -> None:
    """64 rows from `row` on start their way to the pieces, each with a barrier of its own."""
    for j, piece in enumerate(pieces_s):
        at = ref.at[pl.ds(row, ROWS), pl.ds(column + j * piece.shape[1], piece.shape[1])]
        plgpu.copy_gmem_to_smem(at, piece, bars.at[j])


def send_rows(pieces_s, ref, row, column, count, first=0) -> None:
    """`count` rows of the pieces from `first` on start their way to the rows of ref from `row` on.

    A copy has a fixed number of rows, and every program fetches what describes each kind of copy:
    few kinds, then, of which some are made up to three times.
    """
    at = 0
    for some in SENT:

        @pl.when(at + some <= count)
        def _(at=at, some=some):
            for j, piece in enumerate(pieces_s):
                width = piece.shape[1]
                to = ref.at[pl.ds(row + at, some), pl.ds(column + j * width, width)]
                plgpu.copy_smem_to_gmem(piece.at[pl.ds(first + at, some)], to)

        at = jnp.where(at + some <= count, at + some, at)


def sent() -> None:
    """Waits until shared memory is read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# Until jax 0.11, an index has to be given.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_WHOLE = (...,) if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else ()

"""The sparse update on Pallas' Triton backend: h updated in place, without atomic additions.

A program takes one tile of rows and one block of output columns. Neighbouring lanes read
neighbouring entries of one column, `width` at a time, so that what memory delivers is used; each
lane sums what it meets in float32, and the lanes of a column are added up at the end. The rows of a
tile lie side by side in groups (x transposed, by XLA): an entry is read once for a group, and so is
what it meets of x. A tile whose adapter has no matrix is left alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.gather import gather_rows
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class SparseTile:
    """columns: of h in one program; width: entries of a column in one step; rows: of a group."""

    columns: int = 32
    width: int = 32
    rows: int = 4
    num_warps: int = 4
    num_stages: int = 1


@partial(jax.jit, static_argnames=("tile", "interpret"))
def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
    tile: SparseTile | None = None,
    interpret: bool = False,
) -> Float[Array, "t d_out"]:
    """As the reference."""
    tile = tile or tuned(SparseTile, rows=h.shape[0])
    columns = min(tile.columns, power_of_two(h.shape[1]))
    # Looked up here: in the kernel each program would wait for memory once more.
    entry = jnp.where(tiles.rows > 0, sparse.row[tiles.slot], -1)
    x = _grouped(x, tiles, tile.rows)
    (out,) = pallas_call(
        partial(_kernel, columns, tile.width, tiles.size == 1),
        name="sparse_update",
        # Programs side by side meet the same rows of x, which stay near them.
        grid=(pl.cdiv(h.shape[1], columns), tiles.slot.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={3: 0},
    )(entry, tiles.start, tiles.rows, h, x, sparse.starts, sparse.rows, sparse.values)
    return out


def _grouped(x: Float[Array, "t d_in"], tiles: Tiles, most: int) -> Float[Array, "n g d_in rows"]:
    """The rows of each tile in groups of a power of two, at most `most`; others fill them up."""
    if tiles.size == 1:  # as they are, in the order of x
        return jnp.reshape(x, (-1, 1, x.shape[1], 1))
    group = min(most, power_of_two(tiles.size))
    place = jnp.arange(group * pl.cdiv(tiles.size, group), dtype=jnp.int32)
    rows = gather_rows(x, tiles.start[:, None] + place[None, :])
    rows = jnp.reshape(rows, (rows.shape[0], -1, group, x.shape[1]))
    return jnp.swapaxes(rows, 2, 3)


def _kernel(
    columns, width, by_row, entry_ref, start_ref, count_ref, h_ref, x_ref, starts_ref, rows_ref,
    values_ref, out_ref,
):  # fmt: skip
    """entry, start, rows [n]; h [t, d_out]; x [n or, by row, t; groups, d_in, rows]; starts
    [k, d_out + 1]; rows, values [k, z]; the new h."""
    block, i = pl.program_id(0), pl.program_id(1)
    entry, first, held = entry_ref[i], start_ref[i], count_ref[i]
    tile = first if by_row else i

    @pl.when(entry >= 0)
    def _work():
        c = block * columns + jnp.arange(columns)
        inside = c < h_ref.shape[1]
        begin = plgpu.load(starts_ref.at[entry, c], mask=inside, other=0)
        end = plgpu.load(starts_ref.at[entry, c + 1], mask=inside, other=0)
        steps, place = pl.cdiv(jnp.max(end - begin), width), jnp.arange(x_ref.shape[3])

        def add(g, _):
            own = g * place.shape[0] + place
            at, here = (first + own)[None, :], inside[:, None] & (own < held)[None, :]
            y = plgpu.load(h_ref.at[at, c[:, None]], mask=here, other=0.0).astype(jnp.float32)

            def walk(step, sums):
                z = (begin + step * width)[:, None] + jnp.arange(width)[None, :]
                own = z < end[:, None]
                r = plgpu.load(rows_ref.at[entry, z], mask=own, other=0)
                v = plgpu.load(values_ref.at[entry, z], mask=own, other=0.0).astype(jnp.float32)
                at = x_ref.at[tile, g, r[:, :, None], place[None, None, :]]
                x = plgpu.load(at, mask=own[:, :, None], other=0.0).astype(jnp.float32)
                return sums + x * v[:, :, None]

            zeros = jnp.zeros((columns, width, place.shape[0]), jnp.float32)
            total = jnp.sum(jax.lax.fori_loop(0, steps, walk, zeros), axis=1)
            plgpu.store(out_ref.at[at, c[:, None]], (y + total).astype(out_ref.dtype), mask=here)

        jax.lax.fori_loop(0, pl.cdiv(held, place.shape[0]), add, None)

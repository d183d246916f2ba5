"""The sparse update on Pallas' Triton backend: h updated in place, without atomic additions.

A program takes one tile of rows and one block of output columns. Neighbouring lanes read
neighbouring entries of one column, `width` at a time, so that what memory delivers is used; each
lane sums what it meets in float32, and the lanes of a column are added up at the end. Entries are
read once for `rows` rows. A tile whose adapter has no matrix is left alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@dataclass(frozen=True)
class SparseTile:
    """columns: of h in one program; width: entries of a column in one step; rows: at a time."""

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
    pool = (sparse.starts, sparse.rows, sparse.values, sparse.row)
    columns = min(tile.columns, power_of_two(h.shape[1]))
    (out,) = pallas_call(
        partial(_kernel, columns, tile.width, min(tile.rows, tiles.size)),
        name="sparse_update",
        grid=(tiles.slot.shape[0], pl.cdiv(h.shape[1], columns)),
        out_shape=[jax.ShapeDtypeStruct(h.shape, h.dtype)],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={3: 0},
    )(tiles.slot, tiles.start, tiles.rows, h, x, *pool)
    return out


def _kernel(
    columns, width, group, slot_ref, start_ref, count_ref, h_ref, x_ref, starts_ref, rows_ref,
    values_ref, row_ref, out_ref,
):  # fmt: skip
    """slot, start, rows [n]; h [t, d_out]; x [t, d_in]; starts [k, d_out + 1]; rows, values [k, z];
    row [K]; the new h."""
    i, block = pl.program_id(0), pl.program_id(1)
    first, held = start_ref[i], count_ref[i]
    entry = row_ref[slot_ref[i]]

    @pl.when((held > 0) & (entry >= 0))
    def _work():
        c = block * columns + jnp.arange(columns)
        inside = c < h_ref.shape[1]
        begin = plgpu.load(starts_ref.at[entry, c], mask=inside, other=0)
        end = plgpu.load(starts_ref.at[entry, c + 1], mask=inside, other=0)
        steps = pl.cdiv(jnp.max(end - begin), width)

        def add(g, _):
            places = [g * group + k for k in range(group)]

            def walk(step, sums):
                z = (begin + step * width)[:, None] + jnp.arange(width)[None, :]
                own = z < end[:, None]
                r = plgpu.load(rows_ref.at[entry, z], mask=own, other=0)
                v = plgpu.load(values_ref.at[entry, z], mask=own, other=0.0).astype(jnp.float32)

                def product(place):
                    x = plgpu.load(x_ref.at[first + place, r], mask=own & (place < held), other=0.0)
                    return x.astype(jnp.float32) * v

                return tuple(s + product(p) for s, p in zip(sums, places, strict=True))

            zeros = (jnp.zeros((columns, width), jnp.float32),) * group
            sums = jax.lax.fori_loop(0, steps, walk, zeros)
            for place, total in zip(places, sums, strict=True):
                here = inside & (place < held)
                y = plgpu.load(h_ref.at[first + place, c], mask=here, other=0.0)
                y = y.astype(jnp.float32) + jnp.sum(total, axis=1)
                plgpu.store(out_ref.at[first + place, c], y.astype(out_ref.dtype), mask=here)

        jax.lax.fori_loop(0, pl.cdiv(held, group), add, None)

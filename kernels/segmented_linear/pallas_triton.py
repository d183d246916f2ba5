"""The product with frozen weights and what rides on it, on Pallas' Triton backend: one launch.

The first programs of the grid shrink, as in `segmented_shrink`. Each of the others multiplies all
rows with one block of output columns of one slice, over one part of d_in, and adds low B tile by
tile while the sums are still in registers: h is neither written nor read in between, and the shrink
is done by the time that its result is asked for. The parts share out the tiles. Where no s has to
wait for the whole sum, some programs add low B before their product ends, so that not all of them
leave the memory idle at once.

A program waits for low until all programs that shrink are counted. Those wait for nobody, and a GPU
starts programs in their order, so that the wait ends.
"""

from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors, most_ranks
from scute_jax.kernels.precision import precision
from scute_jax.kernels.rank_blocks import RankBlocks, block_size
from scute_jax.kernels.segmented_linear.plan import LinearTile, Plan
from scute_jax.kernels.segmented_shrink.pallas_triton import shrink_block
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, TileRows, pallas_call, power_of_two
from scute_jax.kernels.tuning import tuned


@partial(jax.jit, static_argnames=("tile", "interpret"))
def segmented_linear(
    xs: tuple[Float[Array, "t d_in"], ...],
    x: Float[Array, "t d_in"],
    weights: tuple[Float[Array, "d_in d_out"], ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    tile: LinearTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "parts t d_out"], ...]:
    """As the reference, in parts; all pools are at tiles."""
    (t, d_in), outs = x.shape, [W.shape[1] for W in weights]
    tile = tile or tuned(LinearTile, rows=t, columns=sum(outs))
    plan = Plan.make(tile, d_in, outs, factors, tiles, interpret)
    shapes = plan.results(t, outs, factors)
    results, results_tree = jax.tree.flatten(shapes)
    slices = list(zip(xs, weights, factors, scale, shift, strict=True))
    counts = [jnp.zeros(count.shape, count.dtype) for count in shapes["counts"]]
    args, tree = jax.tree.flatten((counts, tiles.start, tiles.rows, x, slices))
    made = pallas_call(
        partial(_kernel, plan, tree, results_tree),
        name="segmented_linear",
        grid=(plan.programs,),
        out_shape=results,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={0: 0} if counts else {},
    )(*args)
    return tuple(jax.tree.unflatten(results_tree, made)["outs"])


def _kernel(plan, tree, results_tree, *refs):
    """The arguments flattened as `tree` says: counts, start, rows [n], x [t, d_in], what each slice
    reads; the results of the plan."""
    _, start_ref, rows_ref, x_ref, slices = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    made = jax.tree.unflatten(results_tree, refs[tree.num_leaves :])
    program = pl.program_id(0)
    if plan.shrinking:

        @pl.when(program < plan.shrinking)
        def _shrink():
            rows = TileRows(_tile(plan, program), start_ref, rows_ref, plan.size)
            _shrink_all(plan, program, rows, x_ref, slices, made["lows"])
            _barrier(plan)  # all threads have written their part of low
            plgpu.atomic_add(made["counts"][0], (jnp.int32(0),), jnp.int32(1))

    column = (program - plan.shrinking) % plan.firsts[-1]
    for s, (own, low_ref) in enumerate(zip(slices, made["lows"], strict=True)):
        here = (column >= plan.firsts[s]) & (column < plan.firsts[s + 1])

        @pl.when((program >= plan.shrinking) & here)
        def _multiply(own=own, low_ref=low_ref, s=s):
            rows = _Rows(start_ref, rows_ref, x_ref.shape[0], plan.n)
            block = _Block(plan, rows, s, column, (program - plan.shrinking) // plan.firsts[-1])
            block.store(made["outs"][s], block.product(*own, low_ref, made))


def _tile(plan, program):
    return program // plan.firsts_low[-1] % plan.n


def _shrink_all(plan, program, rows, x_ref, slices, lows):
    """One block of ranks of one slice, one tile of rows, one part of d_in."""
    which, part = program % plan.firsts_low[-1], program // (plan.firsts_low[-1] * plan.n)
    for s, ((_, _, f, _, _), low_ref) in enumerate(zip(slices, lows, strict=True)):
        if f is None:
            continue
        here = (which >= plan.firsts_low[s]) & (which < plan.firsts_low[s + 1])

        @pl.when(here & (rows.count > 0))
        def _slice(f=f, low_ref=low_ref, first=plan.firsts_low[s]):
            size = block_size(f, plan.tile.shrink_r)
            adapter = RankBlocks(f.table, f.rank, rows.tile, f.A.shape[1], size)
            shrink_block(rows, adapter, which - first, plan.spans_low, part, x_ref, f.A, low_ref)


def _wait(plan, made):
    """Returns when all programs that shrink are counted, and their low may be read."""
    (counts_ref,) = made["counts"]

    def look(_):
        return plgpu.load(counts_ref.at[(jnp.int32(0),)], volatile=True)

    seen = jax.lax.while_loop(lambda seen: seen < plan.shrinking, look, jnp.int32(0))
    # Adds 0, so written that the loop stays; acquires what was written before the count.
    plgpu.atomic_add(counts_ref, (jnp.int32(0),), jnp.minimum(seen, 0))
    _barrier(plan)


def _barrier(plan):
    if not plan.interpret:
        plgpu.debug_barrier()


class _Rows:
    """All rows of the batch."""

    def __init__(self, start_ref, rows_ref, t, n):
        self.at = jnp.arange(max(MIN_SIDE, power_of_two(t)))
        self.inside, self.all = self.at < t, self.at.shape[0] == t
        self.start_ref, self.rows_ref, self.n = start_ref, rows_ref, n

    def find_tiles(self):
        """Looks up of each row the tile that it is in (-1 = none) and its place there. Not before
        it is asked for: the first reads of weights would wait for it."""
        i = jnp.arange(power_of_two(self.n))
        start = plgpu.load(self.start_ref.at[i], mask=i < self.n, other=0)
        rows = plgpu.load(self.rows_ref.at[i], mask=i < self.n, other=0)
        mine = (self.at[:, None] >= start[None, :]) & (self.at[:, None] < (start + rows)[None, :])
        self.tile = jnp.max(jnp.where(mine, i[None, :], -1), axis=1)
        self.used = jnp.max(jnp.where(rows > 0, i + 1, 0))  # past it, tiles are empty
        self.place = self.at - jnp.sum(jnp.where(mine, start[None, :], 0), axis=1)

    def of(self, table_ref, other):
        """What a table of tiles says of each row's tile; `other` for rows in none."""
        return plgpu.load(table_ref.at[self.tile], mask=self.tile >= 0, other=other)


class _Block:
    """One part of a block of output columns of slice s, for all rows."""

    def __init__(self, plan, rows, s, column, part):
        self.plan, self.rows, self.column, self.part = plan, rows, column, part
        self.c = (column - plan.firsts[s]) * plan.block_n + jnp.arange(plan.block_n)

    def product(self, x_ref, W_ref, factors, scale, shift, low_ref, made):
        """This part of x W * s + b + low B."""
        base, each = partial(self._base, x_ref, W_ref), self.plan.spans.each
        ride = partial(self._ride, W_ref.shape[1], factors, scale, shift, low_ref, made)
        if factors is None or scale is not None or each == 1:
            return ride(base(0.0))
        turn = each * (2 + self.column % 3) // 4
        return base(ride(base(0.0, last=turn)), first=turn)

    def store(self, out_ref, y):
        mask = self.rows.inside[:, None] & (self.c < out_ref.shape[-1])[None, :]
        plgpu.store(out_ref.at[self.part, self.rows.at[:, None], self.c[None, :]], y, mask=mask)

    def _base(self, x_ref, W_ref, total, **products):
        """The total and this part of x W, or some products of it."""
        (d_in, d_out), rows, spans, c = W_ref.shape, self.rows, self.plan.spans, self.c
        whole = spans.parts * spans.each * spans.block_k == d_in

        def product(j, total):
            k, there = spans.columns(self.part, j)
            # A mask where one is needed only: without, copies are wider.
            of_x = None if whole and rows.all else rows.inside[:, None] & there[None, :]
            full = whole and d_out % c.shape[0] == 0
            of_W = None if full else there[:, None] & (c < d_out)[None, :]
            xs = _load(x_ref.at[rows.at[:, None], k[None, :]], of_x)
            W = _load(W_ref.at[k[:, None], c[None, :]], of_W)
            return total + plgpu.dot(xs, W, precision=precision(W.dtype))

        total = jnp.broadcast_to(jnp.float32(total), (rows.at.shape[0], c.shape[0]))
        return spans.total(product, total, **products)

    def _ride(self, d_out, factors, scale, shift, low_ref, made, y):
        """y * s + b + low B, of which this part does what is its own."""
        rows, inside, parts = self.rows, self.c < d_out, self.plan.spans.parts
        if factors is scale is shift is None:
            return y
        rows.find_tiles()
        if scale is not None:
            y = y + y * self._vector(scale, True, inside)
        if shift is not None:
            y = y + self._vector(shift, self.part == 0, inside)
        if factors is None:
            return y
        _wait(self.plan, made)
        size = block_size(factors, self.plan.tile.block_r)
        blocks = pl.cdiv(most_ranks([factors]), size)
        low = _low(rows, factors, low_ref, 0, size, rows.tile >= 0) if blocks == 1 else None

        def add(q, y):
            z = self.part + parts * q  # a block of ranks, counted over all tiles
            i, b = z // blocks, z % blocks
            own = RankBlocks(factors.table, factors.rank, i, factors.A.shape[1], size).block(b)
            own = replace(own, own=own.own & (rows.rows_ref[i] > 0))
            B = own.load(factors.B, self.c, inside)
            mine = rows.tile == i
            lows = low if blocks == 1 else _low(rows, factors, low_ref, b, size, mine)
            added = plgpu.dot(lows.astype(B.dtype), B, precision=precision(B.dtype))
            return jnp.where(mine[:, None], y + added, y)

        return jax.lax.fori_loop(0, pl.cdiv(rows.used * blocks - self.part, parts), add, y)

    def _vector(self, pool, here, inside):
        """The vector of each row's adapter, zero for rows whose adapter has none."""
        row = self.rows.of(pool.row, -1)
        at = pool.values.at[row[:, None], self.c[None, :]]
        mask = ((row >= 0) & here)[:, None] & inside[None, :]
        return plgpu.load(at, mask=mask, other=0.0).astype(jnp.float32)


def _load(at, mask):
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)


def _low(rows, factors, low_ref, b, size, some):
    """A block of ranks of x A of some rows, zero where a row's adapter has no such rank."""
    ranks = b * size + jnp.arange(size)
    mask = some[:, None] & (ranks[None, :] < rows.of(factors.rank, 0)[:, None])
    at = (rows.tile[:, None], rows.place[:, None], ranks[None, :])
    parts = range(low_ref.shape[0])
    own = (plgpu.load(low_ref.at[(p, *at)], mask=mask, other=0.0) for p in parts)
    return reduce(jnp.add, own)

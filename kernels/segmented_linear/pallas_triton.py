"""The product with frozen weights and what rides on it, on Pallas' Triton backend: one launch.

The first programs of the grid shrink: low = x A, of which each takes one part of d_in, and the last
one to come adds up the parts. Others multiply all rows with one block of output columns of one
slice, over one part of d_in. low B is added in the same sums where d_in is one part; else it has
parts of its own, made by programs of its own, so that the bits of a row do not hang on which tile
it is in. h is neither written nor read in between, and the shrink is
done by the time that its result is asked for. Programs that add low B to their own product do it at
different times, so that not all of them leave the memory idle at once.

A program waits for low until all programs that shrink are counted. Those wait for nobody, and a GPU
starts programs in their order, so that the wait ends.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from scute_jax.kernels.arrivals import Counts, arrive, barrier, enough, wait
from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.precision import precision
from scute_jax.kernels.rank_blocks import RankBlocks
from scute_jax.kernels.segmented_linear.low import Low, add_low_B, store_low, store_zeros
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
    counts: Counts | None = None,
    tile: LinearTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "parts t d_out"], ...]:
    """As the reference, in parts; all pools are at tiles."""
    (t, d_in), outs = x.shape, [W.shape[1] for W in weights]
    tile = tile or tuned(LinearTile, rows=t, depth=d_in, columns=sum(outs))
    plan = Plan.make(tile, d_in, outs, factors, tiles, interpret)
    counted = [enough(counts, plan.counts)] if plan.shrinking else []
    shapes = {"counts": counted, **plan.results(t, outs, factors)}
    results, results_tree = jax.tree.flatten(shapes)
    slices = list(zip(xs, weights, factors, scale, shift, strict=True))
    args, tree = jax.tree.flatten((counted, tiles.start, tiles.rows, x, slices))
    made = pallas_call(
        partial(_kernel, plan, tree, results_tree),
        name="segmented_linear",
        grid=(plan.programs,),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        aliases={0: 0} if plan.shrinking else {},  # "counts" sorts first among the results
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
            tile = program // plan.firsts_low[-1] % plan.n
            rows = TileRows(tile, start_ref, rows_ref, plan.rows)
            _shrink_all(plan, program, rows, x_ref, slices, made)
            arrive(made["counts"][0], 0, plan.interpret)

    column = (program - plan.shrinking) % plan.firsts[-1]
    part = (program - plan.shrinking) // plan.firsts[-1]
    for s, own in enumerate(slices):
        here = (program >= plan.shrinking) & (column >= plan.firsts[s])
        here &= column < plan.firsts[s + 1]

        def block(s=s):
            rows = _Rows(start_ref, rows_ref, x_ref.shape[0], plan.n)
            return _Block(plan, rows, s, column, part, made)

        @pl.when(here & (part < plan.spans.parts))
        def _multiply(block=block, own=own):
            own_block = block()
            own_block.store(own_block.of_product(*own))

        if plan.low_parts:

            @pl.when(here & (part >= plan.spans.parts))
            def _ride(block=block, factors=own[2]):
                own_block = block()
                own_block.store(own_block.of_low(factors))


def _shrink_all(plan, program, rows, x_ref, slices, made):
    """One block of ranks of one slice, one tile of rows, one part of d_in."""
    which, part = program % plan.firsts_low[-1], program // (plan.firsts_low[-1] * plan.n)
    for s, (_, _, f, _, _) in enumerate(slices):
        if f is None:
            continue
        block = which - plan.firsts_low[s]

        @pl.when((block >= 0) & (which < plan.firsts_low[s + 1]))
        def _slice(f=f, s=s, block=block):
            adapter = RankBlocks(f.table, f.rank, rows.tile, f.A.shape[1], plan.low_blocks[s])
            where = made["lows"][s], rows, plan.ranks(s)
            some = (rows.count > 0) & (adapter.rank > block * adapter.size)
            store = partial(store_low, *where)
            if plan.spans_low.parts > 1:
                count = made["counts"][0], 1 + rows.tile * plan.firsts_low[-1] + which
                store = partial(_store_part, plan, made["parts"][s], rows, part, count, store)

            @pl.when(some)
            def _work():
                shrink_block(rows, adapter, block, plan.spans_low, part, x_ref, f.A, store)

            @pl.when(~some & (part == 0))
            def _nothing():
                every = jnp.full((made["lows"][s].shape[0],), True)
                store_zeros(*where, adapter.block(block).ranks, every)


def _store_part(plan, parts_ref, rows, part, count, store, ranks, total):
    """Keeps this part of a product; the last part to come stores the sum of all, in their order."""
    at = rows.tile, rows.place[:, None], ranks[None, :]
    plgpu.store(parts_ref.at[(part, *at)], total)

    @pl.when(arrive(*count, plan.interpret) == plan.spans_low.parts - 1)
    def _sum():
        barrier(plan.interpret)
        own = (plgpu.load(parts_ref.at[(p, *at)]) for p in range(plan.spans_low.parts))
        store(ranks, reduce(jnp.add, own))


class _Rows:
    """All rows of the batch."""

    def __init__(self, start_ref, rows_ref, t, n):
        self.at = jnp.arange(max(MIN_SIDE, power_of_two(t)))
        self.inside, self.all = self.at < t, self.at.shape[0] == t
        self.start_ref, self.rows_ref, self.n = start_ref, rows_ref, n

    def tile(self):
        """The tile that each row is in, -1 = none. Not before it is asked for: the first reads of
        weights would wait for it."""
        start, rows = self._all(self.start_ref, self.rows_ref)
        i = jnp.arange(start.shape[0])
        mine = (self.at[:, None] >= start[None, :]) & (self.at[:, None] < (start + rows)[None, :])
        return jnp.max(jnp.where(mine, i[None, :], -1), axis=1)

    def tiles(self):
        """The number of tiles up to the last one that has rows."""
        (rows,) = self._all(self.rows_ref)
        return jnp.max(jnp.where(rows > 0, jnp.arange(rows.shape[0]) + 1, 0))

    def _all(self, *refs):
        i = jnp.arange(power_of_two(self.n))
        return tuple(plgpu.load(ref.at[i], mask=i < self.n, other=0) for ref in refs)


class _Block:
    """One part of a block of output columns of slice s, for all rows."""

    def __init__(self, plan, rows, s, column, part, made):
        self.plan, self.rows, self.s, self.column, self.part = plan, rows, s, column, part
        self.made = made
        self.c = (column - plan.firsts[s]) * plan.block_n + jnp.arange(plan.block_n)

    def of_product(self, x_ref, W_ref, factors, scale, shift):
        """This part of x W * s + b, and low B where that is not a part of its own."""
        base, each = partial(self._base, x_ref, W_ref), self.plan.spans.each

        def with_slots(product):
            def start():
                return self._vectors(product(), scale, shift, self.c < W_ref.shape[1])

            if factors is None or self.plan.low_parts:
                return start()
            return self._add_low_B(start, factors, 0, self.plan.n)

        if factors is None or scale is not None or self.plan.low_parts or each == 1:
            return with_slots(partial(base, 0.0))
        turn = each * (1 + self.column % 3) // 4  # the shrink is done by then, mostly
        return base(with_slots(partial(base, 0.0, last=turn)), first=turn)

    def of_low(self, factors):
        """A part of low B; zeros for a slice at which nobody has factors."""
        first, each = self.part - self.plan.spans.parts, self.plan.tiles_in_part

        def start():
            return jnp.zeros((self.rows.at.shape[0], self.plan.block_n), jnp.float32)

        if factors is None:
            return start()
        return self._add_low_B(start, factors, first * each, (first + 1) * each)

    def store(self, y):
        out_ref = self.made["outs"][self.s]
        mask = self.rows.inside[:, None] & (self.c < out_ref.shape[-1])[None, :]
        plgpu.store(out_ref.at[self.part, self.rows.at[:, None], self.c[None, :]], y, mask=mask)

    def _add_low_B(self, start, factors, first, last):
        """start() + low B of the tiles first .. last - 1, as soon as low is there."""
        plan, (counts_ref,) = self.plan, self.made["counts"]
        width, low_ref = plan.ranks(self.s), self.made["lows"][self.s]
        low = Low(self.rows, low_ref, factors, width, plan.tile.block_r, self.c, first, last)
        shrunk = partial(wait, counts_ref, 0, plan.shrinking, plan.interpret)
        return add_low_B(low, start, shrunk)

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

    def _vectors(self, y, scale, shift, inside):
        """y * s and, in the first part, + b."""
        if scale is shift is None:
            return y
        tile = self.rows.tile()

        def of(pool, here):
            row = plgpu.load(pool.row.at[tile], mask=tile >= 0, other=-1)
            at = pool.values.at[row[:, None], self.c[None, :]]
            mask = ((row >= 0) & here)[:, None] & inside[None, :]
            return mask, plgpu.load(at, mask=mask, other=0.0).astype(jnp.float32)

        if scale is not None:
            mine, s = of(scale, True)
            y = jnp.where(mine, y + y * s, y)
        return y if shift is None else y + of(shift, self.part == 0)[1]


def _load(at, mask):
    return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0.0)

"""How `segmented_linear` shares its work out among programs; all of it known before they start."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
from jax.experimental import pallas as pl

from scute_jax.kernels.pools import LowRank, most_ranks
from scute_jax.kernels.rank_blocks import block_size
from scute_jax.kernels.spans import Spans
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.triton import MIN_SIDE, power_of_two


@dataclass(frozen=True)
class LinearTile:
    """block_n: output columns of a program; block_k: columns of x in a product; block_r: ranks in a
    product with B. d_in is split into at most `most_parts` so long as there are at most `programs`.
    part_r: ranks of all tiles in a part of low B, where that is not added to a product.
    shrink_r: ranks in a product with A; shrink_k: columns of x in one with 16 ranks, fewer with
    more; shrink_programs: programs that make such products.
    """

    block_n: int = 128
    block_k: int = 64
    block_r: int = 64
    part_r: int = 1024
    programs: int = 264
    most_parts: int = 8
    shrink_k: int = 512
    shrink_r: int = 64
    shrink_programs: int = 256
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Plan:
    """Of the grid, the first `shrinking` programs shrink: a block of ranks of one slice, one of n
    tiles and one part of d_in each. The others multiply: a block of columns of one slice and one
    part of d_in each, or one part of low B: some tiles. Slice s has the blocks from firsts[s] on,
    and firsts_low[s] of ranks.
    """

    tile: LinearTile
    block_n: int
    firsts: tuple[int, ...]
    spans: Spans
    firsts_low: tuple[int, ...]
    low_blocks: tuple[int, ...]  # ranks in a block, of each slice
    spans_low: Spans
    n: int
    rows: int  # of a product of x and A, of which a tile fills some
    interpret: bool

    @classmethod
    def make(
        cls,
        tile: LinearTile,
        d_in: int,
        outs: Sequence[int],
        factors: Sequence[LowRank | None],
        tiles: Tiles,
        interpret: bool,
    ) -> "Plan":
        n = tiles.slot.shape[0]
        block_n = max(MIN_SIDE, min(tile.block_n, power_of_two(max(outs))))
        firsts = tuple(accumulate((pl.cdiv(d, block_n) for d in outs), initial=0))
        low_blocks = tuple(0 if f is None else _low_block(f, tile, tiles) for f in factors)
        blocks = (
            0 if f is None else pl.cdiv(power_of_two(most_ranks([f])), r)
            for f, r in zip(factors, low_blocks, strict=True)
        )
        shrink_k = tile.shrink_k * MIN_SIDE // max(MIN_SIDE, *low_blocks)
        firsts_low = tuple(accumulate(blocks, initial=0))
        wanted = min(tile.most_parts, tile.programs // firsts[-1])
        wanted_low = min(tile.most_parts, tile.shrink_programs // max(1, n * firsts_low[-1]))
        spans, spans_low = (
            Spans.cut(d_in, max(MIN_SIDE, min(block_k, power_of_two(d_in))), most)
            for block_k, most in ((tile.block_k, wanted), (shrink_k, wanted_low))
        )
        rows = max(MIN_SIDE, power_of_two(tiles.size))
        low = firsts_low, low_blocks, spans_low
        return cls(tile, block_n, firsts, spans, *low, n, rows, interpret)

    @property
    def shrinking(self) -> int:
        return self.n * self.firsts_low[-1] * self.spans_low.parts

    @property
    def counts(self) -> int:
        """Counts of programs: of all that shrink, and of those for each tile and block of ranks."""
        return 1 + self.n * self.firsts_low[-1]

    @property
    def low_parts(self) -> int:
        """The parts that are low B; none where it is added to a product.

        A row has low B in the part that its tile is in, and zeros in the others: added up in their
        order, they have the same sum wherever that is.
        """
        apart = self.shrinking > 0 and self.spans.parts > 1
        return pl.cdiv(self.n, self.tiles_in_part) if apart else 0

    @property
    def tiles_in_part(self) -> int:
        width = max(self.ranks(s) for s in range(len(self.low_blocks)))
        return pl.cdiv(self.n, max(1, pl.cdiv(self.n * width, self.tile.part_r)))

    @property
    def programs(self) -> int:
        return self.shrinking + self.firsts[-1] * (self.spans.parts + self.low_parts)

    def results(
        self, t: int, outs: Sequence[int], factors: Sequence[LowRank | None]
    ) -> dict[str, list[jax.ShapeDtypeStruct | None]]:
        """x A of each slice and its parts, and the parts of the result."""
        parts, rows = self.spans.parts + self.low_parts, max(MIN_SIDE, power_of_two(t))
        split, shape = self.spans_low.parts, jax.ShapeDtypeStruct
        lows: list[jax.ShapeDtypeStruct | None] = [None] * len(outs)
        of_parts = list(lows)
        for s, f in enumerate(factors):
            if f is not None:
                width = self.ranks(s)
                lows[s] = shape((rows, self.n * width), f.B.dtype)
                if split > 1:
                    of_parts[s] = shape((split, self.n, self.rows, width), "float32")
        return {
            "lows": lows,
            "parts": of_parts,
            "outs": [shape((parts, t, d), "float32") for d in outs],
        }

    def ranks(self, s: int) -> int:
        """The columns of a tile in x A of slice s: a power of two, so that blocks of ranks hold
        whole tiles, or a tile whole blocks, and the bits of a row do not hang on its tile."""
        return (self.firsts_low[s + 1] - self.firsts_low[s]) * self.low_blocks[s]


def _low_block(factors: LowRank, tile: LinearTile, tiles: Tiles) -> int:
    """The ranks that a program shrinks to: with tiles of one row, in which another program costs
    no further reads of x to speak of, a quarter of what an adapter can have at most."""
    most = power_of_two(most_ranks([factors])) // 4 if tiles.size == 1 else tile.shrink_r
    return block_size(factors, min(tile.shrink_r, most))

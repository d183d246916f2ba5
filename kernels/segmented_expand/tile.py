"""The tile of the segmented expand, by which its backend is chosen as well."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpandTile:
    """block_n: output columns of a program; block_r: ranks in one product.

    mosaic: on Mosaic GPU where that supports the arrays, not on Triton; it uses block_n alone.
    """

    block_n: int = 256
    block_r: int = 16
    num_warps: int = 4
    num_stages: int = 2
    mosaic: bool = False

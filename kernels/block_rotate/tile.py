"""The tile of the input transform, by which its backend is chosen as well."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RotateTile:
    """columns: of x in one program; copy_rows: rows that a copying program takes; narrow_rows:
    rows at a time where blocks are narrow.

    mosaic: on Mosaic GPU where that supports the arrays, not on Triton; it uses columns alone.
    """

    columns: int = 256
    copy_rows: int = 32
    narrow_rows: int = 4
    num_warps: int = 4
    num_stages: int = 2
    mosaic: bool = False

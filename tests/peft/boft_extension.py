"""A stand-in for PEFT's CUDA extension, without which it makes a BOFT of one factor.

A test module that imports `with_extension` has it in all its tests.
"""

import pytest
from peft_oracle import torch


class BlockDiagonal:
    """The forward of peft/tuners/boft/fbd: [z, n, k, k] to the diagonals of [z, n k, n k]."""

    @staticmethod
    def forward(blocks):
        return [torch.stack([torch.block_diag(*factor) for factor in blocks])]


@pytest.fixture(scope="module", autouse=True)
def with_extension():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: BlockDiagonal)
        yield

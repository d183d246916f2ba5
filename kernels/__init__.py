"""The routes of the normal form on plain arrays: for each op a reference and a Pallas twin."""

from scute_jax.kernels.block_rotate import block_rotate, scale_input
from scute_jax.kernels.dispatch import Implementation, runs_pallas
from scute_jax.kernels.embedding_update import embedding_update
from scute_jax.kernels.kronecker_update import kronecker_update
from scute_jax.kernels.paged_attention import paged_attention
from scute_jax.kernels.pools import (
    KroneckerFactors,
    LowRank,
    Rotation,
    Shared,
    SparseEntries,
    TokenTable,
    Vectors,
    at_tiles,
)
from scute_jax.kernels.residual_norm import residual_norm
from scute_jax.kernels.rope_attention import rope_attention
from scute_jax.kernels.segmented_linear import segmented_linear
from scute_jax.kernels.segmented_update import segmented_update
from scute_jax.kernels.shared_factors import shared_factors
from scute_jax.kernels.sparse_update import sparse_update
from scute_jax.kernels.tiles import Tiles, make_tiles
from scute_jax.kernels.token_rows import replace_columns, replace_rows

__all__ = [
    "Implementation",
    "KroneckerFactors",
    "LowRank",
    "Rotation",
    "Shared",
    "SparseEntries",
    "Tiles",
    "TokenTable",
    "Vectors",
    "at_tiles",
    "block_rotate",
    "embedding_update",
    "kronecker_update",
    "make_tiles",
    "paged_attention",
    "replace_columns",
    "replace_rows",
    "residual_norm",
    "rope_attention",
    "runs_pallas",
    "scale_input",
    "segmented_linear",
    "segmented_update",
    "shared_factors",
    "sparse_update",
]

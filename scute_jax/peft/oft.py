"""OFT:  F(x) = (x R) W + bias,   R block-diagonal, each block made from a skew-symmetric Q.

Source: OFT (arXiv:2306.07280) and OFTv2 (arXiv:2506.19847); OFTRotationModule of
peft/tuners/oft/layer.py. Tensor: oft_R.weight [blocks, k (k - 1) / 2], the upper triangles of Q row
by row, k the block size. R by the exact Cayley transform is (I - Q) (I + Q)^-1, by its Neumann
series (the default) I + 2 Q + 2 Q^2 + ..., which is not orthogonal.

Files of PEFT 0.14 and 0.15 hold oft_r [blocks, k, k] = M and oft_s [d_out, 1]:
F(x) = ((x R) W) * s + bias with Q = (M - M^T) / 2 and the exact transform. Those of PEFT 0.7 to
0.13 lack oft_block_size and rotate the output: oft_output.py.
"""

import math
import re

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm
from scute_jax.peft.oft_blocks import Blocks, cayley, eps_of, projected, repeated
from scute_jax.peft.oft_output import of_the_output
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "module_dropout",
    "fan_in_fan_out",
    "init_weights",
    "eps",  # without coft
    "num_cayley_neumann_terms",  # with the exact transform
)
AGREE = 1e-5  # two series are one function if they differ by less than this share of R - I


@register("OFT", live="R", inert=INERT)
def oft(site: Site) -> NormalForm:
    """(x R) W, R = cayley(Q)"""
    if site.option("oft_block_size") is None and site.shape("oft_R.weight") is None:
        return of_the_output(site)
    if site.shape("oft_r") is not None:
        return _of_peft_0_14(site)
    k = block_size(site)
    shared = site.option("block_share", False, kind=bool)
    stored = 1 if shared else site.d_in // k
    Q = skew(site.tensor("oft_R.weight", (stored, k * (k - 1) // 2)).astype(np.float64), k)
    if site.option("coft", False, kind=bool):
        Q = projected(Q, eps_of(site) / math.sqrt(stored))
    return NormalForm(R=repeated(_rotation(site, Q), site.d_in))


def block_size(site: Site) -> int:
    """The block size that PEFT uses at this width: the configured one, or the nearest divisor.

    Source: update_layer of OFTLayer.
    """
    r, k = site.option("r", 0, kind=int), site.option("oft_block_size", kind=int, required=True)
    if min(r, k) < 0 or (r == 0) == (k == 0):
        site.refuse_field("r", f"exactly one of r and oft_block_size ({k}) has to be positive")
    return nearest_divisor(site.d_in, k) if k else site.d_in // nearest_divisor(site.d_in, r)


def nearest_divisor(width: int, wanted: int) -> int:
    """The divisor of width nearest to wanted, the smaller of two; width itself from there on.

    Source: adjust_oft_parameters of OFTLayer.
    """
    if wanted >= width:
        return width
    higher = next(n for n in range(wanted, width + 1) if width % n == 0)
    lower = next(n for n in range(wanted, 0, -1) if width % n == 0)
    return lower if wanted - lower <= higher - wanted else higher


def skew(upper: Float[np.ndarray, "n k*(k-1)/2"], k: int) -> Blocks:
    """Q = U - U^T with the upper triangles U stored row by row."""
    Q = np.zeros((len(upper), k, k), upper.dtype)
    Q[:, *np.triu_indices(k, 1)] = upper
    return Q - np.swapaxes(Q, 1, 2)


def neumann(Q: Blocks, coefficients: tuple[float, ...]) -> Blocks:
    """sum_n coefficients[n] Q^n, by Horner's rule."""
    eye = np.eye(Q.shape[-1])
    R = np.zeros_like(Q)
    for coefficient in reversed(coefficients):
        R = R @ Q + coefficient * eye
    return R


def neumann_coefficients(terms: int, before_0_18: bool = False) -> tuple[float, ...]:
    """Coefficients of PEFT's series: 1, 2, 2, ..., the last power once since 0.18, twice before.

    Source: _cayley_batch of OFTRotationModule. Since 0.18 three terms give what four give.
    """
    if terms < 2:
        return (1.0,)
    if terms == 2 or before_0_18:
        return (1.0, *(2.0,) * (terms - 1))
    return (1.0, *(2.0,) * (max(terms, 4) - 2), 1.0)


def _rotation(site: Site, Q: Blocks) -> Blocks:
    if not site.option("use_cayley_neumann", True, kind=bool):
        return cayley(Q)
    terms = site.option("num_cayley_neumann_terms", 5, kind=int)
    if terms > 1000:
        site.refuse_field("num_cayley_neumann_terms", "needed a small number")
    old, new = (neumann(Q, neumann_coefficients(terms, before)) for before in (True, False))
    before_0_18 = _is_before_0_18(site)
    if (
        before_0_18 is None
        and np.abs(old - new).max() > AGREE * np.abs(new - np.eye(Q.shape[-1])).max()
    ):
        site.refuse_field(
            "peft_version",
            "PEFT before 0.18, which did not state it, weighs the last power of the Neumann series "
            'twice, later versions once; state "0.17.0" or "0.18.0", whichever trained this file',
        )
    if before_0_18:
        site.note("Neumann series of PEFT 0.16 and 0.17: the last power counts twice")
    return old if before_0_18 else new


def _is_before_0_18(site: Site) -> bool | None:
    """Whether peft_version is older than the present Neumann series; None if it does not say."""
    version = site.option("peft_version", kind=str)
    if version is None:
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (found.groups() == ("0", "18") and "dev" in version):
        return None
    return (int(found[1]), int(found[2])) < (0, 18)


def _of_peft_0_14(site: Site) -> NormalForm:
    """The file format of PEFT 0.14 and 0.15: Source: OFTLayer and Linear.forward of 0.15.2."""
    k = block_size(site)
    blocks = site.d_in // k
    stored = 1 if site.option("block_share", False, kind=bool) else blocks
    M = site.tensor("oft_r", (stored, k, k)).astype(np.float64)
    s = site.tensor("oft_s", (site.d_out, 1)).reshape(-1)
    if site.option("coft", False, kind=bool):
        M = projected(M, eps_of(site) * math.ceil(site.d_out / blocks) ** 2 / math.sqrt(stored))
    R = cayley((M - np.swapaxes(M, 1, 2)) / 2)
    bias = site.bias("OFT of PEFT 0.14 leaves it unscaled")
    return NormalForm(R=repeated(R, site.d_in), s=s, b=None if bias is None else bias * (1 - s))

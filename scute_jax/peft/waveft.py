"""WaveFT:  F(x) = x (W + S) + bias,   S^T = scaling times the inverse wavelet transform of C.

Source: WaveFT (arXiv:2505.12532); get_delta_weight of peft/tuners/waveft/layer.py. Tensor:
waveft_spectrum [n], the entries of C. Entry f stands at row u_f and column v_f, the quotient and
the rest of the f-th number of torch.randperm(d_out d_in) by d_in; n is n_frequency, or what
n_frequency_pattern or proportional_parameters give the module.

The transform is one level of a filter pair of L taps in both directions, so an entry of C becomes
L x L entries of S: 4 with the default wavelet db1, and none but itself without use_idwt. S is
served as a sparse matrix with all of them; long wavelets and many entries make it dense.
"""

import numpy as np
from jaxtyping import Float, Int

from scute_jax.normal_form import NormalForm, Sparse
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.torch_random import SMALL_PERMUTATION, TorchGenerator
from scute_jax.peft.vera import checked_seed
from scute_jax.peft.wavelets import FILTERS, high_pass, low_pass

INERT = ("fan_in_fan_out", "init_weights", "wavelet_family")  # the last one without use_idwt

Places = Int[np.ndarray, "n taps"]
Taps = Float[np.ndarray, "n taps"]


@register("WAVEFT", live="S", inert=INERT)
def waveft(site: Site) -> NormalForm:
    """x (W + S), S = c idwt(C)^T"""
    n, field = _frequencies(site), "random_loc_seed"
    seed = checked_seed(site, field, site.option(field, 777, kind=int))
    C = site.tensor("waveft_spectrum", (n,)).astype(np.float64)
    values = site.option("scaling", 25.0, kind=float) * C
    u, v = np.divmod(TorchGenerator(seed).permutation(site.d_out * site.d_in, n), site.d_in)
    if site.option("use_idwt", True, kind=bool):
        low = low_pass(site.option("wavelet_family", "db1", choices=FILTERS))
        assert low is not None
        return NormalForm(S=_transformed(values, u, v, low, site.d_out, site.d_in))
    return NormalForm(S=Sparse(v.astype(np.int32), u.astype(np.int32), values))


def _transformed(
    values: Float[np.ndarray, "n"],
    u: Int[np.ndarray, "n"],
    v: Int[np.ndarray, "n"],
    low: Float[np.ndarray, "taps"],
    d_out: int,
    d_in: int,
) -> Sparse:
    """The sum of values[f] times the outer product of two filters, entries at one place added.

    C is laid into the middle of a frame that leaves room for the filters. Its quarters are the
    bands: PEFT filters the columns (of d_out numbers) with the high pass in the right half of the
    frame, and the rows in the lower half.
    """
    (frame_out, above), (frame_in, before) = (_frame(d, len(low)) for d in (d_out, d_in))
    p, q = u + above, v + before
    cols, along_out = _taps(p % (frame_out // 2), q >= frame_in // 2, low, d_out)
    rows, along_in = _taps(q % (frame_in // 2), p >= frame_out // 2, low, d_in)
    entries = values[:, None, None] * along_in[:, :, None] * along_out[:, None, :]
    flat = rows[:, :, None] * d_out + cols[:, None, :]
    places, which = np.unique(flat, return_inverse=True)
    summed = np.bincount(which.reshape(-1), entries.reshape(-1), len(places))
    row, col = np.divmod(places, d_out)
    return Sparse(row.astype(np.int32), col.astype(np.int32), summed)


def _frame(width: int, taps: int) -> tuple[int, int]:
    """The width of the frame in one direction, even, and how much of it lies in front of C."""
    frame = width + taps - 2
    frame += frame % 2
    return frame, (frame - width) // 2


def _taps(
    index: Int[np.ndarray, "n"], is_high: np.ndarray, low: Float[np.ndarray, "taps"], width: int
) -> tuple[Places, Taps]:
    """Where the filter of each coefficient lies, and its taps; 0 where it leaves the matrix."""
    taps = np.where(is_high[:, None], high_pass(low), low)
    places = 2 * index[:, None] + np.arange(len(low)) - (len(low) - 2)
    inside = (places >= 0) & (places < width)
    return np.where(inside, places, 0), np.where(inside, taps, 0.0)


def _frequencies(site: Site) -> int:
    """n of this module. Source: _create_and_replace of peft/tuners/waveft/model.py."""
    n, size = site.option("n_frequency", 2592, kind=int), site.d_in * site.d_out
    field = "n_frequency"
    if site.option("proportional_parameters", False, kind=bool):
        site.option("n_frequency_pattern")  # has no say then
        total = sum(p.d_in * p.d_out for p in site.targets)
        n = max(1, round(size / total * (n * len(site.targets))))
    else:
        own = site.matching("n_frequency_pattern", n, int)
        n, field = own, field if own == n else "n_frequency_pattern"
    if not 0 < n <= size:
        site.refuse_field(
            field, f"it gives {site.module} {n} entries, needed a number from 1 to {size}"
        )
    if size >= SMALL_PERMUTATION:
        site.refuse(
            f"torch draws the places of the entries by another rule from {SMALL_PERMUTATION} on, "
            f"and this module has {size}; convert the adapter to a LoRA where it was trained."
        )
    return n

"""RandLoRA:  F(x) = x W + bias + c sum_j (((x B_j) * d_j) A) * e_j,   B_j and A random and shared.

Where d_in <= d_out, the other way about:  c sum_j (((x * e_j) A^T) * d_j) B_j^T.

Source: RandLoRA (arXiv:2502.00987); get_scaled_bases of peft/tuners/randlora/layer.py. c is
randlora_alpha / r; j runs over K = ceil(n / r) bases with n = min(d_in, d_out), so that their sum
has full rank. Tensors at each module: randlora_lambda [r, K], whose columns are d_j, and
randlora_gamma [K, n], whose rows are e_j. For the whole adapter, with largest and smallest of the
adapted widths: randlora_A [r, 1, smallest], of which a module uses the first n columns, and
randlora_B [largest, bases, r], of which it uses the first max(d_in, d_out) rows and K bases. PEFT
flattens the bases of B and those of A over rank and base in opposite orders: basis j consists of
columns j, j + K, j + 2 K, ... of the flat B. That mismatch is part of the function.

Files hold a copy of A and B at every module (save_projection, the default), or none. Sparse bases
(sparse, very_sparse) are drawn from projection_prng_key in float32, A before B. Dense ones are
drawn in bfloat16 or float16, whichever the machine of the training had, and releases of torch
differ in how; so a file without them does not say what they are.
"""

import math

import numpy as np
from jaxtyping import Float

from scute_jax.identity import content_version
from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.torch_random import TorchGenerator
from scute_jax.peft.vera import checked_seed, held

INERT = (
    "randlora_dropout",
    "fan_in_fan_out",
    "init_weights",
    "sparse",  # where the bases are saved
    "very_sparse",
    "projection_prng_key",
)
NAMES = ("randlora_A", "randlora_B")

# The bases as matrices: A [r, smallest], B [largest, bases * r], and their digest.
Bases = tuple[Float[np.ndarray, "r D_out"], Float[np.ndarray, "D_in bases*r"], str]


@register("RANDLORA", live="ude", inert=INERT)
def randlora(site: Site) -> NormalForm:
    """x W + c sum_j (((x B_j) * d_j) A) * e_j, or (((x * e_j) A) * d_j) B_j"""
    r = site.option("r", 32, kind=int)
    if r < 1:
        site.refuse_field("r", "needed at least 1")
    c = site.option("randlora_alpha", 640, kind=float) / r
    n, widest = sorted((site.d_in, site.d_out))
    K = -(-n // r)
    d = site.tensor("randlora_lambda", (r, K))
    e = site.tensor("randlora_gamma", (K, n))
    if site.shape("randlora_gamma") is None:
        return NormalForm()  # it is missing, and nothing says that r is a size to draw
    A, B, digest = _bases(site, r)
    key, narrow, flat = f"{digest}:{K}", A[:, :n], B[:widest, : K * r]
    if site.d_in > site.d_out:
        terms = (
            Term(flat[:, j::K], narrow, c=c, d=d[:, j], e=e[j], pair=f"randlora:{key}:{j}")
            for j in range(K)
        )
    else:
        terms = (
            Term(narrow.T, flat[:, j::K].T, c=c, d=d[:, j], u=e[j], pair=f"randlora^T:{key}:{j}")
            for j in range(K)
        )
    return NormalForm(terms=tuple(terms))


def _bases(site: Site, r: int) -> Bases:
    """The bases that all modules share, the copy of them at this one checked."""
    largest, smallest = _widths(site)
    shapes = (r, 1, smallest), (largest, -(-smallest // r), r)
    is_saved = site.option("save_projection", True, kind=bool)
    bases = site.once("bases", lambda: _first(site, shapes, is_saved))
    for name, shape, shared in zip(NAMES, shapes, bases[:2], strict=True):
        own = site.tensor(name, shape, optional=True)
        if own is not None and not np.array_equal(own.reshape(shared.shape), shared):
            site.refuse(
                f"{name} is not the one of the other modules, and PEFT has one for all; save the "
                "adapter again with PEFT."
            )
    return bases


def _widths(site: Site) -> tuple[int, int]:
    """Of the largest input and the largest output that is adapted, the larger and the smaller."""
    d_in, d_out = max(p.d_in for p in site.targets), max(p.d_out for p in site.targets)
    return max(d_in, d_out), min(d_in, d_out)


def _first(site: Site, shapes: tuple, is_saved: bool) -> Bases:
    """The bases as the file holds them for the whole adapter or at this module, or as drawn."""
    found = []
    for name, shape in zip(NAMES, shapes, strict=True):
        whole = site.shared(name, shape, optional=True)
        at_module = site.shape(name) is not None or (whole is None and is_saved)
        found.append(site.tensor(name, shape) if at_module and whole is None else whole)
    if not is_saved:
        drawn = _drawn(site, shapes)
        for name, array, expected in zip(NAMES, found, drawn, strict=True):
            if array is not None and not np.array_equal(array, expected):
                site.refuse_field(
                    "save_projection",
                    f"so PEFT draws {name} from projection_prng_key, but the file holds another "
                    "one; set save_projection to true, or take it out of the file",
                )
        found = drawn
    A, B = (held(array.reshape(len(array), -1).copy()) for array in found)
    return A, B, content_version([A, B])


def _drawn(site: Site, shapes: tuple) -> list[np.ndarray]:
    """randlora_A and randlora_B from the seed: -1, 0 and 1 over their standard deviation.

    Source: _init_randlora_A_randlora_B_sparse of peft/tuners/randlora/model.py.
    """
    if site.option("very_sparse", False, kind=bool):
        sparsity = math.sqrt(_widths(site)[1])
    elif site.option("sparse", False, kind=bool):
        sparsity = 3.0
    else:
        site.refuse_field(
            "save_projection",
            "dense bases are drawn in the half precision that the training machine had, and "
            "releases of torch draw it differently; the file does not say which. Where it was "
            "trained, set save_projection to true in this config, load the adapter with PEFT and "
            "save it again",
        )
    seed = site.option("projection_prng_key", 0, kind=int)
    generator = TorchGenerator(checked_seed(site, "projection_prng_key", seed))
    share = 1 / (2 * sparsity)
    low, high = np.float32(share), np.float32(1 - share)
    drawn = []
    for shape in shapes:
        u = generator.uniform(shape, 0.0, 1.0)
        ternary = (u > high).astype(np.float32) - (u < low).astype(np.float32)
        drawn.append(ternary / np.float32(ternary.std(dtype=np.float64, ddof=1)))
    return drawn

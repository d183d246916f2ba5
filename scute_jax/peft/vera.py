"""VeRA:  F(x) = x W + bias + (((x A) * d) B) * e,   A and B random, shared by all layers.

Source: VeRA eq. 2 (arXiv:2310.11454). Tensors: vera_lambda_d [r] = d and vera_lambda_b [d_out] = e
at each module; for the whole adapter vera_A [r, D_in] and vera_B [D_out, r], where D_in and D_out
are the largest widths among the adapted modules. Each module uses the first d_in columns of vera_A
and the first d_out rows of vera_B. With save_projection=false the two are not in the file but drawn
from projection_prng_key, vera_A before vera_B; so A depends on which modules are adapted, through
D_in, and a larger D_out only adds rows to B.
"""

from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Float

from scute_jax.identity import content_version
from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.torch_random import TorchGenerator

INERT = ("vera_dropout", "d_initial", "fan_in_fan_out", "init_weights")

# Shared matrices in use by loaded adapters, by content: tenants of one pair hold one copy of it.
_MATRICES: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()


@register("VERA", live="de", inert=INERT)
def vera(site: Site) -> NormalForm:
    """x W + (((x A) * d) B) * e"""
    return shared_term(site, "vera")


def shared_term(site: Site, prefix: str, stored: int = 1) -> NormalForm:
    """The form of a method whose tensors are called <prefix>_A, _B, _lambda_d and _lambda_b.

    <prefix>_A and _lambda_d hold `stored` times r entries, of which the first r are used.
    """
    r = site.option("r", kind=int, required=True)
    if r < 1:
        site.refuse_field("r", "needed at least 1")
    d = site.tensor(f"{prefix}_lambda_d", (stored * r,))[:r]
    e = site.tensor(f"{prefix}_lambda_b", (site.d_out,))
    if site.shape(f"{prefix}_lambda_d") is None:
        return NormalForm()  # it is missing, and nothing says that r is a size to draw
    A, B, key = site.once("shared pair", lambda: _pair(site, prefix, r, stored))
    return NormalForm(terms=(Term(A[: site.d_in], B[: site.d_out].T, d=d, e=e, pair=key),))


def _pair(
    site: Site, prefix: str, r: int, stored: int
) -> tuple[Float[np.ndarray, "D_in r"], Float[np.ndarray, "D_out r"], str]:
    """The first r rows of <prefix>_A transposed, <prefix>_B and the key that they go by.

    The key is a digest of both whole matrices: equal keys mean equal arrays at every width that is
    cut from them.
    """
    seed = site.option("projection_prng_key", kind=int)
    saved = site.option("save_projection", True, kind=bool)
    names = f"{prefix}_A", f"{prefix}_B"
    d_ins = {p.d_in for p in site.targets}
    d_outs = {p.d_out for p in site.targets}
    shapes = (stored * r, max(d_ins)), (max(d_outs), r)
    A, B = (site.shared(*named, optional=not saved) for named in zip(names, shapes, strict=True))
    if not saved:
        drawn = _drawn(site, names, seed, *shapes)
        for name, array, expected in zip(names, (A, B), drawn, strict=True):
            if array is not None and not np.array_equal(array, expected):
                site.refuse_field(
                    "save_projection",
                    f"so PEFT draws {name} from projection_prng_key={seed}, but the file holds "
                    "another one; set save_projection to true, or take it out of the file",
                )
        A, B = drawn
    A, B = held(np.ascontiguousarray(A[:r].T)), held(B)
    return A, B, f"vera:{content_version([A, B])}"


def _drawn(
    site: Site, names: tuple[str, str], seed: int | None, shape_A: tuple, shape_B: tuple
) -> tuple:
    if seed is None:
        site.refuse_field(
            "projection_prng_key", f"{' and '.join(names)} are drawn from it; state it"
        )
    generator = TorchGenerator(checked_seed(site, "projection_prng_key", seed))
    return generator.kaiming_uniform(shape_A), generator.kaiming_uniform(shape_B)


def checked_seed(site: Site, field: str, seed: int) -> int:
    """The seed. Raises: AdapterError naming the field if torch would not take it."""
    if not -(2**63) <= seed < 2**64:
        site.refuse_field(field, "torch takes no seed of more than 64 bits")
    return seed


def held(matrix: np.ndarray) -> np.ndarray:
    """The array of this content that is in use already, or this one from now on."""
    owner = matrix if matrix.base is None else matrix.copy()  # what views of it keep alive
    return _MATRICES.setdefault(content_version([owner]), owner)

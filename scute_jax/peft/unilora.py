"""Uni-LoRA:  F(x) = x W + bias + (x A) B,   every number of A and B is one of the vector theta_d.

Source: Uni-LoRA (arXiv:2506.00799); peft/tuners/unilora/model.py. Tensor of the whole adapter:
unilora_theta_d [theta_d_length]. A = theta_d[i] * s with i and s of the shape of A, and B alike.
With save_indices, each module has unilora_indices_A [r, d_in], unilora_scales_A and the same for B
[d_out, r]. Without it they are drawn from proj_seed for all modules together, in their order, A
before B: every index as often as every other or once more, shuffled, and s = 1 / sqrt(how often).
"""

import numpy as np
from jaxtyping import Float, Int

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "unilora_dropout",
    "fan_in_fan_out",
    "init_theta_d_bound",
    "init_weights",
    "proj_seed",  # with save_indices
)

Pair = tuple[Int[np.ndarray, "rows columns"], Float[np.ndarray, "rows columns"]]  # index, scale


@register("UNILORA", inert=INERT)
def unilora(site: Site) -> NormalForm:
    """x W + (x A) B, every number of A and B is one of theta_d times a scale"""
    r, length = (site.option(name, kind=int, required=True) for name in ("r", "theta_d_length"))
    if r < 1 or length < 1:
        site.refuse_field("theta_d_length", f"needed at least 1, and r ({r}), too")
    if site.option("exclude_modules"):
        site.refuse_field("exclude_modules", "Uni-LoRA of PEFT has no such field and ignores it")
    theta = site.shared("unilora_theta_d", (length,))
    (A, A_scale), (B, B_scale) = (_saved if _is_saved(site) else _drawn)(site, r, length)
    return NormalForm(terms=(Term((theta[A] * A_scale).T, (theta[B] * B_scale).T),))


def _is_saved(site: Site) -> bool:
    return site.option("save_indices", False, kind=bool)


def _saved(site: Site, r: int, length: int) -> tuple[Pair, Pair]:
    """Index and scale of A and of B as the file has them."""
    pairs = []
    for side, shape in (("A", (r, site.d_in)), ("B", (site.d_out, r))):
        index = site.tensor(f"unilora_indices_{side}", shape, integer=True)
        if index.min() < 0 or index.max() >= length:
            site.refuse(
                f"unilora_indices_{side} reaches from {index.min()} to {index.max()}; needed "
                f"places in unilora_theta_d, 0 to {length - 1}."
            )
        pairs.append((index, site.tensor(f"unilora_scales_{side}", shape)))
    return pairs[0], pairs[1]


def _drawn(site: Site, r: int, length: int) -> tuple[Pair, Pair]:
    """Index and scale of A and of B as PEFT draws them for all modules."""
    parts, scale = site.once("drawn", lambda: _drawn_for_all(site, r, length))
    A, B = parts[site.module]
    A, B = A.reshape(r, site.d_in), B.reshape(site.d_out, r)
    return (A, scale[A]), (B, scale[B])


def _drawn_for_all(site: Site, r: int, length: int) -> tuple[dict, Float[np.ndarray, "d"]]:
    """Module -> the indices of A and of B, and the scale of every index."""
    seed = site.option("proj_seed", kind=int, required=True)
    if seed < 0:
        site.refuse_field("proj_seed", "needed a seed of numpy, 0 or more")
    counts = [r * width for p in site.targets for width in (p.d_in, p.d_out)]
    index = assignment(sum(counts), length, seed)
    parts = np.split(index, np.cumsum(counts)[:-1])
    of_module = {p.module: tuple(parts[2 * i : 2 * i + 2]) for i, p in enumerate(site.targets)}
    times = np.bincount(index, minlength=length)
    return of_module, (1 / np.sqrt(times.clip(1))).astype(np.float32)


def assignment(count: int, length: int, seed: int) -> Int[np.ndarray, "count"]:
    """An index below `length` for each of `count` numbers. Source: UniLoraModel.generate_index."""
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(length), count // length)
    if count % length:
        extras = rng.choice(length, size=count % length, replace=False)
        index = np.concatenate([index, extras])
    rng.shuffle(index)
    return index

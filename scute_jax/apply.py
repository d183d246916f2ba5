"""One site, many adapters: the base product and the three routes around it."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from scute_jax.entries import pass_of
from scute_jax.kernels import (
    Implementation,
    block_rotate,
    kronecker_update,
    replace_columns,
    runs_pallas,
    scale_input,
    segmented_linear,
    segmented_update,
    shared_factors,
    sparse_update,
)
from scute_jax.kernels.arrivals import Counts
from scute_jax.kernels.parts import add_parts
from scute_jax.kernels.pools import most_ranks
from scute_jax.kernels.precision import precision
from scute_jax.kernels.segmented_linear import MOST_RANKS, suits
from scute_jax.normal_form import NormalForm
from scute_jax.segments import Segments
from scute_jax.slots import SiteSlots, pack_site


@struct.dataclass
class SiteParams:
    """One projection with the slots of the adapters that are resident there.

    Invariants: `bias` belongs to the frozen projection; base rows get x W + bias.
    """

    W: Float[Array, "d_in d_out"]
    bias: Float[Array, "d_out"] | None
    slots: SiteSlots


def site_params(
    W: Float[Array, "d_in d_out"],
    forms: Sequence[NormalForm],
    bias: Float[Array, "d_out"] | None = None,
) -> SiteParams:
    """The params of one site from its frozen W and the normal forms of adapters 0 .. K-1.

    Differentiable with respect to W, bias and every array of the forms. The pools are kept in the
    dtype of W; c, d, e of terms whose factors an adapter owns are folded into the factors first.
    Raises: ValueError naming form and slot if a shape does not fit W.
    """
    if W.ndim != 2:
        raise ValueError(f"W must be a matrix [d_in, d_out], got shape {tuple(W.shape)}.")
    d_in, d_out = W.shape
    if bias is not None and tuple(bias.shape) != (d_out,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, but W {W.shape} needs ({d_out},).")
    return SiteParams(W=W, bias=bias, slots=pack_site(forms, d_in, d_out, W.dtype))


def apply_normal_form(
    params: SiteParams,
    x: Float[Array, "t d_in"],
    seg: Segments,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_out"]:
    """F_a(x) for each row, a = the adapter that `seg` names for it; base(x) for base rows.

        F(x) = base(x R) * s + b + sum_k c_k (((x A_k) * d_k) B_k * e_k)

    Works under jit; differentiable in x and in every slot. Rows never influence each other.
    Dtypes: float32 accumulation; the result has the dtype of x.
    Raises: ValueError if x does not fit the site or the segments.
    """
    return apply_fused((params,), x, seg, implementation=implementation)[0][:, : params.W.shape[1]]


def apply_fused(
    params: tuple[SiteParams, ...],
    x: Float[Array, "t d_in"],
    seg: Segments,
    *,
    out_dtype: jnp.dtype | None = None,
    parts: bool = False,
    ride: bool = True,
    counts: Counts | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*parts t d_out"], ...]:
    """`apply_normal_form` for sites that read the same x (q, k, v or gate, up): fewer launches.

    `out_dtype` is the dtype of the result where it should not be that of x (logits). A site with
    token rows gets further columns, as many as its pool has rows for one adapter: the logits of
    tokens past the base's vocabulary, -inf for adapters that do not have them. With `parts`, the
    results have a first axis over which the caller has to add them up. Without `ride`, XLA takes
    the base product by itself (it reads a transposed W as it lies, a kernel would need a copy).
    `counts` are those of `segmented_linear`.
    """
    _check(params, x, seg)
    x = seg.sort(x)
    slots, how = [site.slots for site in params], implementation
    dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    xs = _turned(params, x, seg, how)
    riding = [tuple(getattr(s, part) for s in slots) for part in ("factors", "scale", "shift")]
    rides = ride and _rides(params, x, how)
    light = rides and most_ranks(riding[0]) <= MOST_RANKS
    if rides:
        weights, none = tuple(site.W for site in params), [(None,) * len(params)] * 3
        own = riding if light else none
        h = segmented_linear(xs, x, weights, *own, seg.tiles, counts, implementation=how)
        if parts and light and seg.order is None and not any(_rest(s) for s in slots):
            return tuple(h_i.astype(dtype) for h_i in h)
        if not light:
            h = tuple(add_parts(h_i).astype(dtype) for h_i in h)
    else:
        h = tuple(_base(site, x_i, dtype) for site, x_i in zip(params, xs, strict=True))
        h = tuple(_turned_out(s, h_i, seg, how) for s, h_i in zip(slots, h, strict=True))
    if not light:
        h = segmented_update(h, x, *riding, seg.tiles, implementation=how)
    shared = tuple(s.shared for s in slots)
    h = shared_factors(h, x, shared, seg.slot, implementation=how)
    h = tuple(h_i.astype(dtype) for h_i in h)
    y = tuple(_extend(h_i, x, s, seg, how) for h_i, s in zip(h, slots, strict=True))
    y = tuple(seg.unsort(y_i) for y_i in y)
    return tuple(y_i[None] for y_i in y) if parts else y


def _rest(slots: SiteSlots) -> bool:
    """Whether something is added after factors, s and b."""
    rest = (slots.shared, slots.sparse, slots.tokens, *slots.kronecker)
    return any(part is not None for part in rest)


def _rides(params: tuple[SiteParams, ...], x: Array, how: Implementation | None) -> bool:
    """Whether the base product is the launch on which factors, s and b can ride.

    Few rows take it also where nobody has any, unless something comes between: base rows have the
    same bits then, whoever is beside them.
    """
    between = any(site.bias is not None or site.slots.output_rotations for site in params)
    return runs_pallas(how) and not between and suits(x, tuple(site.W for site in params))


def _turned(
    params: tuple[SiteParams, ...], x: Array, seg: Segments, how: Implementation | None
) -> tuple[Float[Array, "t d_in"], ...]:
    """x P R of each row's adapter and site: a stage of rotations changes a row in one pool only."""
    pools = [{pool.kind: pool for pool in site.slots.rotations} for site in params]
    kinds = {kind for own in pools for kind in own}
    xs = (x,) * len(params)
    for kind in sorted(kinds, key=lambda kind: (pass_of(kind), kind)):
        own = tuple(of_site.get(kind) for of_site in pools)
        xs = block_rotate(xs, own, seg.tiles, seg.slot, implementation=how)
    scales = tuple(site.slots.input_scale for site in params)
    return scale_input(xs, scales, seg.tiles, seg.slot, implementation=how)


def _turned_out(
    slots: SiteSlots, h: Array, seg: Segments, how: Implementation | None
) -> Float[Array, "t d_out"]:
    """h Q of each row's adapter."""
    for rotation in slots.output_rotations:
        (h,) = block_rotate((h,), (rotation,), seg.tiles, seg.slot, implementation=how)
    return h


def _extend(
    h: Array, x: Array, slots: SiteSlots, seg: Segments, how: Implementation | None
) -> Float[Array, "t d_out"]:
    """What is added besides factors, for each projection by itself."""
    if slots.sparse is not None:
        h = sparse_update(h, x, slots.sparse, seg.tiles, implementation=how)
    for factors in slots.kronecker:
        h = kronecker_update(h, x, factors, seg.tiles)
    if slots.tokens is not None:
        more = slots.tokens.ids.shape[1]
        h = jnp.pad(h, ((0, 0), (0, more)), constant_values=-jnp.inf)
        h = replace_columns(h, x, slots.tokens, seg.slot)
    return h


def _base(
    site: SiteParams, x: Float[Array, "t d_in"], out_dtype: jnp.dtype
) -> Float[Array, "t d_out"]:
    dtype = jnp.promote_types(x.dtype, site.W.dtype)
    h = jnp.dot(
        x.astype(dtype),
        site.W.astype(dtype),
        precision=precision(dtype),
        preferred_element_type=out_dtype if site.bias is None else jnp.float32,
    )
    if site.bias is not None:
        h = h + site.bias.astype(h.dtype)[None, :]
    return h.astype(out_dtype)


def _check(params: tuple[SiteParams, ...], x: Array, seg: Segments) -> None:
    for site in params:
        if x.ndim != 2 or x.shape[1] != site.W.shape[0]:
            raise ValueError(
                f"x has shape {tuple(x.shape)}, but the site needs [rows, {site.W.shape[0]}]; "
                "flatten batch and sequence axes into rows."
            )
    if x.shape[0] != seg.slot.shape[0]:
        raise ValueError(
            f"x has {x.shape[0]} rows, but the segments were made for {seg.slot.shape[0]}; "
            "give segments() one adapter id per row."
        )

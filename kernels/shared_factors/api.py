"""Terms on factors that many adapters share: read once per step, however many tenants."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.parts import add_parts
from scute_jax.kernels.pools import Shared
from scute_jax.kernels.shared_factors import pallas_triton, reference


def shared_factors(
    h: tuple[Float[Array, "*parts t d_out"], ...],
    x: Float[Array, "t d_in"],
    shared: tuple[Shared | None, ...],
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_out"], ...]:
    """For each slice of a fused layer: h plus the shared terms of each row's adapter.

    An h in parts is their sum. A slice whose `shared` is None keeps its h. See reference.py for the
    definition. Differentiable in h, x and every pool.
    """
    live = [s for s, own in enumerate(shared) if own is not None]
    h = tuple(_sum(part) if own is None else part for part, own in zip(h, shared, strict=True))
    if not live:
        return h
    pools = tuple(own for own in shared if own is not None)
    outs = _OP(tuple(h[s] for s in live), x, pools, slot, implementation=implementation)
    new = dict(zip(live, outs, strict=True))
    return tuple(new.get(s, part) for s, part in enumerate(h))


def _reference(h, x, shared, slot):
    return tuple(
        reference.shared_factors(_sum(part), x, own, slot)
        for part, own in zip(h, shared, strict=True)
    )


def _sum(h: Float[Array, "*parts t d_out"]) -> Float[Array, "t d_out"]:
    return h if h.ndim == 2 else add_parts(h)


_OP = Op("shared_factors", _reference, pallas_triton.shared_factors)

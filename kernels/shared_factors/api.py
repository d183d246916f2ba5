"""Terms on factors that many adapters share: read once per step, however many tenants."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import Shared
from scute_jax.kernels.shared_factors import pallas_triton, reference


def shared_factors(
    h: tuple[Float[Array, "t d_out"], ...],
    x: Float[Array, "t d_in"],
    shared: tuple[Shared | None, ...],
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_out"], ...]:
    """For each slice of a fused layer: h plus the shared terms of each row's adapter.

    A slice whose `shared` is None keeps its h. See reference.py for the definition. Differentiable
    in h, x and every pool.
    """
    live = [s for s, own in enumerate(shared) if own is not None]
    if not live:
        return h
    pools = tuple(own for own in shared if own is not None)
    outs = _OP(tuple(h[s] for s in live), x, pools, slot, implementation=implementation)
    new = dict(zip(live, outs, strict=True))
    return tuple(new.get(s, part) for s, part in enumerate(h))


def _reference(h, x, shared, slot):
    return tuple(
        reference.shared_factors(part, x, own, slot) for part, own in zip(h, shared, strict=True)
    )


_OP = Op("shared_factors", _reference, pallas_triton.shared_factors)

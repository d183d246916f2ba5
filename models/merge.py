"""A model with one projection, or its embedding, changed for good."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.models.params import Linear, LlamaParams


def with_delta(
    params: LlamaParams,
    site: str,
    D: Float[Array, "d_in d_out"],
    shift: Float[Array, "d_out"] | None = None,
) -> LlamaParams:
    """The model that computes x (W + D) + bias + shift at a site. Nothing else changes.

    Where head and embedding are tied, the one that is changed parts from the other.
    """
    if site == "embed_tokens":
        E = params.embed_tokens
        rows = E + jnp.asarray(D, E.dtype)
        rows = rows if shift is None else rows + jnp.asarray(shift, E.dtype)[None, :]
        return replace(params, embed_tokens=rows, lm_head=params.linear("lm_head"))
    linear = params.linear(site)
    W, bias = linear.weight, linear.bias
    if shift is not None:
        shift = jnp.asarray(shift, W.dtype)
        bias = shift if bias is None else bias + shift
    changed = Linear(W + jnp.asarray(D, W.dtype), bias)
    if site == "lm_head":
        return replace(params, lm_head=changed)
    number, name = site.removeprefix("layers.").split(".")[::2]
    layers = list(params.layers)
    layers[int(number)] = replace(layers[int(number)], **{name: changed})
    return replace(params, layers=tuple(layers))

"""The weights of a Llama-family model as a pytree: one array per layer and projection.

A projection maps x [*, d_in] to x @ weight + bias. Site names are the module paths of the Hugging
Face model without the leading `model.`; `LlamaParams.linear` looks them up.
"""

from flax import struct
from jaxtyping import Array, Float

NORM_SITES = ("input_layernorm", "post_attention_layernorm")
ATTENTION_SITES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_SITES = ("gate_proj", "up_proj", "down_proj")


@struct.dataclass
class Linear:
    """y = x weight + bias; bias is None where the model has none."""

    weight: Float[Array, "d_in d_out"]
    bias: Float[Array, "d_out"] | None = None


@struct.dataclass
class Layer:
    """One decoder layer. Field names are those of the Hugging Face modules."""

    input_layernorm: Float[Array, "d"]
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Float[Array, "d"]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


@struct.dataclass
class LlamaParams:
    """A whole model.

    Invariants: `lm_head` is None exactly when the model ties it to `embed_tokens`.
    """

    embed_tokens: Float[Array, "vocab d"]
    layers: tuple[Layer, ...]
    norm: Float[Array, "d"]
    lm_head: Linear | None = None

    def norm_weight(self, site: str) -> Float[Array, "d"]:
        """The weight of a norm: "layers.3.input_layernorm", "norm". KeyError if none."""
        if site == "norm":
            return self.norm
        parts = site.split(".")
        if len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit():
            if parts[2] in NORM_SITES and int(parts[1]) < len(self.layers):
                return getattr(self.layers[int(parts[1])], parts[2])
        raise KeyError(site)

    def linear(self, site: str) -> Linear:
        """The projection of a site: "layers.3.mlp.up_proj", "lm_head". KeyError if none."""
        if site == "lm_head":
            return Linear(self.embed_tokens.T) if self.lm_head is None else self.lm_head
        parts = site.split(".")
        if len(parts) == 4 and parts[0] == "layers" and parts[1].isdigit():
            known = {"self_attn": ATTENTION_SITES, "mlp": MLP_SITES}.get(parts[2], ())
            if parts[3] in known and int(parts[1]) < len(self.layers):
                return getattr(self.layers[int(parts[1])], parts[3])
        raise KeyError(site)

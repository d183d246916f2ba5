"""What a checkpoint is made for: the modules of the base model, their widths and their biases.

    config.json (or an object that has its fields) -> Base -> [which modules, how wide, biased?]

Module paths are those of the Hugging Face causal LM ("model.layers.3.self_attn.q_proj"); a site is
the same path without the leading "model.".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MODEL_TYPES = ("llama", "mistral", "qwen2")
KEY_VALUE_HEADS = {"mistral": 8, "qwen2": 32}  # transformers' defaults where config.json is silent
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class Projection:
    """One module of the base as a linear projection, y = x W + bias with W [d_in, d_out]."""

    module: str  # "model.layers.3.self_attn.q_proj"
    d_in: int
    d_out: int
    has_bias: bool = False

    @property
    def site(self) -> str:
        return self.module.removeprefix("model.")


@dataclass(frozen=True)
class Base:
    """The modules of a Llama-family model.

    Invariants: `projections` is in the order of the modules of the Hugging Face model, which is
    the order in which methods that draw random numbers for all layers draw them.
    """

    model_type: str
    vocab: int
    hidden: int
    tied: bool  # lm_head and embed_tokens are one array
    projections: tuple[Projection, ...]
    others: tuple[str, ...]  # modules that have weights but are no projection

    @property
    def embedding(self) -> Projection:
        """The token embedding: W [vocab, hidden], x the one-hot row of a token."""
        return Projection(EMBEDDING, self.vocab, self.hidden)

    @property
    def norms(self) -> tuple[Projection, ...]:
        """The norms: W is the diagonal of the weight."""
        return tuple(Projection(m, self.hidden, self.hidden) for m in self.others if m != EMBEDDING)

    @property
    def modules(self) -> tuple[Projection, ...]:
        """Every module that can be adapted."""
        return (self.embedding, *self.norms, *self.projections)

    def resized(self, vocab: int) -> "Base":
        """The same with another number of tokens."""
        head = replace(self.projections[-1], d_out=vocab)
        return replace(self, vocab=vocab, projections=(*self.projections[:-1], head))

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Site -> (d_in, d_out)."""
        return {p.site: (p.d_in, p.d_out) for p in self.modules}

    @classmethod
    def from_config(cls, config: Any) -> "Base":
        """The base that a config.json describes: as a dict, or any object with those attributes.

        Raises: ValueError naming the field that is missing, malformed or not served.
        """
        read = _Fields(config)
        kind = read("model_type", "llama")
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"config: model_type is {kind!r}, but adapters are served over "
                f"{', '.join(MODEL_TYPES)} models."
            )
        hidden, inter, heads = map(
            read.count, ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        kv_heads = read.count("num_key_value_heads", KEY_VALUE_HEADS.get(kind, heads))
        head_dim = read.count("head_dim", hidden // heads)
        attention, kv = heads * head_dim, kv_heads * head_dim
        qkv_bias, o_bias, mlp_bias = _biases(read, kind)
        layer = (
            ("self_attn.q_proj", hidden, attention, qkv_bias),
            ("self_attn.k_proj", hidden, kv, qkv_bias),
            ("self_attn.v_proj", hidden, kv, qkv_bias),
            ("self_attn.o_proj", attention, hidden, o_bias),
            ("mlp.gate_proj", hidden, inter, mlp_bias),
            ("mlp.up_proj", hidden, inter, mlp_bias),
            ("mlp.down_proj", inter, hidden, mlp_bias),
        )
        layers, vocab = range(read.count("num_hidden_layers")), read.count("vocab_size")
        return cls(
            model_type=kind,
            vocab=vocab,
            hidden=hidden,
            tied=bool(read("tie_word_embeddings", False)),
            projections=(
                *(Projection(f"model.layers.{i}.{name}", *w) for i in layers for name, *w in layer),
                Projection(HEAD, hidden, vocab),
            ),
            others=(
                EMBEDDING,
                "model.norm",
                *(
                    f"model.layers.{i}.{norm}"
                    for i in layers
                    for norm in ("input_layernorm", "post_attention_layernorm")
                ),
            ),
        )


def _biases(read: "_Fields", kind: str) -> tuple[bool, bool, bool]:
    """Whether q, k, v have a bias, whether o has, whether gate, up and down have."""
    if read("qkv_bias", None) is not None:  # stated by name, as in models.config.LlamaConfig
        return bool(read("qkv_bias")), bool(read("o_bias")), bool(read("mlp_bias"))
    if kind == "llama":
        attention = bool(read("attention_bias", False))
        return attention, attention, bool(read("mlp_bias", False))
    return kind == "qwen2", False, False


class _Fields:
    """Fields of a mapping or of an object; one that is absent or None takes the default."""

    def __init__(self, config: Any):
        self.config = config

    def __call__(self, name: str, *default: Any) -> Any:
        if isinstance(self.config, Mapping):
            value = self.config.get(name)
        else:
            value = getattr(self.config, name, None)
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"config: the base model's {name} is missing; pass its whole config.json.")

    def count(self, name: str, *default: Any) -> int:
        value = self(name, *default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config: {name} is {value!r}, needed a positive integer.")
        return value

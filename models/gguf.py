"""A GGUF file of a Llama-family model as a configuration and Hugging Face-named tensors.

llama.cpp stores the rows of q and k of architecture llama (not of qwen2) so that its rotary
embedding turns neighbours; they are put back in the order that turns the halves of a head.
Source: llama.cpp, convert_hf_to_gguf.py (LlamaModel, Qwen2Model) and gguf-py/gguf/constants.py.
"""

from pathlib import Path
from typing import Any

import numpy as np

from scute_jax.models.config import LlamaConfig, ModelType
from scute_jax.models.errors import ModelError
from scute_jax.models.gguf_file import GGUFFile, open_gguf_file
from scute_jax.models.rope import Rope
from scute_jax.models.tensors import TensorSource

ARCHITECTURES: dict[str, ModelType] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

# Metadata of the architecture that is read below, or changes nothing where it has this value.
_READ = frozenset(
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length "
    "attention.value_length attention.sliding_window rope.freq_base rope.dimension_count "
    "rope.scale_linear rope.scaling.type rope.scaling.factor vocab_size".split()
)
_NOTES = frozenset(
    "rope.scaling.original_context_length rope.scaling.finetuned attention.causal".split()
)


def open_gguf(path: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration and the tensors of a file, none of them read yet.

    Raises: ModelError naming the metadata field or tensor that is missing or not served.
    """
    file = open_gguf_file(path)
    config = gguf_config(file)
    names = {_hf_name(name): name for name in file.tensors if name != _ROPE_FREQS}
    heads = {}
    if config.model_type == "llama":
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read(name: str) -> np.ndarray:
        array = file.read(names[name])
        parts = name.split(".")
        count = heads.get(parts[-2]) if len(parts) > 2 else None
        return array if count is None else _halves(array, count)

    source = TensorSource(
        where=str(path),
        shapes={name: file.tensors[stored].shape for name, stored in names.items()},
        dtype=file.dtype("token_embd.weight"),
        read=read,
    )
    return config, source


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The configuration that the metadata and the list of tensors state."""
    fields = _Metadata(file)
    kind = fields.architecture()
    heads = fields.count("attention.head_count")
    hidden = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if fields.count(name, head_dim) != head_dim:
            raise fields.fail(name, f"heads have {head_dim} components and all of them are used")
    embedding = file.tensors.get("token_embd.weight")
    stored_vocab = embedding.shape[0] if embedding else None
    max_positions = fields.count("context_length")
    tensors = file.tensors
    config = LlamaConfig(
        model_type=kind,
        vocab_size=fields.count("vocab_size", stored_vocab),
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_hidden_layers=fields.count("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fields.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
        rope=_rope(fields, head_dim),
        max_position_embeddings=max_positions,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or kind == "qwen2",
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        sliding_window=(
            fields.count("attention.sliding_window")
            if fields.optional("attention.sliding_window")
            else None
        ),
        bos_token_id=fields.token("bos"),
        eos_token_id=tuple(
            dict.fromkeys(t for n in ("eos", "eot", "eom") if (t := fields.token(n)) is not None)
        ),
        pad_token_id=fields.token("padding"),
    )
    return config.checked(str(file.path))


def _rope(fields: "_Metadata", head_dim: int) -> Rope:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.optional("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise fields.fail("rope.scaling.type", "served are none and linear")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    linear = kind != "none" and factor not in (0.0, 1.0)
    stored = fields.file.tensors.get(_ROPE_FREQS)
    if stored is None:
        return Rope(theta, "linear", factor) if linear else Rope(theta)
    factors = np.asarray(fields.file.read(_ROPE_FREQS), np.float32)
    if factors.shape == (head_dim // 2,) and not linear:
        plain = Rope(theta)
        # Llama 3.1 to 3.3: one band and original context; the largest factor is the stretch.
        scaled = Rope(theta, "llama3", float(factors.max()), 1.0, 4.0, 8192)
        for rope in (plain, scaled):
            needed = plain.inv_freq(head_dim) / rope.inv_freq(head_dim)
            if np.allclose(factors, needed, rtol=1e-5, atol=0):
                return rope
    raise ModelError(
        f"{fields.file.path}: {_ROPE_FREQS} of shape {stored.shape} does not scale frequencies as "
        "Llama 3 does (low 1, high 4, original context 8192), so the rope it stands for is "
        "unknown; load the Hugging Face folder of this model."
    )


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; one without is kept, to be reported as unexpected."""
    parts = name.split(".")
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (a, b, a, b, ...) of each head, as neighbours, -> (a, a, ..., b, b, ...), as halves."""
    if rows.shape[0] % (2 * heads):
        return rows  # of a wrong shape, which check_tensors has reported
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The decimal number that a float32 was made from: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Metadata:
    """Typed reads of the metadata of one architecture; each raises a ModelError with the key."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture"))

    def architecture(self) -> ModelType:
        """The model type. Raises: ModelError if it, or a field of it, is not served."""
        path, metadata = self.file.path, self.file.metadata
        if metadata.get("general.type", "model") != "model":
            raise ModelError(
                f"{path}: general.type is {metadata['general.type']!r}, but it must be a model."
            )
        if metadata.get("split.count", 0) > 1:
            raise ModelError(
                f"{path}: is one of {metadata['split.count']} parts (split.count); join them with "
                "llama-gguf-split --merge."
            )
        if self.prefix not in ARCHITECTURES:
            raise ModelError(
                f"{path}: general.architecture is {self.prefix!r}, but served are "
                f"{', '.join(ARCHITECTURES)}."
            )
        own = {
            key.removeprefix(f"{self.prefix}."): value
            for key, value in metadata.items()
            if key.startswith(f"{self.prefix}.")
        }
        unknown = [key for key, value in own.items() if value and key not in _READ | _NOTES]
        if unknown:
            shown = ", ".join(f"{self.prefix}.{key}={own[key]!r:.60}" for key in unknown[:5])
            raise ModelError(
                f"{path}: {len(unknown)} field(s) of unknown meaning: {shown}. They may change "
                "what the model computes; load the Hugging Face folder of this model."
            )
        return ARCHITECTURES[self.prefix]

    def fail(self, name: str, needed: str) -> ModelError:
        had = repr(self.optional(name)) if self.optional(name) is not None else "missing"
        return ModelError(f"{self.file.path}: {self.prefix}.{name} is {had}, but {needed}.")

    def optional(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.optional(name)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one value per layer, all equal
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(name, "it must be one whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, "it must be a number")
        return float(value)

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

"""What a Llama-family model is, apart from its weights: a hashable value, static under jit.

    config.json -> LlamaConfig.from_hf -> [llama.forward(config, params, ...)]

Fields carry the names of the Hugging Face configuration, so that code which reads one reads the
other. Served are model_type llama, mistral and qwen2: the same forward with other biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scute_jax.models.errors import ModelError
from scute_jax.models.rope import Rope

ModelType = Literal["llama", "mistral", "qwen2"]

# What transformers assumes where config.json is silent. Widths and depths have no default here: a
# file that does not state them is refused, since the defaults are those of one checkpoint.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}

READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings "
    "hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers "
    "layer_types rope_theta rope_scaling rope_parameters partial_rotary_factor "
    "original_max_position_embeddings bos_token_id eos_token_id pad_token_id".split()
)

# Fields that change nothing the forward computes: training, bookkeeping, how a library runs the
# model, and the sampling defaults that older files keep here. A field in neither list is refused
# unless it is switched off (null, false, 0, empty).
IGNORED = frozenset(
    # training
    "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop "
    "neftune_noise_alpha "
    # bookkeeping
    "architectures transformers_version torch_dtype dtype _name_or_path name_or_path "
    "tokenizer_class id2label label2id problem_type finetuning_task task_specific_params "
    "transformers.js_config unsloth_version unsloth_fixed model_max_length "
    "max_sequence_length is_llama_config _commit_hash _attn_implementation_autoset "
    # how a library runs it; pretraining_tp splits a product into slices of the same sum
    "use_cache pretraining_tp attn_implementation _attn_implementation use_flash_attn "
    "output_hidden_states output_attentions return_dict chunk_size_feed_forward torchscript "
    "use_bfloat16 tf_legacy_loss is_decoder "
    # sampling
    "max_length min_length do_sample early_stopping num_beams num_beam_groups temperature top_k "
    "top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size "
    "num_return_sequences encoder_no_repeat_ngram_size".split()
)


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model and what its numbers mean.

    Invariants: num_attention_heads is a multiple of num_key_value_heads; head_dim is even.
    """

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # q_proj, k_proj, v_proj
    o_bias: bool = False
    mlp_bias: bool = False  # gate_proj, up_proj, down_proj
    sliding_window: int | None = None  # positions one query sees, where a layer limits them
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()  # any of them ends a text
    pad_token_id: int | None = None

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        source: str = "config.json",
    ) -> "LlamaConfig":
        """The configuration that a config.json states; `source` names the file in messages.

        `generation`, the contents of generation_config.json, has the last word on bos, eos and pad.
        Raises: ModelError naming the field that is missing, malformed or not served.
        """
        fields = _Fields(config, source)
        kind = fields.choice("model_type", tuple(DEFAULTS))
        fields.defaults = DEFAULTS[kind]
        fields.choice("hidden_act", ("silu", "swish"), default="silu")
        _refuse_unknown(config, source)
        heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
        head_dim = fields.count("head_dim", default=hidden // heads)
        max_positions = fields.count("max_position_embeddings")
        layers = fields.count("num_hidden_layers")
        bias = kind == "llama" and fields.flag("attention_bias")
        made = cls(
            model_type=kind,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.count("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope=Rope.from_hf(config, max_positions, source),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            mlp_bias=kind == "llama" and fields.flag("mlp_bias"),
            sliding_window=_window(fields, kind, layers),
            bos_token_id=fields.token("bos_token_id", generation),
            eos_token_id=fields.tokens("eos_token_id", generation),
            pad_token_id=fields.token("pad_token_id", generation),
        )
        return made.checked(source)

    def checked(self, source: str) -> "LlamaConfig":
        """self. Raises: ModelError where two fields contradict each other."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"{source}: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}, so query heads cannot share keys "
                "evenly; correct the two fields."
            )
        if self.head_dim % 2:
            raise ModelError(
                f"{source}: head_dim={self.head_dim} is odd, but rotary positions pair the halves "
                "of a head; state head_dim if it is not hidden_size / num_attention_heads."
            )
        return self

    @property
    def attention_bias(self) -> bool:
        """Whether q, k, v *and* o have a bias: the field of Llama. qwen2 has q, k, v only."""
        return self.qkv_bias and self.o_bias

    @property
    def max_context(self) -> int:
        """The positions that full attention serves exactly.

        A sliding window that is in use ends it earlier than max_position_embeddings: beyond the
        window the model itself stops looking back, and this forward does not.
        """
        if self.sliding_window is None:
            return self.max_position_embeddings
        return min(self.max_position_embeddings, self.sliding_window)


def _refuse_unknown(config: Mapping[str, Any], source: str) -> None:
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ModelError(
            f"{source}: quantization_config (quant_method={method!r}) describes weights that are "
            "not plain floats; load the unquantised checkpoint, or a GGUF file of it."
        )
    unknown = [name for name, value in config.items() if value and name not in READ | IGNORED]
    if unknown:
        shown = ", ".join(f"{name}={config[name]!r:.60}" for name in sorted(unknown)[:5])
        raise ModelError(
            f"{source}: {len(unknown)} field(s) of unknown meaning: {shown}. They may change what "
            "the model computes; remove those that do not."
        )


def _window(fields: "_Fields", kind: str, layers: int) -> int | None:
    """The sliding window, or None if no layer uses one. transformers ignores it for llama."""
    if kind == "llama" or (kind == "qwen2" and not fields.flag("use_sliding_window")):
        return None
    window = fields.optional_count("sliding_window")
    if kind == "qwen2" and window is not None:
        types = fields.get("layer_types")
        if types is None:
            full_layers = fields.get("max_window_layers")
            if isinstance(full_layers, bool) or not isinstance(full_layers, int):
                raise fields.fail("max_window_layers", "it must be a number of layers")
            return window if full_layers < layers else None
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            raise fields.fail("layer_types", "it must be a list with the name of each layer's type")
        return window if "sliding_attention" in types else None
    return window


class _Fields:
    """Typed reads of a JSON object; each raises a ModelError that names the field."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config = config
        self.source = source
        self.defaults: Mapping[str, Any] = {}

    def get(self, name: str) -> Any:
        return self.config[name] if name in self.config else self.defaults.get(name)

    def fail(self, name: str, needed: str) -> ModelError:
        had = f"{self.config[name]!r:.60}" if name in self.config else "missing"
        return ModelError(f"{self.source}: {name} is {had}, but {needed}.")

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> Any:
        value = self.config.get(name, default)
        if value not in allowed:
            raise self.fail(name, f"served are {', '.join(allowed)}")
        return value

    def optional_count(self, name: str) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(name, "it must be a whole number of at least 1")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.optional_count(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "it must be a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise self.fail(name, "it must be a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.config.get(name, False)
        if not isinstance(value, bool):
            raise self.fail(name, "it must be true or false")
        return value

    def tokens(self, name: str, generation: Mapping[str, Any] | None) -> tuple[int, ...]:
        value = (generation or {}).get(name)
        value = self.get(name) if value is None else value
        found = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in found):
            raise ModelError(f"{self.source}: {name} is {value!r}, but it must be a token id.")
        return tuple(dict.fromkeys(token for token in found if token >= 0))  # some files say -1

    def token(self, name: str, generation: Mapping[str, Any] | None) -> int | None:
        found = self.tokens(name, generation)
        return found[0] if found else None

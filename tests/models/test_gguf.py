"""GGUF files: written here from random models, read back exactly; SmolLM2 against transformers."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from scute_jax.models.checkpoint import load_model
from scute_jax.models.errors import ModelError
from scute_jax.models.gguf_file import open_gguf_file
from scute_jax.models.rope import Rope

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 3e-5,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def twin(kind: str, **fields) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
    model = transformers.AutoModelForCausalLM.from_config(config(**SHAPE, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def write(path: Path, model, *, kind="Q8_0", arch="llama", drop=(), metadata=None, extra=None):
    """A GGUF file as llama.cpp converts the model: matrices of type `kind`, vectors in F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    pairs = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    pairs = {f"{arch}.{key}": value for key, value in pairs.items()}
    pairs |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in {**pairs, **(metadata or {})}.items():
        if key in drop:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in model.state_dict().items():
        module, leaf = name.rsplit(".", 1)
        parts = module.split(".", 3)
        stored = NAMES[module] if parts[1:2] != ["layers"] else f"blk.{parts[2]}.{NAMES[parts[3]]}"
        if (name == "lm_head.weight" and config.tie_word_embeddings) or f"{stored}.{leaf}" in drop:
            continue
        array = tensor.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if arch == "llama" and stored.split(".")[-1] in heads:
            count = heads[stored.split(".")[-1]]
            pairs_of_head = array.reshape(count, 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(pairs_of_head.swapaxes(1, 2).reshape(array.shape))
        add_tensor(writer, f"{stored}.{leaf}", array, kind if array.ndim == 2 else "F32")
    for name, array in (extra or {}).items():
        add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    type_id = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, type_id), raw_dtype=type_id)


def rounded(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """What storing a matrix as `kind` leaves of it."""
    if tensor.ndim < 2:
        return tensor.numpy()
    type_id = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), type_id), type_id)


def check_equal(params, model, kind: str) -> None:
    state = model.state_dict()

    def check(ours, name):
        np.testing.assert_array_equal(
            np.asarray(ours, np.float32), rounded(state[name], kind), err_msg=name
        )

    check(params.embed_tokens, "model.embed_tokens.weight")
    check(params.norm, "model.norm.weight")
    if not model.config.tie_word_embeddings:
        check(params.lm_head.weight.T, "lm_head.weight")
    for i, layer in enumerate(params.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            check(getattr(layer, name), f"model.layers.{i}.{name}.weight")
        for module in (m for m in NAMES if m.endswith("_proj")):
            linear = getattr(layer, module.split(".")[1])
            check(linear.weight.T, f"model.layers.{i}.{module}.weight")
            bias = f"model.layers.{i}.{module}.bias"
            assert (linear.bias is not None) == (bias in state)
            if linear.bias is not None:
                check(linear.bias, bias)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_every_weight_is_the_stored_one(kind, tmp_path):
    model = twin("llama")
    path = write(tmp_path / "model.gguf", model, kind=kind)
    config, params = load_model(path, "float32")
    check_equal(params, model, kind)
    as_stored = {"F16": jnp.float16, "BF16": jnp.bfloat16}.get(kind, jnp.float32)
    params = load_model(path)[1]
    assert params.embed_tokens.dtype == params.norm.dtype == as_stored
    assert config.tie_word_embeddings is False and config.rms_norm_eps == 3e-5
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (96, 1, (2,))


@pytest.mark.parametrize(
    "arch, fields",
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_biases_ties_head_width_and_row_order(arch, fields, tmp_path):
    model = twin(arch, **fields)
    width = {"llama.attention.key_length": 16, "llama.rope.dimension_count": 16}
    write(tmp_path / "m.gguf", model, arch=arch, metadata=width if "head_dim" in fields else None)
    config, params = load_model(tmp_path, "float32")  # the folder that holds the file
    check_equal(params, model, "Q8_0")
    assert config.model_type == arch
    assert config.tie_word_embeddings == model.config.tie_word_embeddings


def llama_cpp_rope_factors(theta, width, factor, low=1.0, high=4.0, original=8192) -> np.ndarray:
    """Source: llama.cpp, convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, width, 2, dtype=np.float32) / width):
        wavelength = 2 * np.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        smooth = np.clip(smooth, 0, 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_rope_is_read_from_fields_and_from_the_tensor_of_llama_3(tmp_path):
    model = twin("llama")
    count = iter(range(99))

    def rope(metadata=None, factors=None):
        extra = None if factors is None else {"rope_freqs.weight": factors}
        path = tmp_path / f"{next(count)}.gguf"
        base = {"llama.rope.freq_base": 5e5, **(metadata or {})}
        return load_model(write(path, model, metadata=base, extra=extra))[0].rope

    assert rope() == Rope(5e5)
    assert rope({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 8.0}) == Rope(5e5)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope(linear) == Rope(5e5, "linear", 4.0)
    assert rope({"llama.rope.scale_linear": 2.0}) == Rope(5e5, "linear", 2.0)
    assert rope(factors=np.ones(4, np.float32)) == Rope(5e5)
    stretched = llama_cpp_rope_factors(5e5, 8, 32.0)
    assert stretched[-1] == 32 and stretched[0] == 1
    assert rope(factors=stretched) == Rope(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
    with pytest.raises(ModelError, match="rope_freqs.weight of shape .* does not scale"):
        rope(factors=llama_cpp_rope_factors(5e5, 8, 32.0, high=2000.0))
    with pytest.raises(ModelError, match="llama.rope.scaling.type is 'yarn'"):
        rope({"llama.rope.scaling.type": "yarn"})


def test_every_token_that_ends_a_turn_ends_a_text(tmp_path):
    turn = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.padding_token_id": 0}
    config, _ = load_model(write(tmp_path / "m.gguf", twin("llama"), metadata=turn))
    assert config.eos_token_id == (2, 5) and config.pad_token_id == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"arch": "gemma2"}, "general.architecture is 'gemma2'.*llama, mistral, qwen2"),
        ({"drop": ["llama.block_count"]}, "llama.block_count is missing"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count=8"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 4]}}, r"head_count_kv is \[2, 4\]"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count is 4"),
        ({"metadata": {"llama.vocab_size": 99}}, r"embed_tokens.weight has \(96, 64\).*\(99, 64\)"),
        ({"metadata": {"llama.rope.freq_base": "x"}}, "llama.rope.freq_base is 'x'"),
        ({"metadata": {"general.type": "adapter"}}, "general.type is 'adapter'"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"drop": ["blk.1.ffn_up.weight"]}, "1 missing: model.layers.1.mlp.up_proj.weight"),
        ({"extra": {"blk.0.attn_x.weight": np.ones(3, np.float32)}}, "blk.0.attn_x.weight"),
    ],
)
def test_refusals_name_the_file_and_the_field(change, message, tmp_path):
    path = write(tmp_path / "model.gguf", twin("llama"), **change)
    with pytest.raises(ModelError, match=f"{path}.*{message}"):
        load_model(path)


def test_files_that_are_not_whole_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", twin("llama"))
    whole = path.read_bytes()
    for keep in [*range(0, 60, 7), 400, 900, 1300, len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=f"{path}"):
            load_model(path)
    rng = np.random.default_rng(0)
    header = open_gguf_file(write(tmp_path / "model.gguf", twin("llama"))).tensors
    for _ in range(300):  # damage within the header: served as it stands, or refused by name
        damaged = bytearray(whole)
        damaged[rng.integers(min(t.start for t in header.values()))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_model(path)
        except ModelError as error:
            assert str(path) in str(error)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + whole[8:])
    with pytest.raises(ModelError, match="version 50331648"):
        load_model(path)


def test_a_folder_of_several_files_asks_which(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\)"):
        load_model(tmp_path)


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2_path, smollm2_twin):
    theirs = smollm2_twin
    config, params = load_model(smollm2_path)
    state = theirs.state_dict()
    assert len(state) == 2 + 9 * 30 + 1 and config.tie_word_embeddings
    np.testing.assert_array_equal(params.embed_tokens, state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.norm, state["model.norm.weight"])
    for i, layer in enumerate(params.layers):
        for module in (m for m in NAMES if m.endswith("_proj")):
            name = f"model.layers.{i}.{module}.weight"
            ours = getattr(layer, module.split(".")[1]).weight
            np.testing.assert_array_equal(np.asarray(ours).T, state[name], err_msg=name)
        for name in ("input_layernorm", "post_attention_layernorm"):
            ours, stored = getattr(layer, name), state[f"model.layers.{i}.{name}.weight"]
            np.testing.assert_array_equal(ours, stored)
    np.testing.assert_array_equal(
        config.rope.inv_freq(config.head_dim), theirs.model.rotary_emb.inv_freq
    )
    for name in ("num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"):
        assert getattr(config, name) == getattr(theirs.config, name)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, (2,), 2)

"""load_model on Hugging Face folders: equality with transformers, and every refusal by name."""

import json
from collections import Counter
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from scute_jax.models.checkpoint import load_model
from scute_jax.models.errors import ModelError
from scute_jax.models.params import ATTENTION_SITES

# Every dimension differs, so that no swapped axis goes unseen.
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama-biased": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-3.2": transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "mistral": transformers.MistralConfig(**SHAPE),
    # a Qwen2 head is always hidden_size / heads wide
    "qwen2": transformers.Qwen2Config(
        **{**SHAPE, "head_dim": 4, "num_key_value_heads": 3}, tie_word_embeddings=True
    ),
}


def twin(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A random model; biases and norms too, which transformers starts at 0 and 1."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.to(dtype)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Llama folder in float32."""
    twin("llama").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder: Path, change) -> None:
    """Rewrites model.safetensors with what `change` makes of its tensors."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def check_equal(params, model: transformers.PreTrainedModel) -> None:
    """Every tensor of the twin is in params, in the layout of params, bit for bit."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    ours = {"model.embed_tokens.weight": params.embed_tokens, "model.norm.weight": params.norm}
    tied = model.config.tie_word_embeddings
    assert (params.lm_head is None) == tied
    ours["lm_head.weight"] = params.embed_tokens if tied else params.lm_head.weight.T
    for i, layer in enumerate(params.layers):
        for name, value in vars(layer).items():
            module = "self_attn." if name in ATTENTION_SITES else "mlp."
            path = f"model.layers.{i}.{module if name.endswith('_proj') else ''}{name}"
            if not name.endswith("_proj"):
                ours[f"{path}.weight"] = value
                continue
            ours[f"{path}.weight"] = value.weight.T
            if value.bias is not None:
                ours[f"{path}.bias"] = value.bias
    assert sorted(ours) == sorted(state)
    for name, value in ours.items():
        np.testing.assert_array_equal(np.asarray(value, np.float32), state[name], err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_transformers(name, tmp_path):
    model = twin(name)
    model.save_pretrained(tmp_path)
    config, params = load_model(tmp_path)
    check_equal(params, model)
    assert params.embed_tokens.dtype == jnp.float32
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    assert config.head_dim == params.layers[0].q_proj.weight.shape[1] // config.num_attention_heads


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("asked", [None, "float32", "float16", "bfloat16"])
def test_stored_and_asked_dtypes(stored, asked, tmp_path):
    model = twin("llama-biased", getattr(torch, stored))
    model.save_pretrained(tmp_path)
    _, params = load_model(tmp_path, asked)
    wanted = asked or stored
    assert {leaf.dtype for leaf in (params.norm, *vars(params.layers[1].q_proj).values())} == {
        jnp.dtype(wanted)
    }
    check_equal(params, model.to(getattr(torch, wanted)))


def test_sharded_checkpoints_equal_whole_ones(tmp_path):
    model = twin("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_equal(load_model(tmp_path)[1], model)


def test_a_model_saved_below_its_head_loads_where_the_head_is_tied(tmp_path):
    model = twin("llama-3.2")
    model.model.save_pretrained(tmp_path)
    check_equal(load_model(tmp_path)[1], model)


def test_a_stored_head_that_equals_the_embedding_is_tied(tmp_path):
    model = twin("llama-3.2")
    model.save_pretrained(tmp_path)

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path, add_head)
    check_equal(load_model(tmp_path)[1], model)
    edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_model(tmp_path)


def test_progress_counts_the_bytes_of_the_loaded_weights(folder):
    calls = []
    _, params = load_model(folder, "bfloat16", progress=lambda *call: calls.append(call))
    names, done, total = zip(*calls, strict=True)
    assert len(set(names)) == len(names) == 2 * 9 + 3
    assert list(done) == sorted(done) and done[-1] == total[0] and set(total) == {total[0]}
    assert total[0] == sum(p.numel() for p in twin("llama").parameters()) * 2


def test_buffers_that_the_configuration_determines_are_ignored(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)

    edit_tensors(folder, add)
    check_equal(load_model(folder)[1], twin("llama"))


def test_token_ids_of_the_generation_config_are_read(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_model(folder)[0].eos_token_id == (7, 8)


def test_tensors_that_do_not_fit_are_named_in_one_message(folder):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(60)
        tensors["model.norm.weight"] = torch.ones(25)

    edit_tensors(folder, change)
    with pytest.raises(ModelError) as error:
        load_model(folder)
    for part in (
        str(folder),
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 unexpected: model.layers.0.self_attn.q_proj.bias",
        "1 of another shape: model.norm.weight has (25,) instead of (24,)",
    ):
        assert part in str(error.value)


def test_long_lists_are_cut_with_their_count(folder):
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"18 missing: ([\w.]+, ){5}\.\.\."):
        load_model(folder)
    edit_config(folder, num_hidden_layers=10**12)
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000000, but .* 21 tensor"):
        load_model(folder)


def test_a_missing_head_asks_whether_it_is_tied(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match="1 missing: lm_head.weight.*tie_word_embeddings to true"):
        load_model(folder)


def test_values_beyond_float16_are_refused(folder):
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    with pytest.raises(ModelError, match="model.norm.weight, .* values beyond float16"):
        load_model(folder, "float16")
    assert load_model(folder, "bfloat16")[1].norm.dtype == jnp.bfloat16


def test_nan_is_refused(folder):
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"][3].fill_(torch.nan))
    with pytest.raises(ModelError, match="lm_head.weight, stored as float32, holds NaN"):
        load_model(folder)


def test_quantised_tensors_are_refused(folder):
    def change(tensors):
        tensors["model.norm.weight"] = torch.ones(24, dtype=torch.int8)

    edit_tensors(folder, change)
    with pytest.raises(ModelError, match="model.norm.weight is stored as I8"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_file_that_is_cut_short_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors.*fetch it again"):
        load_model(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\x02" + bytes(7) + b"[]", "header is malformed"),
        (b"\x10" + bytes(7) + b'{"x": {"a": 12}}', "header is malformed"),
        (b"\x04" + bytes(7) + b"\xff\xff\xff\xff", "header is malformed"),
    ],
)
def test_a_malformed_header_is_refused(folder, content, message):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_offsets_outside_the_file_are_refused(folder):
    entry = {"dtype": "F32", "shape": [24], "data_offsets": [0, 96]}
    for change in ({"data_offsets": [-8, 88]}, {"data_offsets": [8, 104]}, {"shape": [-24]}):
        header = json.dumps({"model.norm.weight": {**entry, **change}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(96)
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="model.norm.weight"):
            load_model(folder)


def test_shards_that_do_not_fit_their_index_are_refused(tmp_path):
    twin("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())

    def check(weight_map, message):
        index.write_text(json.dumps({**whole, "weight_map": weight_map}))
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path)

    places = whole["weight_map"]
    crowd = Counter(places.values()).most_common(1)[0][0]
    moved = next(name for name, place in places.items() if place == crowd)
    other = next(place for place in places.values() if place != crowd)
    check({**places, moved: other}, f"1 tensors are not in the file.*{moved}")
    check({n: p for n, p in places.items() if n != moved}, f"1 tensors of its files.*{moved}")
    check({**places, moved: "../other.safetensors"}, "outside the folder")
    check([], "weight_map must map")
    check(places | {"x": "model-9.safetensors"}, "1 are missing.*model-9.safetensors")


def test_what_is_no_model_says_what_it_is(tmp_path):
    def check(message, path=tmp_path):
        with pytest.raises(ModelError, match=message):
            load_model(path)

    check("it holds nothing")
    (tmp_path / "notes.txt").write_text("")
    check("no config.json .* it holds notes.txt")
    check("a single file must be a GGUF file", tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    check("config.json: cannot be read as JSON")
    (tmp_path / "config.json").write_text("[]")
    check("config.json: holds a JSON list")
    edit = MODELS["llama"].to_json_string()
    (tmp_path / "config.json").write_text(edit)
    check("no config.json with model.safetensors")
    (tmp_path / "pytorch_model.bin").write_text("")
    check("only as a pickle")
    (tmp_path / "adapter_config.json").write_text("{}")
    check("a PEFT adapter, not a base model")
    check("there is no such file or folder", tmp_path / "absent")
    check("there is no such file or folder", "models/absent/deep")
    with pytest.raises(ModelError, match="dtype is 'int8'"):
        load_model(tmp_path, "int8")


def test_a_hub_id_is_fetched_or_says_why_not(folder, monkeypatch):
    asked = []

    def fetch(name, **options):
        asked.append(name)
        if name == "gone/model":
            raise ConnectionError("no route to host\nand a long trace")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    check_equal(load_model("some/model")[1], twin("llama"))
    with pytest.raises(ModelError, match="gone/model.*ConnectionError: no route to host\\)"):
        load_model("gone/model")
    assert asked == ["some/model", "gone/model"]

"""What users of adapter servers met when they loaded adapters: served here, or refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import CONFIGS, PLAIN, lora_checkpoint, projections, random_params, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft

PLAIN_PARAMS = random_params("plain")
Q0, DOWN0 = "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"
HEAD = "base_model.model.lm_head.weight"
EMBEDDING = "base_model.model.model.embed_tokens"


def load(folder: Path, base: str = "plain", **more):
    return load_peft(folder, CONFIGS[base], random_params(base), **more)


def refused(folder: Path, message: str, base: str = "plain") -> str:
    with pytest.raises(AdapterError, match=message) as error:
        load(folder, base)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_a01_a_module_to_save_is_refused_with_its_tensor(tmp_path: Path):
    config, tensors = lora_checkpoint(modules_to_save=["lm_head"])
    folder = write(tmp_path, config, tensors | {HEAD: PLAIN_PARAMS["lm_head.weight"] + 1})
    refused(folder, r"modules_to_save.*lm_head.*base_model\.model\.lm_head\.weight")
    config["modules_to_save"] = None
    refused(write(tmp_path, config), r"base_model\.model\.lm_head\.weight.*differs by up to 1\.0")


def test_a02_both_spellings_of_the_magnitude(tmp_path: Path):
    config, tensors = lora_checkpoint(use_dora=True)
    versions = set()
    for suffix in ("", ".weight"):
        spelt = {
            key.replace(".lora_A.weight", f".lora_magnitude_vector{suffix}"): np.abs(array[0, 0])
            * np.ones(tensors[key.replace("lora_A", "lora_B")].shape[0], np.float32)
            for key, array in tensors.items()
            if key.endswith("lora_A.weight")
        }
        adapter = load(write(tmp_path / f"x{suffix}", config, tensors | spelt))
        versions.add(adapter.version)
        assert adapter.method == "DORA"
    assert len(versions) == 1
    missing = write(tmp_path / "missing", config, tensors)
    refused(missing, r"4 tensor.*missing: '.*layers\.0\.self_attn\.q_proj\.lora_magnitude_vector'")


@pytest.mark.parametrize("path", ["base_model.model.language_model.model.", "base_model.model."])
def test_a03_paths_of_another_model_show_both_sides(path: str, tmp_path: Path):
    config, tensors = lora_checkpoint()
    tensors = {key.replace("base_model.model.model.", path): a for key, a in tensors.items()}
    message = refused(write(tmp_path, config, tensors), "none of its 8 keys")
    assert f"{path}layers.0.self_attn.q_proj.lora_A.weight" in message
    assert "base_model.model.model.layers.0.self_attn.q_proj" in message


def test_a03_one_path_of_another_model_refuses_the_whole(tmp_path: Path):
    config, tensors = lora_checkpoint()
    key = f"base_model.model.model.{Q0}.lora_A.weight"
    tensors[key.replace("layers.0", "blocks.0")] = tensors.pop(key)
    message = refused(
        write(tmp_path, config, tensors), r"1 tensor.s. missing: '.*layers\.0.*lora_A"
    )
    assert "1 tensor(s) at modules that this base does not have" in message
    assert "blocks.0" in message


def test_a04_an_adapter_says_which_sites_it_has(tmp_path: Path):
    from scute_jax.bank import AdapterBank
    from scute_jax.capacity import capacity_for

    down = load(write(tmp_path / "down", *lora_checkpoint(("down_proj",))))
    attention = load(write(tmp_path / "q", *lora_checkpoint(("q_proj",))))
    assert set(down) == {DOWN0, "layers.1.mlp.down_proj"}
    widths = {p.site: (p.d_in, p.d_out) for p in projections("plain")}
    bank = AdapterBank(widths, capacity_for([attention], 1))
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.down_proj"):
        bank.insert(down)


def test_a05_keys_without_prefix(tmp_path: Path):
    config, tensors = lora_checkpoint()
    bare = {key.removeprefix("base_model.model."): array for key, array in tensors.items()}
    versions = {
        load(write(tmp_path / n, config, t)).version for n, t in (("a", tensors), ("b", bare))
    }
    assert len(versions) == 1


def test_a06_keys_with_the_adapters_name_and_half_a_pair(tmp_path: Path):
    config, tensors = lora_checkpoint()
    named = {key.replace(".weight", ".default.weight"): array for key, array in tensors.items()}
    versions = {
        load(write(tmp_path / n, config, t)).version for n, t in (("a", tensors), ("b", named))
    }
    assert len(versions) == 1
    half = f"base_model.model.model.{DOWN0}.lora_B.weight"
    del tensors[half]
    refused(write(tmp_path / "c", config, tensors), f"1 tensor.s. missing: '{half}'")


def test_a07_names_of_another_trainer(tmp_path: Path):
    config, tensors = lora_checkpoint(("q_proj",))
    rng = np.random.default_rng(0)
    other = "base_model.model.model.unembed_tokens"
    head = {f"{other}.lora_A.weight": (4, 48), f"{other}.lora_B.weight": (97, 4)}
    head = {key: rng.normal(size=shape).astype(np.float32) for key, shape in head.items()}
    folder = write(tmp_path, config, tensors | head)
    refused(folder, r"at modules that this base does not have: '.*model\.unembed_tokens\.lora_A")
    write(tmp_path, config | {"target_modules": ["q_proj", "lm_head"]})
    adapter = load(folder, key_map={r"^model\.unembed_tokens": "lm_head"})
    assert "lm_head" in adapter


def factor(adapter, site: str, tensors: dict) -> float:
    """The scale c that was folded into A."""
    A = tensors[f"base_model.model.model.{site}.lora_A.weight"].T
    scales = adapter[site].terms[0].A / A
    assert np.allclose(scales, scales[0, 0], rtol=1e-5)
    return float(scales[0, 0])


def test_a08_rslora_divides_by_the_root_of_the_rank(tmp_path: Path):
    for rslora, c in ((True, 4.0), (False, 1.0)):
        config, tensors = lora_checkpoint(r=16, lora_alpha=16, use_rslora=rslora)
        adapter = load(write(tmp_path / str(rslora), config, tensors))
        assert factor(adapter, Q0, tensors) == pytest.approx(c)


def test_a09_ranks_and_alphas_by_pattern(tmp_path: Path):
    pattern = r".*layers\.1\..*q_proj"
    config, tensors = lora_checkpoint(
        r=8, lora_alpha=16, rank_pattern={pattern: 32}, alpha_pattern={pattern: 128}
    )
    rng, q1 = np.random.default_rng(0), "layers.1.self_attn.q_proj"
    tensors[f"base_model.model.model.{q1}.lora_A.weight"] = rng.normal(size=(32, 48)).astype("f4")
    tensors[f"base_model.model.model.{q1}.lora_B.weight"] = rng.normal(size=(72, 32)).astype("f4")
    adapter = load(write(tmp_path, config, tensors))
    assert adapter[q1].rank == 32 and adapter[Q0].rank == 8
    assert factor(adapter, q1, tensors) == pytest.approx(4.0)
    assert factor(adapter, Q0, tensors) == pytest.approx(2.0)
    config["rank_pattern"] = {pattern: 16}
    refused(write(tmp_path, config), rf"{q1}\.lora_A.*has shape \[32, 48\].*need \[16, 48\]")
    config["rank_pattern"] = {pattern: "32"}
    refused(write(tmp_path, config), "rank_pattern.*q_proj.*has to be an integer")
    config["rank_pattern"] = {"(": 32}
    refused(write(tmp_path, config), "rank_pattern.*regular expression")


def test_a10_a_scale_that_is_not_stated_is_not_guessed(tmp_path: Path):
    config, tensors = lora_checkpoint()
    for field in ("lora_alpha", "r"):
        rest = {name: value for name, value in config.items() if name != field}
        refused(write(tmp_path, rest, tensors), f"field '{field}' is missing.*state it")


def test_a11_fields_of_other_versions(tmp_path: Path):
    off = {
        "eva_config": None,
        "corda_config": None,
        "trainable_token_indices": None,
        "qalora_group_size": 16,
        "enable_lora": None,
        "some_new_switch": False,
        "some_new_list": [],
    }
    config, tensors = lora_checkpoint()
    assert load(write(tmp_path, config | off, tensors)).method == "LORA"
    for name, value in (("enable_lora", True), ("lora_gain", 2.0), ("new_mode", "fast")):
        refused(write(tmp_path, config | {name: value}), f"of unknown meaning: {name}={value!r}")


def test_a12_truncated_files(tmp_path: Path):
    folder = write(tmp_path, *lora_checkpoint())
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    for damaged in (content[:200], content[:-1], b"\xff" * 8 + content[8:], b""):
        path.write_bytes(damaged)
        refused(folder, r"adapter_model\.safetensors: truncated or corrupt")


def test_a13_a_folder_that_is_not_there(tmp_path: Path):
    refused(tmp_path / "nowhere", "does not exist; needed the folder of an adapter")
    folder = write(tmp_path / "x", *lora_checkpoint())
    with pytest.raises(AdapterError, match="is a file; needed the folder"):
        load(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").unlink()
    refused(folder, r"adapter_config\.json: cannot be read")
    empty = write(tmp_path / "y", {"peft_type": "LORA"})
    refused(empty, "neither adapter_model.safetensors nor adapter_model.bin.*adapter_config.json")


def test_a14_a_config_that_names_no_method(tmp_path: Path):
    refused(write(tmp_path, {"r": 8}, {}), "not a PEFT adapter: peft_type is None")


@pytest.mark.parametrize("name", [None, "no-such-user/no-such-model", "/no/such/folder"])
def test_a15_the_name_of_the_base_is_only_a_hint(name, tmp_path: Path, monkeypatch):
    import socket

    def fail(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", fail)
    config, tensors = lora_checkpoint(base_model_name_or_path=name, revision="main")
    adapter = load(write(tmp_path, config, tensors))
    assert json.loads(adapter.info["config"])["base_model_name_or_path"] == name


def test_a16_safetensors_wins_over_bin(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="torch writes the .bin file")
    config, tensors = lora_checkpoint()
    other = {key: torch.tensor(2 * array) for key, array in tensors.items()}
    versions = {}
    for name, safe in (("both", tensors), ("safe", tensors), ("bin", None)):
        folder = write(tmp_path / name, config, safe)
        if name != "safe":
            torch.save(other, folder / "adapter_model.bin")
        versions[name] = load(folder).version
    assert versions["both"] == versions["safe"] != versions["bin"]


def test_a17_an_adapter_of_a_sibling_base(tmp_path: Path):
    """hidden agrees, so that attention matches; the first tensor that does not refuses all."""
    folder = write(tmp_path, *lora_checkpoint(("q_proj", "down_proj"), base="wider"))
    refused(folder, r"down_proj\.lora_A\.weight' has shape \[4, 96\].*need \[4, 80\]")
    assert len(load(folder, "wider")) == 4
    deeper = write(tmp_path / "deeper", *lora_checkpoint(base="deeper"))
    refused(deeper, r"4 tensor.s. at modules that this base does not have: '.*layers\.2")
    shallow = write(tmp_path / "shallow", *lora_checkpoint())
    refused(shallow, r"4 tensor.s. missing: '.*layers\.2", "deeper")


def test_a18_an_adapter_trained_on_more_tokens(tmp_path: Path):
    whole = {f"{EMBEDDING}.weight": (101, 48), HEAD: (101, 48)}
    whole = {key: np.zeros(shape, np.float32) for key, shape in whole.items()}
    config, tensors = lora_checkpoint(modules_to_save=["embed_tokens", "lm_head"])
    folder = write(tmp_path, config, tensors | whole)
    refused(folder, r"modules_to_save.*embed_tokens\.weight.*vocab 101 vs 97")
    refused(write(tmp_path, config | {"modules_to_save": None}), "vocab 101 vs 97")


def test_a19_replaced_token_rows(tmp_path: Path):
    config, tensors = lora_checkpoint(trainable_token_indices={"embed_tokens": [5, 7]})
    delta = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
    folder = write(tmp_path, config, tensors | {delta: np.ones((2, 48), np.float32)})
    np.testing.assert_array_equal(load(folder)["embed_tokens"].rows.ids, [5, 7])
    for tokens in ([5], [5, 5], [5, -1], [5, True], ["5", 7], {"up_proj": [5, 7]}, {"x": [5, 7]}):
        config["trainable_token_indices"] = tokens
        refused(write(tmp_path, config), "trainable_token_indices|trainable_tokens_delta.*shape")
    config["trainable_token_indices"] = {"embed_tokens": [5, 97]}
    refused(write(tmp_path, config), r"adds tokens to the 97.*embed_tokens has \[97\], lm_head has")
    config["trainable_token_indices"] = None
    refused(write(tmp_path, config), "of no use: '.*trainable_tokens_delta'")


@pytest.mark.parametrize("vocab", [40960, 32000, 129281])
def test_a20_any_vocabulary(vocab: int, tmp_path: Path):
    config, rng = PLAIN | {"vocab_size": vocab}, np.random.default_rng(0)
    A = rng.normal(size=(4, 48)).astype(np.float32)
    B = rng.normal(size=(vocab, 4)).astype(np.float32)
    fields, _ = lora_checkpoint(("lm_head",))
    key = "base_model.model.lm_head.lora_"
    folder = write(tmp_path, fields, {f"{key}A.weight": A, f"{key}B.weight": B})
    assert load_peft(folder, config)["lm_head"].terms[0].B.shape == (4, vocab)


@pytest.mark.parametrize("targets", [["self_attn.q_proj", "model.layers.1.mlp.up_proj"]])
def test_a21_targets_with_a_parent(targets: list, tmp_path: Path):
    _, tensors = lora_checkpoint(("q_proj", "up_proj"))
    config, _ = lora_checkpoint()
    tensors = {k: v for k, v in tensors.items() if "layers.0.mlp" not in k}
    adapter = load(write(tmp_path, config | {"target_modules": targets}, tensors))
    assert set(adapter) == {Q0, "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}


@pytest.mark.parametrize("module", ["up_proj", "gate_proj"])
def test_a22_one_half_of_gate_and_up(module: str, tmp_path: Path):
    adapter = load(write(tmp_path, *lora_checkpoint((module,))))
    assert set(adapter) == {f"layers.{i}.mlp.{module}" for i in (0, 1)}


def test_a23_an_adapted_embedding(tmp_path: Path):
    config, tensors = lora_checkpoint()
    embedding = {"lora_embedding_A": (4, 97), "lora_embedding_B": (48, 4)}
    for name, shape in embedding.items():
        tensors[f"{EMBEDDING}.{name}"] = np.ones(shape, np.float32)
    config["target_modules"] += ["embed_tokens"]
    folder = write(tmp_path, config, tensors)
    assert load(folder)["embed_tokens"].terms[0].A.shape == (97, 4)
    refused(write(tmp_path, config | {"lora_bias": True}), "lora_bias|missing")
    other = {"peft_type": "IA3", "target_modules": ["embed_tokens"], "feedforward_modules": []}
    refused(write(tmp_path, other), "embed_tokens.*lora_embedding_A.*LoRA and DoRA only")
    write(tmp_path, config)
    config["target_modules"].remove("embed_tokens")
    refused(write(tmp_path, config), "2 tensor.s. of no use: '.*embed_tokens.lora_embedding_A'")


@pytest.mark.parametrize(
    ("targets", "feedforward"),
    [
        (["k_proj", "down_proj"], ["up_proj"]),
        (["k_proj", "down_proj"], ["mlp.down_proj"]),
        (["k_proj", "down_proj"], ["k_proj"]),
        (["k_proj", "down_proj"], []),
    ],
)
def test_a24_lists_that_contradict_each_other(targets, feedforward, tmp_path: Path):
    config = {"peft_type": "IA3", "target_modules": targets, "feedforward_modules": feedforward}
    tensors = {
        f"base_model.model.{p.module}.ia3_l": np.ones(
            (1, p.d_in) if "down" in p.module else (p.d_out, 1), np.float32
        )
        for p in projections("plain")
        if p.module.endswith(("k_proj", "down_proj"))
    }
    refused(write(tmp_path, config, tensors), "feedforward_modules")
    served = load(write(tmp_path, config | {"feedforward_modules": ["down_proj"]}))
    assert served[DOWN0].live == ("R",)


def test_a_bad_adapter_leaves_nothing_behind(tmp_path: Path):
    """Refusals leave other adapters as they were: the same folder loads to the same version."""
    folder = write(tmp_path / "good", *lora_checkpoint())
    before = load(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    bad = write(tmp_path / "bad", lora_checkpoint()[0], tensors)
    for key in list(tensors)[:3]:
        save_file(
            tensors | {key: np.full_like(tensors[key], np.nan)}, bad / "adapter_model.safetensors"
        )
        refused(bad, "NaN")
    assert load(folder).version == before.version

"""`scute convert`: what it writes PEFT runs, and the error it prints is the one PEFT shows."""

import json
from pathlib import Path

import numpy as np
import pytest
from files import lora_folder, model_folder, write_lines

pytest.importorskip("torch", reason="the oracle is the PEFT library, which needs torch")

from peft_oracle import base_model, load_with_peft, peft, quiet, save_adapter, torch  # noqa: E402

from scute_jax.cli import main  # noqa: E402
from scute_jax.cli.texts import read_texts  # noqa: E402
from scute_jax.models import observe  # noqa: E402
from scute_jax.models.tokenizer import load_tokenizer  # noqa: E402

MODULES = ["q_proj", "v_proj", "up_proj", "down_proj"]
FULL = 97
DENSE = {  # that load_peft refuses
    "hira": lambda: peft.HiraConfig(r=4, target_modules=MODULES),
    "c3a": lambda: peft.C3AConfig(block_size=8, target_modules=MODULES),
    "miss bat": lambda: quiet(peft.MissConfig, r=4, target_modules=MODULES, init_weights="bat"),
    "glora": lambda: peft.GloraConfig(r=4, target_modules=MODULES),
    "osf": lambda: peft.OSFConfig(target_modules=MODULES, effective_rank=5),
    "frod": lambda: peft.FrodConfig(target_modules=MODULES),
    "whole modules": lambda: peft.LoraConfig(
        r=2, target_modules=MODULES, modules_to_save=["lm_head", "input_layernorm", "embed_tokens"]
    ),
}
SERVED = {
    "dora": lambda: peft.LoraConfig(r=3, target_modules=MODULES, use_dora=True),
    "oft": lambda: quiet(peft.OFTConfig, oft_block_size=4, r=0, target_modules=MODULES),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=MODULES, trainable_token_indices=[3, 5]),
}
TOKENS = np.random.default_rng(0).integers(3, 97, (6, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("convert") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    lines = [{"prompt_token_ids": row.tolist()} for row in TOKENS]
    return write_lines(tmp_path_factory.mktemp("convert") / "data.jsonl", lines)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observe, "WINDOW", 32)


def convert(capsys, *args, expect=0) -> dict:
    assert main(["convert", *map(str, args), "--json"]) == expect
    shown = capsys.readouterr()
    return {"error": shown.err} if expect else json.loads(shown.out)


def logprobs(folder: Path | None) -> np.ndarray:
    model = base_model("plain") if folder is None else load_with_peft(folder, "plain")
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        scores = model(input_ids=tokens).logits[:, :-1].double().log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None])[..., 0].numpy()


@pytest.mark.filterwarnings("ignore")  # PEFT warns of its own doings
@pytest.mark.parametrize("name", [*DENSE, *SERVED])
def test_the_lora_does_what_the_adapter_does_up_to_what_is_said(
    name: str, model, data, tmp_path, capsys
):
    made = (DENSE | SERVED)[name]()
    folder = save_adapter(made, "plain", tmp_path / "a", scale=0.1)
    base, exact = logprobs(None), logprobs(folder)
    effect = np.linalg.norm(exact - base)
    for rank in (FULL, 1):
        out = tmp_path / f"lora-{rank}"
        args = (folder, "--base", model, "--rank", rank, "--out", out)
        report = convert(capsys, *args, "--data", data)
        measured = report["log_probabilities"]
        share = np.linalg.norm(logprobs(out) - exact) / effect
        assert measured["tokens"] == base.size
        np.testing.assert_allclose(measured["rms"], effect / base.size**0.5, rtol=1e-3)
        np.testing.assert_allclose(measured["share"], share, rtol=0.01, atol=2e-4)
        assert all(site["rank"] <= rank for site in report["sites"])
        assert (share < 2e-4) == (report["share"] < 1e-9) == (rank == FULL)


def test_asvd_keeps_back_what_it_measures_and_beats_svd_on_it(model, tmp_path, capsys):
    """Data of few tokens, so that what the projections read has few directions."""
    few = np.random.default_rng(1).choice([5, 9, 30], (24, 30))
    data = write_lines(tmp_path / "d.jsonl", [{"prompt_token_ids": r.tolist()} for r in few])
    folder = save_adapter(SERVED["oft"](), "plain", tmp_path / "a", scale=0.1)
    args = (folder, "--base", model, "--rank", 4, "--data", data)
    svd = convert(capsys, *args, "--out", tmp_path / "svd")
    asvd = convert(capsys, *args, "--method", "asvd", "--out", tmp_path / "asvd")
    assert (svd["log_probabilities"]["tokens"], asvd["log_probabilities"]["tokens"]) == (696, 174)
    assert asvd["log_probabilities"]["share"] < 0.7 * svd["log_probabilities"]["share"]
    assert asvd["share"] > svd["share"]
    for site in asvd["sites"]:
        assert site["weighted_share"] < site["share"]


def test_a_person_gets_a_table_and_the_file_is_that_of_peft(model, tmp_path, capsys):
    out = tmp_path / "out"
    folder = lora_folder(tmp_path / "a")
    assert (
        main(["convert", str(folder), "--base", str(model), "--rank", "4", "--out", str(out)]) == 0
    )
    shown = capsys.readouterr().out
    assert "layers.1.mlp.down_proj" in shown and "leaves out 0.000% of the squared norm" in shown
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 4)
    load_with_peft(out, "plain")


def test_texts_in_every_form(model, tmp_path):
    tokenizer = load_tokenizer(model)
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntwo {")
    assert list(read_texts(plain, tokenizer, 97)) == [tokenizer.encode("one\ntwo {")]
    said = [{"role": "user", "content": "hi"}]
    told = [*said, {"role": "assistant", "content": "yo"}]
    lines = [
        {"text": "one", "label": 3},
        {"prompt": "one ", "completion": "two"},
        {"prompt_token_ids": [1, 2]},
        {"messages": said},
        {"messages": told},
        {"custom_id": "x", "body": {"model": "m", "prompt": "one"}},
    ]
    shown = ("<user>hi<assistant>", "<user>hi<assistant>yo<assistant>")  # by the template of CHAT
    chat = [tokenizer.encode(text, False) for text in shown]
    expected = [tokenizer.encode("one"), tokenizer.encode("one two"), [1, 2], *chat]
    found = list(read_texts(write_lines(tmp_path / "d", lines), tokenizer, 97))
    assert found == [*expected, tokenizer.encode("one")]
    for line, reason in (
        ({"label": 3}, 'line 1 has none of "text"'),
        ("{no", "line 1 is no JSON: "),
        ({"prompt_token_ids": [97]}, "line 1: prompt_token_ids has to be a list of ids below 97"),
        ({"messages": ["hi"]}, "line 1: messages has to be a list of objects"),
        ({"text": 3}, "line 1: what stands for its text is no string"),
    ):
        with pytest.raises(ValueError, match=reason):
            list(read_texts(write_lines(tmp_path / "bad", [line]), tokenizer, 97))
    with pytest.raises(ValueError, match="plain.txt is text, but the base has no tokenizer"):
        list(read_texts(plain, None, 97))
    plain.write_bytes(b"one \xff")
    with pytest.raises(ValueError, match="plain.txt is no text in UTF-8: "):
        list(read_texts(plain, tokenizer, 97))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_says_why(model, data, tmp_path, capsys):
    folder = lora_folder(tmp_path / "a")
    args = (folder, "--base", model, "--rank", 4)
    out = ("--out", tmp_path / "out")
    none = tmp_path / "none"
    for more, reason in (
        (("--method", "asvd", *out), "give --data"),
        (("--out", folder), "is the adapter itself"),
        (("--rank", 0, *out), "--rank 0: needed 1 or more"),
        (("--data", none, *out), "there is no such file"),
        (("--data", data, "--data-tokens", 20, *out), "0 window(s) of text within"),
    ):
        assert reason in convert(capsys, *args, *more, expect=2)["error"]
    lily = peft.LilyConfig(r=2, target_modules=MODULES)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    for config, reason in (
        (lily, "layers.0.self_attn.q_proj: what PEFT computes here is no matrix times x"),
        (prompt, "it adds virtual tokens, which is no change of a projection"),
    ):
        made = save_adapter(config, "plain", tmp_path / type(config).__name__)
        args = (made, "--base", model, "--rank", 4, *out)
        error = convert(capsys, *args, expect=2)["error"]
        assert reason in error and "It is not served: " in error
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_checkpoint_is_not_taken_to_peft_in_part(model, tmp_path, capsys):
    """PEFT itself only warns of tensors that are missing or left over."""
    from safetensors.numpy import load_file, save_file

    folder = save_adapter(DENSE["hira"](), "plain", tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    first = next(iter(whole))
    nan = whole | {first: whole[first] * np.float32(np.nan)}
    extra = whole | {first.replace("layers.0", "layers.9"): whole[first]}
    for tensors, reason in (
        ({k: v for k, v in whole.items() if k != first}, f"1 tensor(s) missing: {first!r}"),
        (extra, "1 tensor(s) of no use to PEFT"),
        (nan, "1 tensor(s) read otherwise by PEFT, or not finite"),
    ):
        save_file(tensors, file)
        args = (folder, "--base", model, "--rank", 4, "--out", tmp_path / "out")
        assert reason in convert(capsys, *args, expect=2)["error"]
    assert not (tmp_path / "out").exists()


def test_without_peft_the_refusal_names_what_would_help(model, tmp_path, capsys, monkeypatch):
    folder = save_adapter(DENSE["hira"](), "plain", tmp_path / "a")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    args = (folder, "--base", model, "--rank", 4, "--out", tmp_path / "out")
    assert "pip install torch transformers peft" in convert(capsys, *args, expect=2)["error"]
    lora = lora_folder(tmp_path / "b")  # what is served needs neither
    convert(capsys, lora, "--base", model, "--rank", 4, "--out", tmp_path / "out")

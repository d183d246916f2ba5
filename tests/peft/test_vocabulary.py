"""Adapters of the embedding and of the head, replaced and added tokens: each module against PEFT's.

A module is compared for every token (the embedding) or for random rows (the head), whatever the
checkpoint does to it; the base may be tied, and may have been resized before the training.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet
from tiny_checkpoints import CONFIGS, random_params, write
from vocabulary_oracle import VOCAB, check, checkpoint, loaded

from scute_jax import AdapterError
from scute_jax.peft import load_peft

ADDED = 4
bases = st.sampled_from(["plain", "tied"])
HEAD = "base_model.model.lm_head"


def run(config, name: str, added: int = 0, tokens=(), seed: int = 0, **save):
    with TemporaryDirectory() as folder:
        path = checkpoint(config, name, Path(folder), seed, tokens, added, **save)
        return check(path, name, added)


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6, unique=True)


@settings(max_examples=25, deadline=None)
@given(
    name=bases,
    targets=st.sets(st.sampled_from(["embed_tokens", "lm_head", "model.embed_tokens"]), min_size=1),
    r=st.integers(1, 20),
    alpha=st.integers(1, 20),
    flags=st.fixed_dictionaries(
        {k: st.booleans() for k in ("use_rslora", "use_dora", "ensure_weight_tying")}
    ),
    init=st.sampled_from([True, "gaussian", "mica"]),
    seed=st.integers(0, 99),
)
def test_lora_and_dora(name, targets, r, alpha, flags, init, seed):
    config = quiet(
        peft.LoraConfig,
        r=r,
        lora_alpha=alpha,
        init_lora_weights=True if flags["use_dora"] else init,
        target_modules=["q_proj", *targets],
        **flags,
    )
    adapter = run(config, name, seed=seed)
    both = name == "tied" and flags["ensure_weight_tying"]
    assert ("embed_tokens" in adapter) == (both or targets != {"lm_head"})
    assert ("lm_head" in adapter) == (both or "lm_head" in targets)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_embedding_has_no_principal_part(init: str):
    config = quiet(peft.LoraConfig, r=3, target_modules=["embed_tokens"], init_lora_weights=init)
    assert len(run(config, "plain")["embed_tokens"].terms) == 1


@pytest.mark.parametrize(
    "pattern", [r".*q_proj|lm_head", r"(.*\.)?embed_tokens", r"model\.embed_t.*"]
)
def test_a_pattern_ties_what_it_names_bare(pattern: str):
    config = quiet(peft.LoraConfig, r=3, target_modules=pattern, ensure_weight_tying=True)
    adapter = run(config, "tied")
    assert ("lm_head" in adapter) == (pattern != r"model\.embed_t.*")


@settings(max_examples=20, deadline=None)
@given(
    name=bases,
    head=st.booleans(),
    tokens=token_lists,
    more=st.one_of(st.none(), token_lists),
    form=st.sampled_from(["list", "embed_tokens", "lm_head", "both"]),
    seed=st.integers(0, 99),
)
def test_listed_tokens(name, head, tokens, more, form, seed):
    listed = {
        "list": tokens,
        "embed_tokens": {"embed_tokens": tokens},
        "lm_head": {"lm_head": tokens},
        "both": {"embed_tokens": tokens, "lm_head": more or tokens},
    }[form]
    under_lora = head and form in ("list", "embed_tokens")  # PEFT allows it for these
    config = quiet(
        peft.LoraConfig,
        r=3,
        target_modules=["q_proj", *(["lm_head"] if under_lora else [])],
        trainable_token_indices=listed,
    )
    run(config, name, seed=seed)


@settings(max_examples=20, deadline=None)
@given(
    name=bases,
    targets=st.sampled_from([None, ["embed_tokens"], ["lm_head"], ".*embed_tokens"]),
    tokens=token_lists,
    added=st.sampled_from([0, ADDED]),
)
def test_trained_tokens(name, targets, tokens, added):
    if added and targets == ["lm_head"] and name == "plain":
        targets = ["embed_tokens", "lm_head"]
    config = quiet(peft.TrainableTokensConfig, token_indices=tokens, target_modules=targets)
    save = {"save_embedding_layers": True} if added else {}
    if added and (name == "plain" or targets == ["lm_head"]):
        return  # the file lacks the head's or the embedding's new rows; see the test of refusals
    run(config, name, added=added, **save)


@settings(max_examples=20, deadline=None)
@given(
    name=bases,
    saved=st.sets(st.sampled_from(["embed_tokens", "lm_head", "norm"]), min_size=1),
    tokens=token_lists,
    tied=st.booleans(),
    copies=st.booleans(),
    seed=st.integers(0, 99),
)
def test_modules_that_differ_in_some_rows(name, saved, tokens, tied, copies, seed):
    config = quiet(
        peft.LoraConfig,
        r=3,
        target_modules=["q_proj"],
        modules_to_save=sorted(saved),
        ensure_weight_tying=tied,
    )
    with TemporaryDirectory() as folder:
        path = checkpoint(config, name, Path(folder), seed, tokens, save_embedding_layers=copies)
        adapter = check(path, name, needs_effect=saved != {"norm"})
        assert ("norm" in adapter) == ("norm" in saved)


@settings(max_examples=25, deadline=None)
@given(
    name=bases,
    targets=st.sets(st.sampled_from(["embed_tokens", "lm_head"])),
    saved=st.sampled_from([None, ["embed_tokens"], ["embed_tokens", "lm_head"]]),
    listed=st.sampled_from([None, [3, VOCAB, VOCAB + 2]]),
    seed=st.integers(0, 99),
)
def test_added_tokens(name, targets, saved, listed, seed):
    if saved or (listed and "embed_tokens" in targets):
        targets = set()
    if saved:
        listed = None
    if name == "plain" and targets and targets != {"embed_tokens", "lm_head"}:
        targets = {"embed_tokens", "lm_head"}  # else the other's new rows are not in the file
    config = quiet(
        peft.LoraConfig,
        r=3,
        target_modules=["q_proj", *sorted(targets)],
        modules_to_save=saved,
        trainable_token_indices=None if targets else listed,
    )
    adapter = run(config, name, ADDED, [5, VOCAB + 1], seed, save_embedding_layers=True)
    for site in ("embed_tokens", "lm_head"):
        assert set(range(VOCAB, VOCAB + ADDED)) <= set(adapter[site].rows.ids.tolist())


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (peft.IA3Config, {"feedforward_modules": []}),
        (peft.VeraConfig, {"r": 4}),
        (peft.OFTConfig, {"oft_block_size": 4}),
        (peft.LoHaConfig, {"r": 2}),
    ],
)
def test_modules_to_save_of_other_methods(method, fields):
    saved = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "norm"]}
    adapter = run(quiet(method, **saved, **fields), "tied", tokens=[3, 9])
    np.testing.assert_array_equal(adapter["embed_tokens"].rows.ids, [3, 9])
    assert "lm_head" not in adapter and "norm" in adapter


def refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        loaded(folder, name)


def test_a_module_that_was_trained_whole_is_refused(tmp_path: Path):
    for saved in ("embed_tokens", "lm_head"):
        config = quiet(peft.LoraConfig, r=3, target_modules=["q_proj"], modules_to_save=[saved])
        folder = checkpoint(config, "plain", tmp_path / saved, tokens=range(25))
        refused(folder, "plain", rf"modules_to_save.*{saved}\.weight.*in 25 of 97 rows")
    config = quiet(peft.LoraConfig, r=3, target_modules=["q_proj"], modules_to_save=["v_proj"])
    folder = checkpoint(config, "plain", tmp_path / "v", tokens=[1])
    refused(folder, "plain", r"modules_to_save.*v_proj\.weight.*a whole projection of its own")


def test_what_a_file_lacks_of_its_added_tokens_is_refused(tmp_path: Path):
    config = quiet(peft.LoraConfig, r=3, target_modules=["q_proj", "lm_head"])
    folder = checkpoint(config, "plain", tmp_path / "a", added=4, save_embedding_layers=True)
    refused(folder, "plain", r"adds tokens to the 97.*embed_tokens has \[\], lm_head has \[97, 98")
    config = quiet(peft.LoraConfig, target_modules=["q_proj"], trainable_token_indices=[3, 98])
    folder = checkpoint(config, "tied", tmp_path / "b", added=4, save_embedding_layers=False)
    refused(folder, "tied", r"adds tokens to the 97.*embed_tokens has \[98\]")
    config = quiet(peft.LoraConfig, r=3, target_modules=["embed_tokens", "lm_head"], use_dora=True)
    folder = checkpoint(config, "plain", tmp_path / "c", added=4, save_embedding_layers=True)
    refused(folder, "plain", "resized to 101 tokens.*adapted by DORA.*plain LoRA")


def test_fewer_tokens_than_the_base_are_refused(tmp_path: Path):
    folder = checkpoint(
        quiet(peft.LoraConfig, target_modules=["q_proj"]), "plain", tmp_path, added=-1,
        save_embedding_layers=True,
    )  # fmt: skip
    refused(folder, "plain", "vocab 96 vs 97.*take none away")


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path):
    from safetensors.numpy import load_file

    def damaged(folder: Path, key: str) -> Path:
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[key] = tensors[key] + 1
        return write(folder, json.loads((folder / "adapter_config.json").read_text()), tensors)

    tie = {"target_modules": ["q_proj"], "ensure_weight_tying": True}
    config = quiet(peft.LoraConfig, modules_to_save=["lm_head"], **tie)
    folder = checkpoint(config, "tied", tmp_path / "a", tokens=[3])
    refused(damaged(folder, f"{HEAD}.weight"), "tied", "are one weight of the trained model")
    config = quiet(peft.LoraConfig, target_modules=["lm_head"], ensure_weight_tying=True)
    folder = checkpoint(config, "tied", tmp_path / "b")
    refused(damaged(folder, f"{HEAD}.lora_A.weight"), "tied", "lora_embedding_B' transposed")
    config = peft.TrainableTokensConfig(token_indices=[3])
    folder = checkpoint(config, "tied", tmp_path / "c")
    key = f"{HEAD}.trainable_tokens_delta"
    refused(damaged(folder, key), "tied", "lm_head: trainable_tokens_delta is not that of embed")


def test_a_base_in_half_precision_is_the_copy_that_was_rounded(tmp_path: Path):
    import ml_dtypes

    config = quiet(peft.LoraConfig, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    folder = checkpoint(config, "plain", tmp_path, tokens=[3, 9])
    half = {k: v.astype(ml_dtypes.bfloat16) for k, v in random_params("plain").items()}
    adapter = load_peft(folder, CONFIGS["plain"], half)
    np.testing.assert_array_equal(adapter["embed_tokens"].rows.ids, [3, 9])

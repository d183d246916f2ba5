"""Streamed text: the parts join to decode of all ids, and no part waits longer than it must."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import TEXTS, sentencepiece, trained, write_gguf
from tokenizers import models

from scute_jax.models.tokenizer import Tokenizer, load_tokenizer


def check_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip)
    parts = [stream.push(number) for number in ids]
    assert not any("\ufffd" in part[-1:] for part in parts)
    parts.append(stream.finish())
    assert "".join(parts) == tokenizer.decode(ids, skip)
    return parts


@pytest.fixture(scope="module")
def streaming(tmp_path_factory) -> dict[str, Tokenizer]:
    path = tmp_path_factory.mktemp("stream") / "m.gguf"
    fields = sentencepiece() | {"bos_token_id": 1, "eos_token_id": 2}
    spm = load_tokenizer(write_gguf(path, model="llama", **fields))
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    return {"bytes": Tokenizer(trained()), "spm": spm, "words": Tokenizer(words)}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streamed_parts_join_to_the_whole(streaming, data):
    tokenizer = streaming[data.draw(st.sampled_from(sorted(streaming)))]
    # The first 300 ids: specials and single bytes, which make and break characters.
    number = st.integers(0, min(300, tokenizer.vocab_size - 1)) | st.integers(
        0, tokenizer.vocab_size - 1
    )
    check_stream(tokenizer, data.draw(st.lists(number, max_size=30)), data.draw(st.booleans()))


@pytest.mark.parametrize("kind", ["bytes", "spm"])
def test_whole_characters_are_given_at_once(streaming, kind):
    tokenizer = streaming[kind]
    for text in TEXTS:
        parts = check_stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), False)
        assert sum(map(bool, parts[:-1])) >= len(text.split()) * 0.5
    parts = check_stream(tokenizer, tokenizer.encode("the cat", add_special_tokens=False), True)
    assert parts[-1] == "" and len(parts) > 2


def test_special_tokens_within_a_run_of_bytes(streaming):
    tokenizer = streaming["spm"]
    euro, start = [3 + byte for byte in "€".encode()], tokenizer.bos_token_id
    check_stream(tokenizer, [*euro, start, 3 + 0xFF, *tokenizer.encode("the")], True)
    check_stream(tokenizer, [*euro, start, *euro, start], True)
    check_stream(tokenizer, [*tokenizer.encode("the"), start, *tokenizer.encode("the")], True)


@pytest.mark.model
def test_smollm2_streams_random_ids(smollm2_path):
    ours = load_tokenizer(smollm2_path)
    rng = random.Random(0)
    for _ in range(20):
        check_stream(ours, [rng.randrange(ours.vocab_size) for _ in range(100)], True)
    for text in TEXTS:
        check_stream(ours, ours.encode(text), True)

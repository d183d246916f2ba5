"""Lines of a request file: what is wrong with one is said of that one."""

import json

import pytest

from scute_jax.cli.requests import parse_line

WRONG = {
    '{"prompt": "a", "adapter": 5}': "adapter must be a name",
    '{"prompt": "a", "adapter": {"n": 1}}': "adapter must be a name",
    '{"prompt": "a", "stop": 5}': "stop must be a string",
    '{"prompt": "a", "stop": {"a": 1}}': "stop must be a string",
    '{"prompt": "a", "top_k": 2147483648}': "top_k must be a whole number up to 2147483647",
    '{"prompt": "a", "temperature": 1' + "0" * 400 + "}": "temperature must be a number from 0 to",
    '{"prompt": "a", "adapter": "n", "scale": 1' + "0" * 400 + "}": "scale must be a finite",
    '{"prompt": "a", "seed": 1' + "0" * 5000 + "}": "is no JSON",
    '{"prompt": ' + "[" * 100_000: "is no JSON",
    '{"prompt": 5}': "prompt has to be a string, not 5",
    '{"messages": 5}': "messages has to be a list of objects",
    '{"prompt_token_ids": 5}': "prompt_token_ids has to be a list of whole numbers, not 5",
    '{"prompt_token_ids": [1, true]}': "prompt_token_ids has to be a list of whole numbers",
    '{"prompt_token_ids": "12"}': "prompt_token_ids has to be a list of whole numbers",
}
BODY = {"custom_id": "a", "url": "/v1/chat/completions"}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "a"}]}
WRONG_BODIES = [
    (BODY | {"body": CHAT | {"model": ["l"]}}, "model ['l'] is neither an adapter nor the base"),
    (BODY | {"body": CHAT | {"stop": 5}}, "stop must be a string"),
    (BODY | {"body": CHAT | {"top_logprobs": 2}}, "top_logprobs needs logprobs"),
    (BODY | {"body": CHAT, "url": ["x"]}, "url has to be one of"),
    (BODY | {"body": CHAT, "method": "GET"}, "method has to be POST"),
]


def parsed(text):
    return parse_line(text, 7, {"n"}, ("base",))


@pytest.mark.parametrize("text, message", WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_said(text, message):
    line = parsed(text)
    assert line.request is None and message in line.error and line.error.startswith("line 7")


@pytest.mark.parametrize("record, message", WRONG_BODIES)
def test_what_is_wrong_in_a_body_is_said(record, message):
    line = parsed(json.dumps(record))
    assert line.request is None and message in line.error and line.id == "a"


def test_bytes_are_utf_8_with_or_without_a_mark():
    assert parsed('{"prompt": "é"}'.encode()).request.prompt == "é"
    assert parsed('{"prompt": "é"}'.encode("utf-8-sig")).request.prompt == "é"
    wrong = parsed('{"prompt": "é"}'.encode("latin-1"))
    assert wrong.request is None and wrong.error.startswith("line 7 is no JSON: 'utf-8' codec")


def test_half_a_surrogate_pair_is_an_id_like_any_other():
    assert parsed('{"id": "\\ud800", "prompt": "a"}').request.id == "\ud800"

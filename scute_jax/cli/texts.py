"""A body of text as token ids: a plain text file, or JSON lines.

A line holds "text", "messages" or "prompt" (with the "completion" that follows it, if there is
one), "prompt_token_ids", or a "body" with these, as in a file of requests. Other fields do not
matter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scute_jax.models.tokenizer import Tokenizer

NEEDED = '"text", "prompt", "messages" or "prompt_token_ids"'


def read_texts(path: Path, tokenizer: Tokenizer | None, vocab: int) -> Iterator[list[int]]:
    """The token ids of each line of a file of JSON lines, or of the whole of any other file.

    Raises: ValueError naming the line that is neither, or ids that the model does not have.
    """
    try:
        yield from _texts(path, tokenizer, vocab)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}.") from None


def _texts(path: Path, tokenizer: Tokenizer | None, vocab: int) -> Iterator[list[int]]:
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "")
    if not first.lstrip().startswith("{"):
        yield _encoded(path.read_text(encoding="utf-8-sig"), tokenizer, str(path))
        return
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _ids(line, tokenizer, vocab, f"{path}: line {number}")


def _ids(line: str, tokenizer: Tokenizer | None, vocab: int, where: str) -> list[int]:
    try:
        held = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}.") from None
    if isinstance(held, dict) and isinstance(held.get("body"), dict):
        held = held["body"]
    if not isinstance(held, dict):
        raise ValueError(f"{where} is no JSON object.")
    ids = held.get("prompt_token_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab for i in ids):
            raise ValueError(f"{where}: prompt_token_ids has to be a list of ids below {vocab}.")
        return ids
    if held.get("messages") is not None and tokenizer is not None:
        return _chat(held["messages"], tokenizer, where)
    text = held.get("text", held.get("prompt", held.get("messages")))
    rest = held.get("completion") or ""
    if text is None or not isinstance(rest, str):
        raise ValueError(f"{where} has none of {NEEDED}.")
    return _encoded(text if rest == "" else f"{text}{rest}", tokenizer, where)


def _chat(messages: Any, tokenizer: Tokenizer, where: str) -> list[int]:
    """A conversation as it stands; one that ends with a question, up to where the answer begins."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{where}: messages has to be a list of objects.")
    asks = not messages or messages[-1].get("role") != "assistant"
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=asks)
    return tokenizer.encode(text, add_special_tokens=False)


def _encoded(text: Any, tokenizer: Tokenizer | None, where: str) -> list[int]:
    if tokenizer is None:
        raise ValueError(
            f"{where} is text, but the base has no tokenizer: give lines of prompt_token_ids."
        )
    if not isinstance(text, str):
        raise ValueError(f"{where}: what stands for its text is no string.")
    return tokenizer.encode(text)

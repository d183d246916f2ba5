"""Text to token ids and back, chats to prompts, and text from a growing list of ids.

    load_tokenizer -> Tokenizer;  encode | encode_chat -> [engine] -> StreamDecoder.push

Sources: tokenizer.json of a Hugging Face folder, which defines the encoding alone, or the metadata
of a GGUF file. tokenizer_config.json adds names of special tokens and the chat template.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from scute_jax.models.chat_template import render_chat
from scute_jax.models.checkpoint import gguf_file
from scute_jax.models.errors import ModelError
from scute_jax.models.folder import read_json
from scute_jax.models.gguf_file import open_gguf_file
from scute_jax.models.gguf_tokenizer import gguf_encoding, gguf_special_tokens
from scute_jax.models.hub import local_path

# The special tokens that have names, as chat templates call them.
SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Vocabularies in formats that are not read.
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def load_tokenizer(path: str | Path) -> "Tokenizer | None":
    """The tokenizer at a folder, GGUF file or hub id; None if it has none (it serves token ids).

    A tokenizer.json goes before the metadata of a GGUF file beside it.
    Raises: ModelError if there is a tokenizer that cannot be read exactly.
    """
    place = local_path(path)
    if place.is_dir() and (place / "tokenizer.json").is_file():
        return _from_folder(place)
    if (file := gguf_file(place)) is not None:
        return _from_gguf(file)
    if found := [name for name in OTHER_FORMATS if (place / name).is_file()]:
        raise ModelError(
            f"{place}: has its tokenizer as {found[0]}, but tokenizer.json is needed; make it once "
            "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    return None


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes as the checkpoint's own tokenizer does."""

    encoding: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens spelt out in the text are those tokens.

        add_special_tokens puts what the model expects around a text (mostly bos) around it.
        """
        try:
            return self.encoding.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ModelError(
                f"the prompt {text!r:.60} is not a text that UTF-8 can hold (a lone surrogate?)."
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> "StreamDecoder":
        return StreamDecoder(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation in the model's own format.

        Raises: ModelError if the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template: send a prompt instead of messages.")
        return render_chat(self.chat_template, messages, add_generation_prompt, self.special_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """The token ids of a conversation. The template writes bos itself where there is one."""
        text = self.apply_chat_template(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this; the model's own vocabulary may be padded to more."""
        return max(self.encoding.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that decode skips when it skips special tokens."""
        added = self.encoding.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.encoding.token_to_id(token)


class StreamDecoder:
    """The text of a growing list of ids, each part as soon as no later id can change it.

    Invariants: the parts that push and finish return, joined, equal decode of all ids pushed.
    """

    _BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._given: list[int] = []  # the ids of the last part: what follows is decoded behind them
        self._held: list[int] = []  # ids whose text is not complete

    def push(self, *ids: int) -> str:
        """The new text that these ids complete; empty while a character is incomplete."""
        self._held += ids
        if self._in_bytes():
            return ""
        text = self._behind()
        return "" if text.endswith("\ufffd") else self._give(text)

    def finish(self) -> str:
        """What is left when no id follows: an incomplete character as U+FFFD."""
        return self._give(self._behind())

    def _in_bytes(self) -> bool:
        """Whether the text ends in byte tokens: a run of them is valid UTF-8 as a whole or not."""
        for number in reversed(self._held):
            token = self._tokenizer.encoding.id_to_token(number)
            if token is not None and not (self._skip and number in self._tokenizer.special_ids):
                return self._BYTE.fullmatch(token) is not None
        return False

    def _behind(self) -> str:
        before = self._tokenizer.decode(self._given, self._skip)
        return self._tokenizer.decode(self._given + self._held, self._skip)[len(before) :]

    def _give(self, text: str) -> str:
        if text:  # ids without text stay held: a decoder may strip the start of what comes first
            self._given, self._held = self._held, []
        return text


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        encoding = tokenizers.Tokenizer.from_file(str(path))
    # tokenizers raises plain Exception for whatever its parser does not like.
    except Exception as error:
        raise ModelError(f"{path}: cannot be read as a tokenizer ({error}).") from error
    encoding.no_truncation()
    encoding.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    names = dict(config)
    legacy = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and legacy.is_file():
        names |= read_json(legacy)
    special = {name: text for name in SPECIAL_NAMES if (text := _content(names.get(name)))}
    _add_tokens(encoding, config.get("added_tokens_decoder") or {}, special, config_path)
    return Tokenizer(encoding, special, _template(folder, config.get("chat_template")))


def _add_tokens(
    encoding: tokenizers.Tokenizer,
    added: Mapping[str, Any],
    special: Mapping[str, str],
    path: Path,
) -> None:
    """Makes added tokens of those that only tokenizer_config.json knows to be ones."""
    known = {token.content for token in encoding.get_added_tokens_decoder().values()}
    try:
        entries = sorted((int(number), dict(entry)) for number, entry in added.items())
        tokens = [(number, tokenizers.AddedToken(**entry)) for number, entry in entries]
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: added_tokens_decoder is malformed ({error}).") from error
    for number, token in tokens:
        if token.content not in known:
            encoding.add_tokens([token])
        if encoding.token_to_id(token.content) != number:
            raise ModelError(
                f"{path}: added_tokens_decoder gives {token.content!r} the id {number}, but in "
                f"tokenizer.json it has {encoding.token_to_id(token.content)}; the two files are "
                "not of one tokenizer."
            )
    known |= {token.content for _, token in tokens}
    named = [t for t in special.values() if t not in known and encoding.token_to_id(t) is not None]
    encoding.add_special_tokens(named)


def _template(folder: Path, configured: Any) -> str | None:
    """The default chat template; a file of its own goes before tokenizer_config.json."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if isinstance(configured, list):  # several, by name
        named = [entry for entry in configured if isinstance(entry, Mapping)]
        configured = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    return configured if isinstance(configured, str) else None


def _content(token: Any) -> str | None:
    """The text of a special token, which is stored as it is or as an object with its options."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _from_gguf(path: Path) -> Tokenizer | None:
    file = open_gguf_file(path)
    if (encoding := gguf_encoding(file)) is None:
        return None
    template = file.metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Tokenizer(encoding, gguf_special_tokens(file), template)

"""The tokenizer that the metadata of a GGUF file describes, rebuilt for the tokenizers library.

A file holds the vocabulary and names the rest: `tokenizer.ggml.model` the algorithm, and for
byte-level BPE `tokenizer.ggml.pre` how text is split into words first. What each name stands for is
defined by llama.cpp; a name without an entry here is refused, since a wrong split gives other ids.
Source: llama.cpp, src/llama-vocab.cpp, and the tokenizer.json of the models the names come from.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from scute_jax.models.errors import ModelError
from scute_jax.models.gguf_file import GGUFFile

# token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class WordSplit:
    """How byte-level BPE of one `tokenizer.ggml.pre` splits text, and what comes with it."""

    regex: str | None = None  # None: that of GPT-2
    digits: bool = False  # every digit is a word of its own, before the regex
    nfc: bool = False  # text is normalised first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token
    add_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OF_LLAMA3 = WordSplit(_LLAMA3, ignore_merges=True, add_bos=True)
_OF_QWEN2 = WordSplit(_QWEN2, nfc=True)
WORD_SPLITS = {
    "gpt-2": WordSplit(),
    "smollm": WordSplit(digits=True),
    "starcoder": WordSplit(digits=True),
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "smaug-bpe": WordSplit(_LLAMA3),
    "qwen2": _OF_QWEN2,
    "deepseek-r1-qwen": _OF_QWEN2,
    "tekken": WordSplit(_TEKKEN, ignore_merges=True, add_bos=True),
}


def gguf_encoding(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer of a file; None if it holds no vocabulary.

    Raises: ModelError naming the metadata field that is missing, malformed or not served.
    """
    kind = _field(file, "model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise _refusal(file, "model", "served are gpt2 (byte-level BPE) and llama (SentencePiece)")
    tokens, types = _vocabulary(file)
    if kind == "gpt2":
        encoding, add_bos = _byte_level(file, tokens), _word_split(file).add_bos
        special_types = (_CONTROL,)
    else:
        encoding, add_bos = _sentencepiece(file, tokens, types), True
        special_types = (_CONTROL, _UNKNOWN)
    named = set(gguf_special_tokens(file).values())
    special, whole = [], []
    for token, type_of_token in zip(tokens, types, strict=True):
        if type_of_token in special_types or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif type_of_token == _USER_DEFINED:
            whole.append(AddedToken(token, normalized=False, special=False))
    encoding.add_special_tokens(special)
    encoding.add_tokens(whole)
    _add_ends(file, encoding, add_bos)
    return encoding


def gguf_special_tokens(file: GGUFFile) -> dict[str, str]:
    """The special tokens a file names, as chat templates call them: "bos_token" -> "<s>"."""
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = _field(file, "tokens") or []
    named = {}
    for key, name in keys.items():
        number = _field(file, f"{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            named[name] = tokens[number]
    return named


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    split = _word_split(file)
    merges = _field(file, "merges")
    if not isinstance(merges, list) or not all(len(str(m).split(" ")) == 2 for m in merges):
        raise _refusal(file, "merges", "it must be a list of pairs of tokens")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    encoding = _bpe(file, tokens, pairs, ignore_merges=split.ignore_merges)
    if split.nfc:
        encoding.normalizer = normalizers.NFC()
    prefix = bool(_field(file, "add_space_prefix"))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.regex is None)
    encoding.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of])
    encoding.decoder = decoders.ByteLevel()
    return encoding


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if _field(file, name):
            raise _refusal(file, name, "normalisation of text is not served for this model")
    scores = _field(file, "scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise _refusal(file, "scores", f"it must hold one number for each of {len(tokens)} tokens")
    unknown = gguf_special_tokens(file).get("unk_token", tokens[0])
    merges = _merges(tokens, types, scores)
    encoding = _bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = _field(file, "add_space_prefix") in (None, True)
    start = [normalizers.Prepend("\u2581")] if prefix else []
    encoding.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "\u2581")])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    encoding.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return encoding


def _bpe(file: GGUFFile, tokens: list[str], merges: list[tuple], **options: Any) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    # tokenizers raises plain Exception, for example for a merge of a token that does not exist.
    except Exception as error:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens and merges do not make a tokenizer ({error})."
        ) from error


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, best first: SentencePiece joins the best-scored result."""
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if token in normal:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            found += [(-score, left, right) for left, right in cuts if {left, right} <= normal]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _add_ends(file: GGUFFile, encoding: Tokenizer, add_bos: bool) -> None:
    """Puts bos and eos around every text, where the file asks for it."""
    asked = {"bos": _field(file, "add_bos_token"), "eos": _field(file, "add_eos_token")}
    ends = {"bos": add_bos if asked["bos"] is None else asked["bos"], "eos": bool(asked["eos"])}
    named = gguf_special_tokens(file)
    used = [name for name, wanted in ends.items() if wanted]
    for name in used:
        if f"{name}_token" not in named:
            if asked[name] is None:  # nobody asked for what the file does not have
                return
            raise _refusal(file, f"{name}_token_id", f"add_{name}_token is set")
    if used:
        parts = [named["bos_token"]] * ends["bos"] + ["$A"] + [named.get("eos_token")] * ends["eos"]
        numbers = [(t, encoding.token_to_id(t)) for t in dict.fromkeys(parts) if t != "$A"]
        encoding.post_processor = processors.TemplateProcessing(parts, special_tokens=numbers)


def _word_split(file: GGUFFile) -> WordSplit:
    name = _field(file, "pre")
    if name not in WORD_SPLITS:
        raise _refusal(
            file,
            "pre",
            f"served are {', '.join(WORD_SPLITS)}: without it nobody knows how text is split into "
            "words. Put the tokenizer.json of the model beside the file and name the folder",
        )
    return WORD_SPLITS[name]


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens, types = _field(file, "tokens"), _field(file, "token_type")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise _refusal(file, "tokens", "it must be a list of texts")
    twice, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens holds {twice!r} {count} times.")
    types = [_NORMAL] * len(tokens) if types is None else types
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _refusal(file, "token_type", f"it must hold one for each of {len(tokens)} tokens")
    return tokens, types


def _field(file: GGUFFile, name: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}")


def _refusal(file: GGUFFile, name: str, needed: str) -> ModelError:
    value = _field(file, name)
    had = "missing" if value is None else f"{value!r:.60}"
    return ModelError(f"{file.path}: tokenizer.ggml.{name} is {had}, but {needed}.")

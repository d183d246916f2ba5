"""Texts, chats, templates and small tokenizers for the tests of tokenizers."""

import json
from functools import cache
from pathlib import Path

import gguf
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from scute_jax.models.gguf_tokenizer import WORD_SPLITS

TEXTS = [
    "",
    "Hello, world!",
    "The quick brown fox doesn't jump; it'll've WALKED'S.",
    "naïve café — “quoted” …",
    "e\u0301 is e plus an accent, \u00e9 is one character",
    "漢字かな交じり文、한국어 текст עברית العربية ไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪",
    "tabs\tand\nnew\n\nlines\r\nand   many    spaces ",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
    "x=3.14159;y=-2e10",
    '{"json": [1, 2, null], \'a\': "b\\n"}',
    "https://example.org/a?b=c&d=%20#e",
    "\u200bzero width\u00a0and no-break\ufeff",
    "a\x00b\x7f\x1b[0m",
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] x [/INST]</s> <unk>",
    "word" * 50,
]
CORPUS = TEXTS + ["the cat sat on the mat and the hat", "don't you'll we're 123 4567 " * 3] * 4
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]


@cache
def trained(pre: str = "llama-bpe") -> tokenizers.Tokenizer:
    """A small byte-level BPE that splits words as the models of `pre` do, with three specials."""
    split = WORD_SPLITS[pre]
    encoding = tokenizers.Tokenizer(models.BPE(ignore_merges=split.ignore_merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.regex:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.regex), "isolated"))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.regex)
    encoding.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    encoding.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoding.train_from_iterator(CORPUS, trainer)
    return encoding


@cache
def sentencepiece() -> dict:
    """A SentencePiece-like vocabulary: tokens, scores and types as a GGUF file lists them."""
    words = "he at on ▁c ▁s ▁t ▁o the ▁the ▁cat ▁sat ▁on ▁▁ ▁▁▁▁ 12".split()
    letters = sorted({c for text in CORPUS[:4] for c in text if c.isascii() and c.isprintable()})
    letters = ["▁", *(letter for letter in letters if letter != " ")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    tokens = list(dict.fromkeys(tokens))
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {"tokens": tokens, "scores": scores, "token_type": types}


def write_gguf(path: Path, **fields) -> Path:
    """A GGUF file of a tokenizer alone; a field that is None is left out."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(pre: str) -> dict:
    stored = json.loads(trained(pre).to_str())
    vocab = stored["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "plain": PLAIN,
    "specials, trim, missing names": "{{ bos_token }}{{ nothing }}{% for m in messages %}"
    "{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ pad_token }}",
    "namespace and loop control": """
        {%- set ns = namespace(count=0, last='') -%}
        {%- for m in messages %}
            {%- if m.role == 'tool' %}{% continue %}{% endif %}
            {%- set ns.count = ns.count + 1 %}{% set ns.last = m.role %}
            {%- if ns.count > 2 %}{% break %}{% endif %}
        {%- endfor %}
        {{ ns.count }} {{ ns.last }}
    """,
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{% if tools is none %} no tools{% endif %}",
    "blocks and whitespace": """
{% for m in messages %}
    {% if m.name is defined %}
    {{ m.name }}
    {% endif %}
  {{ m.role | upper }}: {{ m.content[:5] }}
{% endfor %}
""",
    "dict": "{{ dict(a=1).items() | list }}{{ messages[0].items() | list }}",
}
CHAT = [
    {"role": "system", "content": " Be <b>brief</b> & “kind”. ", "name": None},
    {"role": "user", "content": "hello\n"},
    {"role": "assistant", "content": "hi 漢"},
    {"role": "user", "content": "bye"},
]

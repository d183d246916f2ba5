"""A tiny model folder with a tokenizer and LoRA adapters, written without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIGS, lora_checkpoint, random_params, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = CONFIGS["plain"] | {"max_position_embeddings": 256, "eos_token_id": 96}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def model_folder(folder: Path, tokenizer: bool = True) -> Path:
    """The tiny base of the import's tests; its tokenizer knows bytes 32 .. 127 as tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_params("plain"), folder / "model.safetensors")
    if tokenizer:
        letters = {chr(code): i for i, code in enumerate(range(32, 127))} | {"<|end|>": 95}
        made = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        made.decoder = decoders.Fuse()
        made.save(str(folder / "tokenizer.json"))
        settings = {"chat_template": CHAT, "eos_token": "<|end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def lora_folder(folder: Path, seed: int = 3) -> Path:
    config, tensors = lora_checkpoint()
    rng = np.random.default_rng(seed)
    moved = {k: rng.normal(size=t.shape).astype(np.float32) for k, t in tensors.items()}
    return write(folder, config, moved)


def write_lines(path: Path, records: list) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]

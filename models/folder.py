"""A Hugging Face folder: config.json and safetensors files, read without torch.

safetensors: 8 bytes little-endian length of a JSON header, the header (name -> dtype, shape,
offsets), then the data. Tensors are read with ordinary reads, never mapped: a file that is replaced
meanwhile gives an error, not a signal.
Source: the format description in the safetensors README, version 0.5.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from scute_jax.models.config import LlamaConfig
from scute_jax.models.errors import ModelError
from scute_jax.models.tensors import TensorSource

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Buffers that older checkpoints saved and that the configuration determines.
HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


def open_folder(folder: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration and the tensors of a folder, none of them read yet.

    Raises: ModelError naming the file that is missing, malformed or cut short.
    """
    config = read_config(folder)
    stored = {name: tensor for file in _weight_files(folder) for name, tensor in file.items()}
    stored = {name: tensor for name, tensor in stored.items() if not HARMLESS.search(name)}
    if "embed_tokens.weight" in stored:  # saved from the model below the head
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
    if config.tie_word_embeddings and "lm_head.weight" in stored:
        head, embedding = stored.pop("lm_head.weight"), stored.get("model.embed_tokens.weight")
        if embedding is None or not _same(head, embedding):
            raise ModelError(
                f"{head.file}: lm_head.weight differs from model.embed_tokens.weight, but "
                "config.json says tie_word_embeddings; set it to false to use the head."
            )
    embedding = stored.get("model.embed_tokens.weight")
    source = TensorSource(
        where=str(folder),
        shapes={name: tensor.shape for name, tensor in stored.items()},
        dtype=DTYPES["F32" if embedding is None else embedding.dtype],
        read=lambda name: stored[name].read(),
    )
    return config, source


def read_config(folder: Path) -> LlamaConfig:
    """The configuration of a folder; generation_config.json adds token ids where it is there."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: {_what_it_is(folder)}")
    generation = folder / "generation_config.json"
    return LlamaConfig.from_hf(
        read_json(path), read_json(generation) if generation.is_file() else None, str(path)
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds. Raises: ModelError if it does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__} instead of an object.")
    return value


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. Invariants: the file holds bytes start to start + nbytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def read(self) -> np.ndarray:
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)

    def bytes(self) -> np.ndarray:
        data = np.fromfile(self.file, np.uint8, self.nbytes, offset=self.start)
        if data.size < self.nbytes:
            raise ModelError(f"{self.file}: {self.name} is cut short; the file has changed.")
        return data


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises: ModelError if they do not fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if head.startswith(b"version"):
            raise ModelError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull`.")
        if len(head) < 8 or length > size - 8:
            raise ModelError(
                f"{path}: has {size} bytes, fewer than its header of {length} bytes needs; "
                "it is cut short or no safetensors file: fetch it again."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
            if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
                raise ValueError(f"{name} has shape {shape} and offsets {start}, {end}")
            start, end = 8 + length + start, 8 + length + end
            tensors[name] = StoredTensor(path, name, entry["dtype"], shape, start, end - start)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: its header is malformed ({error!r}): fetch it again.") from error
    for tensor in tensors.values():
        _check(tensor, size)
    return tensors


def _check(tensor: StoredTensor, size: int) -> None:
    where = f"{tensor.file}: {tensor.name}"
    if tensor.dtype not in DTYPES:
        raise ModelError(
            f"{where} is stored as {tensor.dtype}, but served are {', '.join(DTYPES)}; load the "
            "unquantised checkpoint."
        )
    needed = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if tensor.nbytes != needed or tensor.start + tensor.nbytes > size:
        raise ModelError(
            f"{where} of shape {tensor.shape} needs {needed} bytes from byte {tensor.start}, but "
            f"the header gives it {tensor.nbytes} and the file ends at {size}: fetch it again."
        )


def _weight_files(folder: Path) -> list[dict[str, StoredTensor]]:
    """The tensors of each safetensors file of a folder; model.safetensors goes before an index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [read_header(whole)]
    if not index.is_file():
        raise ModelError(f"{folder}: {_what_it_is(folder)}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise ModelError(f"{index}: weight_map must map the name of each tensor to its file.")
    names = sorted(set(places.values()))
    outside = [name for name in names if Path(name).name != name]
    lost = [name for name in names if name not in outside and not (folder / name).is_file()]
    if outside or lost:
        what = f"names files outside the folder: {outside[:5]}" if outside else ""
        what = what or f"names {len(names)} files, but {len(lost)} are missing: {lost[:5]}"
        raise ModelError(f"{index}: {what}; fetch the folder again.")
    shards = {name: read_header(folder / name) for name in names}
    absent = [name for name, place in places.items() if name not in shards[place]]
    if absent:
        raise ModelError(
            f"{index}: {len(absent)} tensors are not in the file it names for them: "
            f"{', '.join(f'{name} ({places[name]})' for name in absent[:5])}; fetch it again."
        )
    unlisted = [name for shard in shards.values() for name in shard if name not in places]
    if unlisted:
        raise ModelError(
            f"{index}: {len(unlisted)} tensors of its files are not in weight_map: {unlisted[:5]}; "
            "index and files are of different checkpoints."
        )
    return [{n: t for n, t in shard.items() if places[n] == name} for name, shard in shards.items()]


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and np.array_equal(a.bytes(), b.bytes())


def _what_it_is(folder: Path) -> str:
    """Why a folder is not a Hugging Face model, for the end of a message."""
    if (folder / "adapter_config.json").is_file():
        return "is a PEFT adapter, not a base model; name the model it was trained on."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return (
            "holds weights only as a pickle, which can run code when it is read; save them as "
            "safetensors (save_pretrained of transformers does)."
        )
    held = sorted(path.name for path in folder.iterdir())[:5]
    return (
        "has no config.json with model.safetensors (or its index), and no GGUF file; it holds "
        f"{', '.join(held) or 'nothing'}."
    )

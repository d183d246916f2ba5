"""The contents of a GGUF file: metadata and tensors, read in one pass over a mapped file.

The reader of the `gguf` package builds several numpy arrays per vocabulary entry and takes seconds
to minutes where this takes a fraction of one; its tables of types and its dequantisation are used.
Source: the format description in ggml, docs/gguf.md, versions 2 and 3.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import constants, quants

from scute_jax.models.errors import ModelError

# ggml value type -> struct code
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. Invariants: the file holds bytes start to start + nbytes."""

    name: str
    shape: tuple[int, ...]  # as torch orders it: slowest first
    type_name: str  # "F16", "Q4_K", ...
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An opened file; `metadata` holds its key-value pairs, arrays as lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def read(self, name: str) -> np.ndarray:
        """A tensor in the float type it is stored in, or dequantised to float32."""
        tensor = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.start)
        if data.size < tensor.nbytes:
            raise ModelError(f"{self.path}: {name} is cut short; the file has changed.")
        if tensor.type_name in _PLAIN:
            return data.view(_PLAIN[tensor.type_name]).reshape(tensor.shape)
        kind = constants.GGMLQuantizationType[tensor.type_name]
        rows = data.reshape(*tensor.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # what is not finite is refused when it is placed
                return quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: {name} is quantised as {tensor.type_name}, which the gguf package "
                "cannot dequantise; use a file of another quantisation."
            ) from error

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a stored tensor; float32 if it is quantised, or not there."""
        tensor = self.tensors.get(name)
        return np.dtype(_PLAIN.get(tensor.type_name if tensor else "", np.float32))


def open_gguf_file(path: Path) -> GGUFFile:
    """Reads metadata and the table of tensors; no weights.

    Raises: ModelError if the file is of another format or version, or cut short.
    """
    with path.open("rb") as file:
        head = file.read(8)
        if head[:4] != b"GGUF":
            lfs = head.startswith(b"version")
            cure = (
                "a Git LFS pointer; run `git lfs pull`" if lfs else f"it starts with {head[:4]!r}"
            )
            raise ModelError(f"{path}: is not a GGUF file but {cure}.")
        version = int.from_bytes(head[4:], "little")
        if version not in (2, 3):
            raise ModelError(
                f"{path}: is GGUF version {version}, but served are little-endian 2 and 3; "
                "convert it again with a current llama.cpp."
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, data)
            except (struct.error, UnicodeDecodeError, _Truncated, OverflowError) as error:
                raise ModelError(
                    f"{path}: its {len(data)} bytes end within the header, or are damaged "
                    f"({error}): fetch it again."
                ) from error


class _Truncated(Exception):
    """A length in the header that leads past the end of the file."""


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data, 8)
    tensor_count, pair_count = cursor.unpack("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("I")[0])
    table = []
    for _ in range(tensor_count):
        name = cursor.string()
        (dims,) = cursor.unpack("I")
        if dims > 4:
            raise _Truncated(f"tensor {name[:60]!r} of {dims} dimensions")
        shape = tuple(reversed(cursor.unpack(f"{dims}Q")))
        table.append((name, shape, *cursor.unpack("IQ")))
    alignment = metadata.get("general.alignment", constants.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, but it must be 1 or more.")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, type_id, offset in table:
        tensors[name] = _tensor(path, name, shape, type_id, begin + offset, len(data))
    return GGUFFile(path, metadata, tensors)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int, size: int
) -> GGUFTensor:
    try:
        kind = constants.GGMLQuantizationType(type_id)
    except ValueError as error:
        raise ModelError(
            f"{path}: {name} has ggml type {type_id}, which this gguf package does not know; "
            "update the package or use a file of another quantisation."
        ) from error
    block, block_bytes = constants.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ModelError(
            f"{path}: {name} has shape {shape}, but {kind.name} packs blocks of {block} values "
            "along the last axis: the file is damaged."
        )
    nbytes = prod(shape) // block * block_bytes
    if start + nbytes > size:
        raise ModelError(
            f"{path}: {name} needs {nbytes} bytes from byte {start}, but the file ends at {size}: "
            "it is cut short; fetch it again."
        )
    return GGUFTensor(name, shape, kind.name, start, nbytes)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data = data
        self.at = at

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        end = self.at + 8 + length
        if end > len(self.data):
            raise _Truncated(f"a string of {length} bytes at byte {self.at}")
        text = self.data[self.at + 8 : end].decode("utf-8")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise _Truncated(f"metadata of unknown type {kind} at byte {self.at}")
        item, count = self.unpack("IQ")
        if count > len(self.data) - self.at:  # every item takes at least a byte
            raise _Truncated(f"an array of {count} items at byte {self.at}")
        if item in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]

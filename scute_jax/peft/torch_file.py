"""Reading `torch.save` files without torch and without running anything that they contain.

A file is a zip archive: `<name>/data.pkl` is a pickle of the state dict whose tensors refer to
storages by key, `<name>/data/<key>` holds the bytes of a storage. A pickle is a program; this one
is run by an unpickler that knows OrderedDict and torch's names for storages and for rebuilding a
tensor, each replaced by something below that only makes numpy arrays. A pickle that asks for any
other name is refused by that name.
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from scute_jax.errors import AdapterError

STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
CURE = "Save the adapter as safetensors (save_pretrained writes it by default)."


class TorchFile:
    """The tensors of one file by name, all read."""

    def __init__(self, path: Path):
        """Raises: AdapterError naming the file and what in it is not a plain tensor."""
        self.path = path
        if not zipfile.is_zipfile(path):
            raise AdapterError(
                f"{path}: not a zip archive: truncated, corrupt, or in torch's format from before "
                f"1.6, which is not read. {CURE}"
            )
        try:
            with zipfile.ZipFile(path) as archive:
                state = _Unpickler(archive, path).load()
        except AdapterError:
            raise
        except Exception as error:  # whatever a malformed pickle makes the machinery raise
            reason = f"{type(error).__name__}: {error}"
            raise AdapterError(f"{path}: truncated or corrupt ({reason}). {CURE}") from None
        if not isinstance(state, Mapping) or not all(
            isinstance(k, str) and isinstance(v, np.ndarray) for k, v in state.items()
        ):
            raise AdapterError(f"{path}: holds no mapping of names to tensors. {CURE}")
        self._tensors = dict(state)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


@dataclass(frozen=True)
class _StorageType:
    dtype: Any


class _Unpickler(pickle.Unpickler):
    """Admits tensors, storages and OrderedDict; every other global is refused by its name."""

    def __init__(self, archive: zipfile.ZipFile, path: Path):
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise AdapterError(
                f"{path}: {len(pickles)} data.pkl in the archive, needed one. {CURE}"
            )
        self._archive, self._path = archive, path
        self._root = pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, np.ndarray] = {}
        super().__init__(archive.open(pickles[0]))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return _StorageType(STORAGES[name])
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if (module, name) not in known:
            raise AdapterError(
                f"{self._path}: its pickle asks for {module}.{name}, which is neither a tensor nor "
                f"a mapping of tensors; it is not run. {CURE}"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The storage that a tensor refers to: ("storage", type, key, device, element count)."""
        _, kind, key, _, count = pid
        if key not in self._storages:
            entry = self._archive.getinfo(f"{self._root}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise AdapterError(f"{self._path}: storage {key} is compressed. {CURE}")
            self._storages[key] = self._in_byte_order(self._archive.read(entry), kind.dtype)
        storage = self._storages[key]
        if storage.dtype != np.dtype(kind.dtype) or storage.size < count:
            raise AdapterError(
                f"{self._path}: storage {key} holds {storage.size} elements of {storage.dtype}, "
                f"but {count} of {np.dtype(kind.dtype)} are asked of it; the file is corrupt. "
                f"{CURE}"
            )
        return storage

    def _in_byte_order(self, data: bytes, dtype: Any) -> np.ndarray:
        order = f"{self._root}byteorder"
        storage = np.frombuffer(data, dtype)
        if order in self._archive.namelist() and self._archive.read(order) == b"big":
            return storage.byteswap()
        return storage


def _rebuild_tensor(storage, offset, size, stride, *_) -> np.ndarray:
    """The view of a storage that a tensor is. Raises: ValueError if it leaves the storage."""
    if not isinstance(storage, np.ndarray) or len(size) != len(stride):
        raise ValueError("a tensor without storage, or with strides that do not fit its shape")
    if any(type(n) is not int or n < 0 for n in (offset, *size, *stride)):
        raise ValueError("a tensor with a negative offset, size or stride")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last >= storage.size or math.prod(size) > storage.size):
        raise ValueError(f"a tensor of {size} that storage of {storage.size} elements cannot hold")
    if 0 in size:
        return np.zeros(size, storage.dtype)
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)


def _rebuild_parameter(tensor, *_) -> np.ndarray:
    return tensor

"""Reading safetensors files that come from anywhere: checked before use, one tensor at a time.

Format: 8 bytes, the length n of the header (little endian); n bytes of JSON, tensor name ->
{dtype, shape, data_offsets}; the data. The offsets have to cover the data without hole or overlap.
Tensors are read with ordinary reads, never mapped: a file that is replaced while it is read gives
an error, not a signal.
"""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from scute_jax.errors import AdapterError

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class SafetensorsFile:
    """The tensors of one file by name; `shapes` holds what the header says, nothing is read yet."""

    def __init__(self, path: Path):
        """Reads and checks the header. Raises: AdapterError naming the file and what is wrong."""
        self.path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if self._size < 8 or not 0 < length <= min(self._size - 8, MAX_HEADER):
                    raise self._corrupt(f"its header claims {length} of {self._size} bytes")
                header = json.loads(file.read(length))
        except OSError as error:
            raise AdapterError(f"{path}: cannot be read ({error}).") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, AdapterError):
                raise
            raise self._corrupt(f"its header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._corrupt(f"its header is a {type(header).__name__}, not an object")
        header.pop("__metadata__", None)
        self._start = 8 + length
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}
        self._check_coverage()
        self.shapes = {name: shape for name, (_, shape, _, _) in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor as it is stored. Raises: AdapterError if the file has become too short."""
        dtype, shape, begin, end = self._entries[name]
        try:
            data = np.fromfile(self.path, np.uint8, end - begin, offset=self._start + begin)
        except OSError as error:
            raise AdapterError(f"{self.path}: cannot be read ({error}).") from None
        if data.size < end - begin:
            raise self._corrupt(f"tensor {name!r} ends after {data.size} of {end - begin} bytes")
        return data.view(dtype).reshape(shape)

    def _entry(self, name: str, entry: object) -> tuple[np.dtype, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
            raise self._corrupt(f"the header entry of {name!r} lacks dtype, shape or data_offsets")
        if entry["dtype"] not in DTYPES:
            raise AdapterError(
                f"{self.path}: tensor {name!r} has dtype {entry['dtype']!r}; known are "
                f"{', '.join(DTYPES)}. Save it again in one of these."
            )
        dtype, shape, offsets = (
            np.dtype(DTYPES[entry["dtype"]]),
            entry["shape"],
            entry["data_offsets"],
        )
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise self._corrupt(f"tensor {name!r} has shape {shape} and offsets {offsets}")
        needed, held = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
        if needed != held:
            raise self._corrupt(
                f"tensor {name!r} of shape {shape} and dtype {entry['dtype']} needs {needed} "
                f"bytes, its offsets hold {held}"
            )
        return dtype, tuple(shape), *offsets

    def _check_coverage(self) -> None:
        end = 0
        for begin, stop in sorted((b, e) for _, _, b, e in self._entries.values()):
            if begin != end:
                raise self._corrupt(f"its data has a hole or an overlap at byte {min(begin, end)}")
            end = stop
        if end != self._size - self._start:
            held = self._size - self._start
            raise self._corrupt(f"its header describes {end} bytes of data, the file holds {held}")

    def _corrupt(self, reason: str) -> AdapterError:
        return AdapterError(
            f"{self.path}: truncated or corrupt: {reason}; copy or save the file again."
        )


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

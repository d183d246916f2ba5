"""The result file: records are appended as they come, so that a run that was killed can go on."""

import json
import math
import os
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

BEGIN = b'{"id": "'  # of every record


class ResultsFile:
    """JSON lines, one per request; `done` holds the ids that have a record.

    A record is written and handed to the operating system whole before the next one. What a killed
    run left of a record is cut off when the file is opened (`with`) again.
    """

    def __init__(self, path: Path, resume: bool):
        """Reads what is there, and writes nothing yet.

        Raises: ValueError if there are results already and `resume` is not set, or if the file
        holds something else.
        """
        self.path, self.done = path, set[str]()
        if not path.parent.is_dir():
            raise ValueError(f"--output {path}: there is no folder {path.parent}.")
        if path.exists() and not path.is_file():
            raise ValueError(f"--output {path} is no regular file, to which records are appended.")
        self._whole = self._read() if path.exists() else 0
        if not resume and path.exists() and path.stat().st_size:
            raise ValueError(
                f"{path} holds {len(self.done)} results already; give --resume to go on with them, "
                "or another --output."
            )

    def __enter__(self) -> "ResultsFile":
        """Raises: OSError if the file cannot be written."""
        # Without a buffer: what a write that failed leaves in one would be written at the end.
        self._file: RawIOBase = open(self.path, "ab", buffering=0)
        self._file.truncate(self._whole)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record. Raises: OSError naming the file, if the disk is full for instance."""
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
        line = (
            text.encode(errors="backslashreplace") + b"\n"
        )  # half a surrogate pair as JSON has it
        end, rest = self._file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._cut(end)
            raise OSError(
                error.errno, f"{error.strerror}; results so far are kept", str(self.path)
            ) from error
        self.done.add(_id(record))

    def _cut(self, end: int) -> None:
        """Takes back what was written of a record, if the disk lets us; else reopening does."""
        try:
            os.truncate(self.path, end)
        except OSError:
            pass

    def _read(self) -> int:
        """Notes the ids of all whole records; returns where they end."""
        whole = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                cut = not line.endswith(b"\n")  # while it was written
                try:
                    name = _id(json.loads(line))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    begun = BEGIN.startswith(line[: len(BEGIN)])
                    if cut and begun and isinstance(error, ValueError):
                        break
                    raise ValueError(
                        f"{self.path} line {number} is no result of `scute generate`; "
                        "give another --output."
                    ) from None
                if cut:
                    break
                self.done.add(name)
                whole += len(line)
        return whole


def _id(record: Mapping[str, Any]) -> str:
    """The id of a result. Raises: KeyError if it is none."""
    openai = "custom_id" in record
    needed = "response" if openai else "finish_reason"
    if needed not in record:
        raise KeyError(needed)
    return str(record["custom_id" if openai else "id"])


def _finite(value: Any) -> Any:
    """A value with null for the numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

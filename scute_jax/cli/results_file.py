"""The result file: records are appended as they come, so that a run that was killed can go on."""

import json
import os
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any


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
        self._whole = self._read() if path.exists() else 0
        if self.done and not resume:
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
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
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
                if not line.endswith(b"\n"):
                    break  # cut off while it was written
                try:
                    self.done.add(_id(json.loads(line)))
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{self.path} line {number} is no result of `scute generate`; "
                        "give another --output."
                    ) from None
                whole += len(line)
        return whole


def _id(record: Mapping[str, Any]) -> str:
    return str(record["custom_id"] if "custom_id" in record else record["id"])

"""Identity is content: versions are digests of what an adapter computes, never of where it lies."""

import hashlib
from collections.abc import Iterable

import numpy as np


def content_version(parts: Iterable[str | bytes | np.ndarray]) -> str:
    """A hex digest (128 bits) of strings and arrays, in order; dtype and shape count."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            header, data = f"{part.dtype}{part.shape}".encode(), np.ascontiguousarray(part).data
            data = data.cast("B") if part.size else b""
        else:
            header, data = b"", part.encode() if isinstance(part, str) else part
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()

"""Arrays as metadata: hashable by content, so that a pytree may carry them as a static field."""

from collections.abc import Iterator, Mapping

import numpy as np

from scute_jax.identity import content_version


class HashedArrays(Mapping[str, np.ndarray]):
    """A read-only mapping of names to arrays; equal contents are equal and hash alike."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = dict(arrays)
        self._digest = content_version(p for item in sorted(self._arrays.items()) for p in item)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashedArrays) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"HashedArrays({len(self._arrays)} arrays, {self._digest[:8]})"

"""The pages of the KV cache: who holds which, and which can be shared as a common prefix.

Host only. A full page of prompt tokens is known by a digest of the adapter's content version and of
all tokens up to its end; a later prompt that starts the same way under the same weights shares it.
Pages that nobody holds stay known until the room is needed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class PagePool:
    """The pages 0 .. num_pages - 1.

    Invariants: a page is free (held by nobody, known by no digest), idle (held by nobody, known)
    or held; held counts are positive.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds, kept as prefixes that later prompts may share."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Pages that some sequence holds."""
        return len(self._held)

    def take(self, count: int) -> list[int] | None:
        """`count` pages held once, or None if there are not that many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
                self._free.append(page)
            page = self._free.pop()
            self._held[page] = 1
            pages.append(page)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends one hold on each page."""
        for page in reversed(pages):  # the end of a prefix is the first to go
            self._held[page] -= 1
            if self._held[page] == 0:
                del self._held[page]
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of the digests, held once more."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._held[page] = self._held.get(page, 0) + 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, digest: bytes, page: int) -> None:
        """Makes a held page known, unless an equal one is known already."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def forget(self) -> None:
        """Ends all sharing: what the pages held is gone."""
        for page in list(self._digest_of):
            self._forget(page)
        self._free += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]


def page_digests(
    version: str, tokens: Sequence[int], page_size: int, active_from: int = 0, before: str = ""
) -> list[bytes]:
    """A digest for each full page of a prompt: of the adapter's version and all tokens up to it.

    Pages before `active_from`, where the adapter begins to act, are those of version `before`.
    """
    ids = np.asarray(tokens, np.int64)
    first = before if active_from else version
    digest = hashlib.blake2b(first.encode(), digest_size=16).digest()
    digests = []
    for end in range(page_size, len(ids) + 1, page_size):
        page = ids[end - page_size : end].tobytes()
        if active_from and end - page_size <= active_from < end:
            page += f"{version} from {active_from}".encode()
        digest = hashlib.blake2b(digest + page, digest_size=16).digest()
        digests.append(digest)
    return digests

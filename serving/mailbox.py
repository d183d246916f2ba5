"""Where the pieces of one text wait for whoever asked for it."""

import threading
from collections.abc import Callable

from scute_jax.serving.request import Chunk


class Mailbox:
    """Holds at most one piece; what comes before it is taken is added to it.

    So a requester that stops reading costs the memory of its own text and holds nobody up.
    `notify` is called, in the thread of the engine, when there is something after nothing.
    """

    def __init__(self, notify: Callable[[], None] | None = None):
        self._lock = threading.Lock()
        self._chunk: Chunk | None = None
        self._notify = notify

    def put(self, chunk: Chunk) -> None:
        """Adds a piece."""
        with self._lock:
            before = self._chunk
            if before is not None:
                ids = before.token_ids + chunk.token_ids
                chunk = Chunk(chunk.id, before.text + chunk.text, ids, chunk.completion)
            self._chunk = chunk
        if before is None:
            self.wake()

    def wake(self) -> None:
        """Calls the requester."""
        if self._notify is not None:
            self._notify()

    def take(self) -> Chunk | None:
        """What has come since the last call; None if nothing has."""
        with self._lock:
            chunk, self._chunk = self._chunk, None
        return chunk

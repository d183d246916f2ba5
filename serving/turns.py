"""A lock that is given in the order in which it was asked for.

A plain lock goes to whoever is awake: a loop that releases it and takes it again at once would keep
everybody else waiting.
"""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """`with lock: ...`; the thread that holds it may enter again."""

    def __init__(self) -> None:
        self._inner = threading.Lock()  # held for a few instructions only
        self._waiting: deque[threading.Event] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> "FairLock":
        me = threading.get_ident()
        with self._inner:
            if self._owner == me or self._owner is None:
                self._owner, self._depth = me, self._depth + 1
                return self
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:  # a KeyboardInterrupt: the turn goes to the next in line
            with self._inner:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._hand_over()
            raise
        self._owner, self._depth = me, 1  # handed over to this thread: no other writes it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._inner:
            self._depth -= 1
            if not self._depth:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner, self._depth = (-1, 1) if self._waiting else (None, 0)  # -1: who wakes up now
        if self._waiting:
            self._waiting.popleft().set()

"""The engine for an event loop: one async generator per request, the steps on their own thread.

    async with AsyncEngine(engine) as served:
        async for chunk in served.stream(request):
            ...

A consumer that stops reading holds nobody up: its text goes on to its end into one pending piece,
and pages, row and slot are given back as ever. What it costs is the memory of its own text, and one
of `max_open` streams until it is read or closed; a request beyond them is refused at once.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import TracebackType

from scute_jax.serving.engine import Engine, Ticket
from scute_jax.serving.mailbox import Mailbox
from scute_jax.serving.request import Chunk, Completion, Request


class Overloaded(RuntimeError):
    """`max_open` streams are open: the request was not taken. Ask again later."""


class EngineStopped(RuntimeError):
    """The engine is closed, or failed; the message says why."""


class AsyncEngine:
    """Runs an engine on a background thread while it is entered. For any number of event loops.

    The engine itself can be used beside it: adapters are added and removed there.
    """

    def __init__(self, engine: Engine, *, max_open: int = 4096):
        self.engine, self.max_open = engine, max_open
        self._open: set[Ticket] = set()
        self._taken = 0  # streams that are open
        self._submitting = 0  # those of them whose request is not yet with the engine
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._state = "new"  # then "running", "draining", "stopped"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="scute-engine", daemon=True)

    async def __aenter__(self) -> "AsyncEngine":
        """Raises: RuntimeError if it was entered before."""
        if self._thread.ident is not None:
            raise RuntimeError("an AsyncEngine is entered once; make another of the same engine.")
        self._state = "running"
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(drain=error is None)

    async def close(self, drain: bool = True) -> None:
        """Takes no more requests and stops; `drain` lets what was submitted come to its end."""
        with self._lock:
            if self._state in ("new", "stopped"):
                self._state = "stopped"
                return
            self._state = "draining"
            tickets = () if drain else tuple(self._open)
        for ticket in tickets:
            self.engine.cancel(ticket)
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def generate(self, request: Request) -> Completion:
        """The completion of a request. Raises as `stream`."""
        completion = None
        async for chunk in self.stream(request):
            completion = chunk.completion
        assert completion is not None
        return completion

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Pieces of the text as it is generated; the last one carries the completion.

        Leaving the generator early (a client that hangs up) cancels the request.
        Raises: Overloaded if too many streams are open; EngineStopped after `close`, or if the
        engine failed.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop is closed: nobody will read this
                self._wake.set()

        self._take_place()
        ticket = None
        try:
            sink = Mailbox(notify)
            # Tokenizing takes a while; where its result is not awaited any more, it is cancelled.
            submitting = self._start(loop, request, sink)
            try:
                ticket = await asyncio.shield(submitting)
            except asyncio.CancelledError:
                submitting.add_done_callback(self._abandon)
                raise
            while True:
                arrived.clear()
                chunk = sink.take()
                if chunk is not None:
                    yield chunk
                    if chunk.completion is not None:
                        return
                elif self._failure is not None:
                    raise EngineStopped(f"the engine failed: {self._failure}") from self._failure
                else:
                    await arrived.wait()
        finally:
            if ticket is not None:
                self._end(ticket)
            with self._lock:
                self._taken -= 1

    def _take_place(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise EngineStopped(f"the engine failed: {self._failure}") from self._failure
            if self._state != "running":
                raise EngineStopped("the engine takes no requests: it is not running.")
            if self._taken >= self.max_open:
                raise Overloaded(f"{self.max_open} streams are open; ask again later.")
            self._taken += 1
            self._submitting += 1

    def _start(
        self, loop: asyncio.AbstractEventLoop, request: Request, sink: Mailbox
    ) -> asyncio.Future[Ticket]:
        try:
            return loop.run_in_executor(None, self._submit, request, sink)
        except RuntimeError:  # the loop's threads are shut down
            self._submitted()
            raise

    def _submit(self, request: Request, sink: Mailbox) -> Ticket:
        try:
            ticket = self.engine.submit(request, sink)
            with self._lock:
                self._open.add(ticket)
                failed = self._failure is not None
            if failed:
                sink.wake()
            return ticket
        finally:
            self._submitted()

    def _submitted(self) -> None:
        with self._lock:
            self._submitting -= 1
        self._wake.set()

    def _abandon(self, submitting: asyncio.Future) -> None:
        if not submitting.cancelled() and submitting.exception() is None:
            self._end(submitting.result())

    def _end(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.discard(ticket)
        self.engine.cancel(ticket)
        self._wake.set()

    def _work(self) -> None:
        """The thread: steps while there is work, sleeps while there is none."""
        try:
            while True:
                self._wake.clear()
                if self.engine.busy:
                    self.engine.step()
                elif self._state == "draining" and not self._submitting:
                    return
                else:
                    self._wake.wait()
        except BaseException as error:  # every stream is told; the thread has nobody to tell
            with self._lock:
                self._failure = error
                tickets = tuple(self._open)
            for ticket in tickets:
                ticket.sink.wake()
        finally:
            with self._lock:
                self._state = "stopped"

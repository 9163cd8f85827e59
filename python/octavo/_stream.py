"""Answers piece by piece, for threads and for event loops."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING

from octavo._errors import OctavoError
from octavo._octavo import Chunks

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Lock as AsyncLock

    from typing_extensions import Self

    from octavo._octavo import Chunk, Result, Ticket


class Stream(Chunks):
    """An answer on its way. Iterate over it for its :class:`Chunk`\\ s; then ``result`` is the whole."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._outcome = _Outcome(ticket)

    def _ended(self) -> None:
        self._outcome.get()

    @property
    def result(self) -> Result:
        """The finished answer; waits for its end. After :meth:`cancel` its ``finish_reason`` is ``"cancelled"``. What
        has not been read of the chunks by then is in it alone: iterating ends.

        Raises:
            DeadlineExceededError: ``deadline_s`` passed.
            OctavoError: The request failed.
        """
        self._ticket.wait()
        return self._outcome.get()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model sees it."""
        return self._ticket.prompt_token_ids

    def cancel(self) -> None:
        """Stop the work within one step. What has been produced can still be read."""
        self._ticket.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ticket.cancel()

    def __repr__(self) -> str:
        return f"<Stream, {'ended' if self._ticket.ended else 'open'}>"


class AsyncStream:
    """A :class:`Stream` for an event loop. The request is made at the first step into it."""

    def __init__(self, submit: Callable[..., Ticket]) -> None:
        self._submit = submit
        self._ticket: Ticket | None = None
        self._outcome: _Outcome | None = None
        self._closed = False
        self._loop: AbstractEventLoop | None = None
        self._starting: AsyncLock | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        from octavo._async import next_chunk

        ticket = await self._started()
        if ticket is None:
            raise StopAsyncIteration
        try:
            chunk = await next_chunk(ticket)
        except BaseException:
            # The task was cancelled, so nobody waits for the answer any more.
            ticket.cancel()
            raise
        if chunk is None:
            assert self._outcome is not None
            self._outcome.get()
            raise StopAsyncIteration
        return chunk

    async def _started(self) -> Ticket | None:
        """The request, made once, whoever comes first; ``None``: it was given up before."""
        from octavo._async import lock, running_loop, submitted

        loop = running_loop()
        if self._starting is None:
            self._starting, self._loop = lock(), loop
        if self._loop is not loop:
            raise OctavoError("this stream was begun in another event loop, which is told of its chunks")
        async with self._starting:
            if self._ticket is None and not self._closed:
                self._ticket = await submitted(self._submit)
                self._outcome = _Outcome(self._ticket)
                if self._closed:  # meanwhile
                    self._ticket.cancel()
        return self._ticket

    @property
    def result(self) -> Result:
        """The finished answer, once the stream has been read to its end."""
        if self._outcome is None or self._ticket is None or not self._ticket.wait(0.0):
            raise OctavoError("the stream has not been read to its end; its result comes with the last chunk")
        return self._outcome.get()

    def cancel(self) -> None:
        """Stop the work within one step."""
        self._closed = True
        if self._ticket is not None:
            self._ticket.cancel()

    async def aclose(self) -> None:
        """Stop the work within one step."""
        self.cancel()

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        if self._ticket is None:
            return f"<AsyncStream, {'closed' if self._closed else 'not begun'}>"
        return f"<AsyncStream, {'ended' if self._ticket.ended else 'open'}>"


class _Outcome:
    """How a request ended, asked of the engine once and remembered."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._lock = Lock()
        self._result: Result | None = None
        self._error: OctavoError | None = None

    def get(self) -> Result:
        with self._lock:
            if self._result is None and self._error is None:
                try:
                    self._result = self._ticket.result()
                except OctavoError as error:
                    self._error = error
        if self._error is not None:
            # Whoever asks again gets it as it came, without the frames of those who asked before.
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

"""The engine and event loops. A loop watches one pipe, into which the engine thread writes at most once per step; then
whoever waits looks into its own mailbox. No thread per request, and the engine never touches Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from octavo._batch import naming
from octavo._errors import QueueFullError
from octavo._octavo import Waker

if TYPE_CHECKING:
    from octavo._octavo import Chunk, Result, Ticket


class _LoopWaker:
    """One event loop's pipe, and who waits for it to be written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker = Waker()
        self._waiting: dict[asyncio.Future[Chunk | None], Ticket] = {}
        # The loop holds this object, not the other way round: it must be able to die.
        loop.add_reader(self.waker.fileno(), self._look)

    def _look(self) -> None:
        self.waker.clear()
        for future, ticket in list(self._waiting.items()):
            self._look_for(future, ticket)

    @staticmethod
    def _look_for(future: asyncio.Future[Chunk | None], ticket: Ticket) -> None:
        if not future.done():
            chunk = ticket.next(0.0)
            if chunk is not None or ticket.ended:
                future.set_result(chunk)

    async def next_chunk(self, ticket: Ticket) -> Chunk | None:
        chunk = ticket.next(0.0)
        if chunk is not None or ticket.ended:
            return chunk
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Chunk | None] = loop.create_future()
        self._waiting[future] = ticket
        # The engine thread may be busy with a long step when the deadline of one that waits passes.
        left = ticket.expires_in_s
        timer = loop.call_later(left, self._look_for, future, ticket) if left else None
        try:
            return await future
        finally:
            del self._waiting[future]
            if timer is not None:
                timer.cancel()


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = WeakKeyDictionary()


def _waker_of_loop() -> _LoopWaker:
    loop = asyncio.get_running_loop()
    found = _wakers.get(loop)
    if found is None:
        found = _wakers[loop] = _LoopWaker(loop)
    return found


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here. (Whoever imports :mod:`octavo` need not pay for importing asyncio.)"""
    return asyncio.get_running_loop()


async def submitted(submit: Callable[[Waker], Ticket]) -> Ticket:
    """Makes the request. Template and tokenizer run on a thread of the loop's pool: a long prompt must not hold up the
    loop."""
    return await asyncio.to_thread(submit, _waker_of_loop().waker)


async def next_chunk(ticket: Ticket) -> Chunk | None:
    """The next piece; ``None`` at the end."""
    return await _waker_of_loop().next_chunk(ticket)


async def finish(submit: Callable[[Waker], Ticket]) -> Result:
    """The whole answer. Cancelling the task cancels the request."""
    return await _answer(await submitted(submit))


async def _answer(ticket: Ticket) -> Result:
    try:
        while await next_chunk(ticket) is not None:
            pass
    finally:
        # After the end this does nothing.
        ticket.cancel()
    return ticket.result()


async def agenerate_batch(submit: Callable[[int, Waker], Ticket], choices: Sequence[int], room: int) -> list[Result]:
    """The answers in order. A window of them is in flight, as in :func:`octavo._batch.run_batch`; the first
    failure cancels the others."""
    results: dict[int, Result] = {}
    flying: dict[asyncio.Task[Result], int] = {}
    waiting = list(reversed(range(len(choices))))
    try:
        while len(results) < len(choices):
            while waiting and (not flying or sum(choices[i] for i in flying.values()) + choices[waiting[-1]] <= room):
                i = waiting[-1]
                try:
                    ticket = await submitted(partial(submit, i))
                except QueueFullError:
                    # As in `_batch`: go on when one of ours comes home; with none out there is nothing to wait for.
                    if not flying:
                        raise
                    break
                flying[asyncio.ensure_future(_answer(ticket))] = waiting.pop()
            finished, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                i = flying.pop(task)
                with naming("prompt", i):
                    results[i] = task.result()
    finally:
        for task in flying:
            task.cancel()
    return [results[i] for i in range(len(choices))]

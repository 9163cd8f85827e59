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


# How long until the next look at a deadline that has passed on one clock and not yet on the other.
_CLOCKS_APART_S = 0.001


class _LoopWaker:
    """One event loop's pipe, and who waits for it to be written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waker = Waker()
        #: Calls that are on their way to a thread of the loop's pool.
        self.coming: set[object] = set()
        self._waiting: dict[asyncio.Future[Chunk | None], Ticket] = {}
        # The loop holds this object, not the other way round: it must be able to die.
        loop.add_reader(self.waker.fileno(), self._look)

    def _look(self) -> None:
        self.waker.clear()
        for future, ticket in list(self._waiting.items()):
            self._look_for(future, ticket)

    @staticmethod
    def _look_for(future: asyncio.Future[Chunk | None], ticket: Ticket) -> None:
        if future.done():
            return
        try:
            chunk = ticket.next(0.0)
        except Exception as error:
            # For whoever waits for this one, and nobody else.
            future.set_exception(error)
            return
        if chunk is not None or ticket.ended:
            future.set_result(chunk)

    def _expire(self, future: asyncio.Future[Chunk | None], ticket: Ticket) -> None:
        """Looks when a deadline passes: the engine thread may be busy with a long step, and one that still waits is not
        in it. The loop's clock may be a little ahead of the engine's."""
        self._look_for(future, ticket)
        if not future.done() and ticket.expires_in_s:
            asyncio.get_running_loop().call_later(_CLOCKS_APART_S, self._expire, future, ticket)

    async def next_chunk(self, ticket: Ticket) -> Chunk | None:
        chunk = ticket.next(0.0)
        if chunk is not None or ticket.ended:
            return chunk
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Chunk | None] = loop.create_future()
        self._waiting[future] = ticket
        left = ticket.expires_in_s
        timer = None if left is None else loop.call_later(left, self._expire, future, ticket)
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


def lock() -> asyncio.Lock:
    """For the tasks of one loop."""
    return asyncio.Lock()


async def submitted(submit: Callable[..., Ticket], more: bool = False) -> Ticket:
    """Makes the request. Template and tokenizer run on a thread of the loop's pool: a long prompt must not hold up the
    loop. ``more``: another one follows at once, as it does where the loop's other tasks are about to make one."""
    at_loop, this = _waker_of_loop(), object()
    at_loop.coming.add(this)

    def arrive() -> Ticket:
        at_loop.coming.discard(this)
        return submit(waker=at_loop.waker, more=more or bool(at_loop.coming))

    try:
        await asyncio.sleep(0)  # until all that are about to are known
        return await asyncio.to_thread(arrive)
    finally:
        at_loop.coming.discard(this)


async def next_chunk(ticket: Ticket) -> Chunk | None:
    """The next piece; ``None`` at the end."""
    return await _waker_of_loop().next_chunk(ticket)


async def finish(submit: Callable[..., Ticket]) -> Result:
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


async def agenerate_batch(submit: Callable[..., Ticket], choices: Sequence[int], room: int) -> list[Result]:
    """The answers in order. A window of them is in flight, as in :func:`octavo._batch.run_batch`; the first
    failure cancels the others."""
    results: dict[int, Result] = {}
    flying: dict[asyncio.Task[Result], int] = {}
    waiting = list(reversed(range(len(choices))))
    call: int | None = None

    def may_fly(count: int) -> bool:
        return bool(waiting) and (not count or count + choices[waiting[-1]] <= room)

    try:
        while len(results) < len(choices):
            while may_fly(count := sum(choices[i] for i in flying.values())):
                i = waiting.pop()
                try:
                    ticket = await submitted(partial(submit, i, call=call), may_fly(count + choices[i]))
                except QueueFullError:
                    # As in `_batch`: go on when one of ours comes home; with none out there is nothing to wait for.
                    if not flying:
                        raise
                    waiting.append(i)
                    break
                call = ticket.call
                flying[asyncio.ensure_future(_answer(ticket))] = i
            finished, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                i = flying.pop(task)
                with naming("prompt", i):
                    results[i] = task.result()
    finally:
        for task in flying:
            task.cancel()
        # What became of them is asked for, or asyncio would complain about errors that nobody heard.
        await asyncio.gather(*flying, return_exceptions=True)
    return [results[i] for i in range(len(choices))]

"""The engine and event loops. A loop watches one pipe, into which the engine thread writes at most once per step; then
whoever waits looks into its own mailbox. No thread per request, and the engine never touches Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

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
            if future.done():
                continue
            chunk = ticket.next(0.0)
            if chunk is not None or ticket.ended:
                future.set_result(chunk)

    async def next_chunk(self, ticket: Ticket) -> Chunk | None:
        chunk = ticket.next(0.0)
        if chunk is not None or ticket.ended:
            return chunk
        future: asyncio.Future[Chunk | None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = ticket
        try:
            return await future
        finally:
            del self._waiting[future]


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = WeakKeyDictionary()


def _waker_of_loop() -> _LoopWaker:
    loop = asyncio.get_running_loop()
    found = _wakers.get(loop)
    if found is None:
        found = _wakers[loop] = _LoopWaker(loop)
    return found


async def submitted(submit: Callable[[Waker], Ticket]) -> Ticket:
    """Makes the request. Template and tokenizer run on a thread of the loop's pool: a long prompt must not hold up the
    loop."""
    return await asyncio.to_thread(submit, _waker_of_loop().waker)


async def next_chunk(ticket: Ticket) -> Chunk | None:
    """The next piece; ``None`` at the end."""
    return await _waker_of_loop().next_chunk(ticket)


async def finish(submit: Callable[[Waker], Ticket]) -> Result:
    """The whole answer. Cancelling the task cancels the request."""
    ticket = await submitted(submit)
    try:
        while await next_chunk(ticket) is not None:
            pass
    finally:
        # After the end this does nothing.
        ticket.cancel()
    return ticket.result()


async def agenerate_batch(submit: Callable[[int, Waker], Ticket], choices: Sequence[int], window: int) -> list[Result]:
    """The answers in order. A window of them is in flight; the first failure cancels the others."""
    room = asyncio.Semaphore(max(1, window // max(choices)))

    async def one(i: int) -> Result:
        async with room:
            return await finish(lambda waker: submit(i, waker))

    tasks = [asyncio.ensure_future(one(i)) for i in range(len(choices))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

"""Many prompts through the bounded queue: a window of them is in flight, refilled as answers come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from octavo._errors import OctavoError, QueueFullError
from octavo._progress import Progress, bar_on_terminal

if TYPE_CHECKING:
    from octavo._octavo import Ticket

T = TypeVar("T")

# The engine always has as many waiting as running, so one look at the answers in this time keeps its batch full.
_LOOK_S = 0.02


def window(max_num_seqs: int, max_queue: int) -> int:
    """How many sequences may be in flight: those that run and as many again that wait. The rest of the queue is left
    to others."""
    return max_num_seqs + min(max_num_seqs, max_queue)


@contextmanager
def naming(what: str, i: int, kind: type[OctavoError] = OctavoError) -> Iterator[None]:
    """Says in an error's message which one of a list it was: ``prompt 3 of the list: …``."""
    try:
        yield
    except kind as error:
        error.args = (f"{what} {i} of the list: {error}",)
        raise


def run_batch(
    submit: Callable[..., Ticket],
    take: Callable[[Ticket], T],
    choices: Sequence[int],
    room: int,
    progress: Progress,
    verb: str,
    what: str = "prompt",
) -> list[T]:
    """What ``take`` finds in the answers to prompts ``0..len(choices)``, in order. ``submit`` gets a prompt's number,
    and as keywords the call that it goes on with and whether more come at once. The first failure ends the whole; its
    message says which one (``what``) it was."""
    flight = _Flight(submit, take, choices, room, what)
    begun = time.monotonic()
    with bar_on_terminal(verb, progress, unit="prompts") as report:
        try:
            while not flight.over():
                flight.refill()
                flight.collect(_LOOK_S)
                if report is not None:
                    rate = flight.tokens() / (time.monotonic() - begun)
                    report(flight.done, len(choices), f"{rate:.0f} tok/s")
        except BaseException:
            flight.cancel()
            raise
    return flight.results()


class _Flight(Generic[T]):
    """Prompts on their way: not yet submitted, in flight, or answered."""

    def __init__(
        self, submit: Callable[..., Ticket], take: Callable[[Ticket], T], choices: Sequence[int], room: int, what: str
    ) -> None:
        self._submit, self._take, self._choices, self._room, self._what = submit, take, choices, room, what
        self._next = 0
        self._call: int | None = None
        self._flying: dict[int, Ticket] = {}
        self._results: dict[int, T] = {}
        self._tokens_done = 0

    @property
    def done(self) -> int:
        return len(self._results)

    def over(self) -> bool:
        return len(self._results) == len(self._choices)

    def refill(self) -> None:
        flying = sum(self._choices[i] for i in self._flying)
        while self._may_fly(flying):
            i = self._next
            flying += self._choices[i]
            self._next += 1
            try:
                ticket = self._submit(i, call=self._call, more=self._may_fly(flying))
            except QueueFullError:
                # Others fill the queue: go on when one of ours comes home. With none out there is nothing to wait for.
                if not self._flying:
                    raise
                self._next = i
                return
            self._flying[i], self._call = ticket, ticket.call

    def _may_fly(self, flying: int) -> bool:
        """Whether the next one may be submitted beside so many."""
        return self._next < len(self._choices) and (not flying or flying + self._choices[self._next] <= self._room)

    def collect(self, patience_s: float) -> None:
        """Waits for the oldest for a moment, then takes in all that are finished."""
        next(iter(self._flying.values())).wait(patience_s)
        for i in [i for i, ticket in self._flying.items() if ticket.wait(0.0)]:
            ticket = self._flying.pop(i)
            self._tokens_done += ticket.tokens
            with naming(self._what, i):
                self._results[i] = self._take(ticket)

    def tokens(self) -> int:
        return self._tokens_done + sum(ticket.tokens for ticket in self._flying.values())

    def cancel(self) -> None:
        for ticket in self._flying.values():
            ticket.cancel()

    def results(self) -> list[T]:
        return [self._results[i] for i in range(len(self._choices))]

"""Conversations that keep their blocks of the KV cache between turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo._errors import EngineClosedError, InvalidRequestError
from octavo._prompts import ChatOptions, chat_options

if TYPE_CHECKING:
    from typing_extensions import Self

    from octavo._octavo import CacheExplanation, Result, SessionEvent, SessionHandle, SessionReport, Ticket
    from octavo._params import SamplingParams
    from octavo._prompts import Prompt
    from octavo._stream import AsyncStream, Stream


@dataclass(frozen=True, slots=True)
class Rent:
    """What a session costs."""

    byte_seconds: float
    """Bytes of the KV cache times how long they were held between turns, so far."""
    bytes_held: int
    """Bytes that are held now."""


class Session:
    """A conversation whose blocks are kept between turns: made by :meth:`octavo.LLM.session`.

    Every turn is given the whole conversation, as :meth:`octavo.LLM.generate` is: messages, text or token ids. Where it
    goes on from what was said in the session, answers included, only what is new is computed; the tokens are then those
    that were said, also where the tokenizer would split the same text otherwise. ``result.usage.cached_tokens`` says
    how many that were and ``result.anatomy.kept`` what became of what was kept.

    Keeping is a promise with a limit: for ``ttl_s`` after every turn, at most half of the cache for all sessions
    together, and where a request needs the blocks the session that was kept first loses them. Whatever happens is in
    :attr:`events`, and the next turn is answered all the same, only later.
    """

    def __init__(
        self,
        handle: SessionHandle,
        submit: Callable[..., Ticket],
        explain: Callable[[Any, ChatOptions, SessionHandle], CacheExplanation],
    ) -> None:
        self._handle = handle
        self._submit = submit
        self._explain = explain
        self._last: SessionReport | None = None
        self._closed = False

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> Result:
        """The next turn. Arguments as in :meth:`octavo.LLM.generate`, but for ``n``, which is 1, and ``cache_salt``,
        which is the session's.

        Raises:
            InvalidRequestError: The session is closed, or its last turn is still running.
        """
        ticket = self._begin(prompt, params, keywords)
        try:
            ticket.wait()
            return ticket.result()
        except BaseException:
            ticket.cancel()
            raise

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> Stream:
        """The next turn, piece by piece. Leaving it early keeps what was said until then."""
        from octavo._stream import Stream

        return Stream(self._begin(prompt, params, keywords, every_token=True))

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> Result:
        """:meth:`generate` for an event loop."""
        from octavo._async import finish

        return await finish(lambda **how: self._begin(prompt, params, keywords, **how))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **keywords: Any) -> AsyncStream:
        """:meth:`stream` for an event loop."""
        from octavo._stream import AsyncStream

        return AsyncStream(lambda **how: self._begin(prompt, params, keywords, every_token=True, **how))

    def _begin(self, prompt: Any, params: Any, keywords: dict[str, Any], **how: Any) -> Ticket:
        self._check_open()
        if "cache_salt" in keywords:
            raise InvalidRequestError("cache_salt is the session's: give it to llm.session()")
        return self._submit(prompt, params, keywords, session=self._handle, **how)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the session is closed; llm.session() begins another")

    def explain_cache(self, prompt: Prompt, **options: Any) -> CacheExplanation:
        """:meth:`octavo.LLM.explain_cache` for the next turn: how much of it is kept, and why not more.

        Raises:
            InvalidRequestError: The session is closed, or the prompt is impossible.
        """
        self._check_open()
        return self._explain(prompt, chat_options("explain_cache", options), self._handle)

    def report(self) -> SessionReport:
        """The session as it stands; after :meth:`close`, as it stood."""
        report = self._last if self._closed else self._handle.report()
        if report is None:
            raise EngineClosedError("the session ended with its model, and nobody had asked for its state")
        return report

    @property
    def id(self) -> int:
        """Its name inside the engine, as :meth:`octavo.LLM.events` tell it."""
        return self._handle.id

    @property
    def rent(self) -> Rent:
        """What it has cost so far, and what it holds."""
        report = self.report()
        return Rent(report.byte_seconds, report.bytes_held)

    @property
    def events(self) -> list[SessionEvent]:
        """What has happened to what it keeps, oldest first."""
        return self.report().events

    @property
    def state(self) -> str:
        """``new``, ``running``, ``closed``, or the kind of the latest of :attr:`events`."""
        if self._closed:
            return "closed"
        if self._handle.running:
            return "running"
        events = self.events
        return events[-1].kind if events else "new"

    def close(self) -> None:
        """Give up what is kept; a turn that is running goes on. A second call does nothing."""
        if self._closed:
            return
        try:
            self._last = self._handle.report()
        except EngineClosedError:
            self._last = None
        self._closed = True
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session, {'closed' if self._closed else 'open'}>"

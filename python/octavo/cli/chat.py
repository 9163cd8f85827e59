"""``octavo chat``: ask a model, once or in turns."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import Any

from octavo._errors import InvalidRequestError
from octavo.cli import _options
from octavo.cli._show import dim, show_summary


def add(commands: Any) -> None:
    parser = commands.add_parser("chat", help="ask a model, once or in turns", description=__doc__)
    parser.add_argument("model", help=_options.MODEL_HELP)
    parser.add_argument("text", nargs="*", default=[], help="the question; without one, a conversation begins")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--anatomy", action="store_true", help="show where every answer's time and memory went")
    _options.add_sampling(parser)
    _options.add_engine(parser)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    # Nobody else wants the cache, and a person may think for hours.
    with _options.load(arguments) as llm, llm.session(ttl_s=1e6) as session:
        conversation = _Conversation(llm, session, arguments)
        if arguments.text:
            conversation.ask(" ".join(arguments.text))
        else:
            conversation.in_turns()
    return 0


class _Conversation:
    def __init__(self, llm: Any, session: Any, arguments: argparse.Namespace) -> None:
        self._llm = llm
        self._session = session
        self._params = _options.sampling(arguments)
        self._anatomy: bool = arguments.anatomy
        self._messages = [{"role": "system", "content": arguments.system}] if arguments.system else []

    def ask(self, text: str) -> None:
        """One turn: the answer streams to stdout. The session spares the model all turns before."""
        self._messages.append({"role": "user", "content": text})
        with self._session.stream(self._messages, self._params) as stream:
            try:
                for chunk in stream:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
            finally:
                print(flush=True)
        result = stream.result
        self._messages.append({"role": "assistant", "content": result.text})
        show_summary(result, self._llm.facts)
        if self._anatomy:
            print(result.anatomy, file=sys.stderr)

    def in_turns(self) -> None:
        """Until Ctrl-D. Ctrl-C stops an answer; at the prompt it ends the conversation."""
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        if sys.stdin.isatty():
            print(dim("Ctrl-C stops an answer, Ctrl-D ends the conversation.", sys.stderr), file=sys.stderr)
        while (text := self._next_question()) is not None:
            if not text.strip():
                continue
            turns = len(self._messages)
            try:
                self.ask(text)
            except KeyboardInterrupt:
                # As if it had not been asked: half an answer would mislead the next one.
                del self._messages[turns:]
                print(dim("[stopped]", sys.stderr), file=sys.stderr)
            except InvalidRequestError as error:
                # Too long, say. A person may ask something else; a program's next questions build on this one.
                if not sys.stdin.isatty():
                    raise
                del self._messages[turns:]
                print(dim(f"[{error}]", sys.stderr), file=sys.stderr)

    def _next_question(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None

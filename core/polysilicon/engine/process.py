"""The engine process: `python -m polysilicon.engine.process`, started by a `Child`.

Its first line on standard input is a `Start`; the end of standard input is the end of its parent,
and it exits. Between steps it takes commands, and each step's news go out as one message; it never
waits for the other side while there is work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from polysilicon.config import Config
from polysilicon.engine import messages
from polysilicon.engine.engine import Engine
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.loading import Loaded, load
from polysilicon.errors import PolysiliconError, RequestError
from polysilicon.plugins import describe_exception
from polysilicon.progress import Advance
from polysilicon.request import FinishReason, Request, RequestOutput

Socket = zmq.Socket[bytes]

_PROGRESS_SECONDS = 0.1
_STATS_SECONDS = 0.05
_BEAT_SECONDS = 0.25
_STALLED_MILLISECONDS = 1
_LINGER_MILLISECONDS = 2000
_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """address: of the socket to connect to. path: of the checkpoint. config: fields of `Config`."""

    address: str
    path: str
    config: dict[str, Any]


def main() -> int:
    """Load the model, serve until told to end, and return the exit status."""
    start = msgspec.json.decode(_first_line(), type=Start)
    _end_with_parent()
    # Whoever stops the server, by a terminal or a service manager, leaves the end to the parent,
    # which lets running requests finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)
    with zmq.Context() as context, pair_socket(context) as socket:
        socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        socket.connect(start.address)
        try:
            began = time.monotonic()
            config = Config.model_validate(start.config)
            loaded = load(config, Path(start.path), progress=_Progress(socket).bar)
            loaded.engine.warm_grammars()
            facts = _facts(config, loaded, time.monotonic() - began)
            socket.send(messages.encode(messages.Ready(facts)))
            # What loading left will stay: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            fine = Server(socket, loaded.engine).run()
            loaded.client.close()
            return 0 if fine else 1
        except PolysiliconError as error:
            failed = messages.Failed(type(error).__name__, str(error))
        except Exception as error:
            traceback.print_exc()
            failed = messages.Failed("", describe_exception(error))
        socket.send(messages.encode(failed))
        return 1


def pair_socket(context: zmq.Context[Socket]) -> Socket:
    """Either end of the socket between the two processes."""
    socket = context.socket(zmq.PAIR)
    # What is queued is bounded by the requests that admission control lets in.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MOST_MESSAGE_BYTES)
    return socket


def has_arrived(socket: Socket) -> bool:
    """Whether a message can be received."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


class _Served:
    """A request in the engine. choices: of it that have not ended."""

    def __init__(self, number: int, choices: int) -> None:
        self.number = number
        self.choices = choices


class Server:
    """Drives one engine for the process at the other end of a socket."""

    def __init__(self, socket: Socket, engine: Engine) -> None:
        self._socket = socket
        self._engine = engine
        self._served: dict[str, _Served] = {}
        self._ids: dict[int, str] = {}
        self._refused: list[tuple[int, RequestOutput]] = []
        self._checks = 0
        self._ended = False
        self._sent = 0.0
        self._stats_sent = 0.0

    def run(self) -> bool:
        """Serve until told to end (True), or until the engine fails."""
        engine, socket = self._engine, self._socket
        steps, stalled = 0, 0
        while True:
            if not (engine.has_work or self._refused):
                socket.poll()
            elif stalled > 1:
                # Nothing can run, but something may be able to soon: a grammar being compiled.
                socket.poll(_STALLED_MILLISECONDS)
            while has_arrived(socket):
                self._take(messages.decode_command(socket.recv(zmq.NOBLOCK)))
            if self._ended:
                return True
            outputs = engine.step()
            if engine.failure is not None:
                # Before the requests end with it, so that no more are taken.
                self._socket.send(messages.encode(messages.Failed("", engine.failure)))
            stalled = 0 if outputs or engine.counts.steps > steps else stalled + 1
            stepped, steps = engine.counts.steps > steps, engine.counts.steps
            self._tell(outputs, stepped)
            self._check()
            if engine.failure is not None:
                return False

    def _take(self, command: messages.Command) -> None:
        match command:
            case messages.Add():
                self._add(command.number, command.request)
            case messages.Cancel():
                if command.number in self._ids:
                    self._engine.cancel(self._ids[command.number], command.choice)
            case messages.Check():
                self._checks += 1
            case messages.End():
                self._ended = True

    def _add(self, number: int, data: msgspec.Raw) -> None:
        request: Request | None = None
        try:
            request = messages.decode_request(data)
            self._engine.add(request)
        except (RequestError, msgspec.MsgspecError) as error:
            choices = 1 if request is None else request.params.n
            self._refused += [
                (number, _refusal(request, choice, str(error))) for choice in range(choices)
            ]
        else:
            self._served[request.id] = _Served(number, request.params.n)
            self._ids[number] = request.id

    def _check(self) -> None:
        if not self._checks:
            return
        try:
            self._engine.kv.check_integrity()
            error = None
        except AssertionError as failed:
            error = str(failed) or "an assertion without words"
        for _ in range(self._checks):
            self._socket.send(messages.encode(messages.Checked(error)))
        self._checks = 0

    def _tell(self, outputs: list[RequestOutput], stepped: bool) -> None:
        """Send a step's news, and now and then that there was a step."""
        now = time.monotonic()
        tokens: list[tuple[int, int, int]] = []
        others, self._refused = self._refused, []
        for output in outputs:
            served = self._served[output.request_id]
            if messages.is_plain(output):
                tokens.append((served.number, output.choice, output.ids[0]))
                continue
            others.append((served.number, output))
            if output.finish_reason is not None:
                served.choices -= 1
                if not served.choices:
                    del self._served[output.request_id], self._ids[served.number]
        wanted = not self._engine.has_work or self._checks > 0
        if not (tokens or others or wanted or (stepped and now - self._sent >= _BEAT_SECONDS)):
            return
        stats = None
        if wanted or now - self._stats_sent >= _STATS_SECONDS:
            stats = self._engine.stats()
            self._stats_sent = now
        self._sent = now
        news = messages.News(messages.pack_tokens(tokens), tuple(others), stats)
        self._socket.send(messages.encode(news))


def _refusal(request: Request | None, choice: int, error: str) -> RequestOutput:
    return RequestOutput(
        request_id="" if request is None else request.id,
        choice=choice,
        finish_reason=FinishReason.ERROR,
        error=error,
        refused=True,
    )


class _Progress:
    """Tells the parent how far loading is."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._sent = 0.0

    @contextmanager
    def bar(self, label: str) -> Iterator[Advance]:
        def advance(done: int, total: int) -> None:
            now = time.monotonic()
            if now - self._sent >= _PROGRESS_SECONDS:
                self._sent = now
                self._socket.send(messages.encode(messages.Loading(done, total)))

        yield advance


def _facts(config: Config, loaded: Loaded, seconds: float) -> ModelFacts:
    engine = loaded.engine
    groups = engine.kv.groups
    full = [group.pages for group in groups if group.window is None]
    return ModelFacts(
        max_length=engine.max_length,
        vocab_size=engine.executor.vocab_size,
        page_size=engine.kv.page_size,
        kv_pages=min(full or [group.pages for group in groups]) - 1,
        max_sequences=min(config.max_sequences, engine.executor.max_sequences),
        eos_ids=engine.eos_ids,
        memory=dict(loaded.memory),
        backend=loaded.backend,
        notes=loaded.notes,
        load_seconds=seconds,
    )


def _first_line() -> bytes:
    """The first line of standard input; what follows stays there."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1 << 16)
        if not byte:
            sys.exit(1)
        line += byte
    return line


def _end_with_parent() -> None:
    """Exit at once when the parent has gone, whatever this process is doing."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="parent").start()
    if sys.platform == "linux":
        # The thread cannot run while native code holds the interpreter's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

"""The HTTP process: from a configuration to a server that runs until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import uvicorn

from polysilicon.config import Config
from polysilicon.errors import ConfigError
from polysilicon.server.app import create_app
from polysilicon.server.dispatcher import Dispatcher
from polysilicon.server.request_log import LOGGER_NAME
from polysilicon.server.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE_SECONDS = 65
"""Longer than the 60 seconds of most load balancers, so that the server never closes first."""
_BACKLOG = 2048
_CLOSING_SECONDS = 5
"""For the last bytes of streams whose requests have ended."""


def run(config: Config, path: Path) -> None:
    """Serve the checkpoint at `path` until SIGINT or SIGTERM. Raises PolysiliconError."""
    _log_to_stderr()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, path))


def _log_to_stderr() -> None:
    """Warnings as text, and what is told of each request as a line of JSON."""
    for name, form in (("polysilicon", "polysilicon: %(message)s"), (LOGGER_NAME, "%(message)s")):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger(LOGGER_NAME).setLevel(logging.INFO)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # There is none for Windows.
        return None
    return uvloop.new_event_loop


def _http_protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    try:
        from polysilicon.server.http_protocol import BoundedHeadProtocol
    except ImportError:  # Without httptools; h11 has bounds of its own.
        return "h11"
    return BoundedHeadProtocol


async def _serve(config: Config, path: Path) -> None:
    settings = Settings.from_config(config, path)
    # Before the model is loaded, so that a port in use costs no time.
    listener = _listen(config.host, config.port)
    dispatcher = Dispatcher(config, path)
    ending = _Ending()
    try:
        with ending.on_signals():
            starting = asyncio.create_task(dispatcher.start())
            if not await _until(starting, ending.asked):
                starting.cancel()
                return
            app = create_app(dispatcher, settings)
            server = _Server(
                uvicorn.Config(
                    app,
                    http=_http_protocol(),
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    server_header=False,
                    timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                    timeout_graceful_shutdown=_CLOSING_SECONDS,
                )
            )
            for note in dispatcher.facts.notes:
                _say(note)
            # From here on connections wait until the server's loop takes them.
            listener.listen(_BACKLOG)
            _announce(settings, listener)
            # What was loaded stays: the collector need not look at it again.
            gc.collect()
            gc.freeze()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            if await _until(serving, ending.asked):
                return
            _say(f"ending: running requests have {config.drain_timeout:g} seconds")
            draining = asyncio.create_task(dispatcher.drain(config.drain_timeout))
            if not await _until(draining, ending.forced):
                draining.cancel()
            # What has not ended by now, of an engine that hangs too, ends with an error that its
            # client is still told.
            await dispatcher.close()
            server.should_exit = True
            await serving
    finally:
        listener.close()
        await dispatcher.close()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """asked: a signal asks the server to end. forced: a second one asks it to end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to the signals that end a process."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._asked))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self) -> None:
        if self.asked.is_set():
            self.forced.set()
        self.asked.set()


async def _until(work: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Wait for either; whether the work is done. Raises what the work raises."""
    waiter = asyncio.create_task(event.wait())
    await asyncio.wait({work, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if work.done():
        await work
    return work.done()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the server cannot listen on {host} port {port} ({error}): choose others with --host "
            "and --port"
        ) from None
    return listener


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _say(f"serving {', '.join(settings.model_names)} on http://{shown}:{port}")
    if not settings.api_keys and not ipaddress.ip_address(host).is_loopback:
        _say("other machines can reach it and no key is asked for: set one with --api-key-file")


def _say(text: str) -> None:
    print(f"polysilicon: {text}", file=sys.stderr, flush=True)

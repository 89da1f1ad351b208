"""One engine process as its parent holds it: start, socket, last words, end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import zmq

from polysilicon.config import SAMPLING_FIELDS, SERVER_FIELDS, Config
from polysilicon.engine import messages
from polysilicon.engine.process import Socket, Start, has_arrived, pair_socket

_TAIL_LINES = 40
_MOST_LINE_BYTES = 4096
_SHOWN_LINES = 4
_SHOWN_CHARACTERS = 600
_LAST_WORDS_SECONDS = 0.5
_LONGEST_ADDRESS = 100


class Child:
    """An engine process. Everything is called from the event loop that it was started in.

    exited: its exit status, as `subprocess` gives it, once it has ended.
    failed: what it said before it ended, if it did. verdict: why it was killed, if it was.
    on_readable: called when `receive` has something.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        context: zmq.Context[Socket],
        on_readable: Callable[[], None],
    ) -> None:
        """Start the process. Raises OSError when that is not possible."""
        self.on_readable = on_readable
        self.failed: messages.Failed | None = None
        self.verdict: str | None = None
        self._folder: Path | None = _private_folder()
        self._socket = pair_socket(context)
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        try:
            address = f"ipc://{self._folder}/engine"
            self._socket.bind(address)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "polysilicon.engine.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C is for the server, which lets running requests finish.
                process_group=0,
            )
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            said = config.model_dump(
                mode="json", exclude_none=True, exclude=set(SAMPLING_FIELDS | SERVER_FIELDS)
            )
            start = Start(address=address, path=str(path), config=said)
            # One that ends at once cannot take it; `exited` will tell.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(start) + b"\n")
                process.stdin.flush()
        except BaseException:
            self.close()
            raise
        reader = threading.Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(process, reader), daemon=True).start()
        self._loop.add_reader(self._descriptor, self._notice)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def receive(self) -> Iterator[messages.Report]:
        """What has arrived. One that sends what is no message is killed."""
        while self._has_arrived():
            frame = self._socket.recv(zmq.NOBLOCK)
            if self._folder is not None:
                # It is connected: nobody needs the address any more.
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            try:
                report = messages.decode_report(frame)
            except (msgspec.MsgspecError, ValueError) as error:
                self.kill(f"it sent a message that cannot be read: {error}")
                return
            if isinstance(report, messages.Failed):
                self.failed = report
            yield report

    def send(self, message: messages.Command) -> None:
        """Queue a command; one for a process that has ended is lost."""
        self._socket.send(messages.encode(message), zmq.NOBLOCK)
        # Its descriptor is readable once for a change of state, which sending may have taken in.
        if self._has_arrived():
            self._loop.call_soon(self._notice)

    def kill(self, verdict: str) -> None:
        """End the process at once; `verdict` says why, in words that follow "the engine ..."."""
        if self.exited.done():
            return
        self.verdict = self.verdict or verdict
        assert self._process is not None
        self._process.kill()

    def close(self) -> None:
        """Make sure that the process ends, and let go of everything."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def cause(self) -> str:
        """Why the process ended, in words; only once it has."""
        status = self.exited.result()
        if self.verdict is not None:
            return f"the engine was killed: {self.verdict}"
        if self.failed is not None:
            return f"the engine failed: {self.failed.reason}"
        if status >= 0:
            cause = f"the engine exited with status {status}"
        else:
            cause = f"the engine was ended by {_signal_name(-status)}{_HINTS.get(-status, '')}"
        words = self._last_words()
        return f"{cause}: {words}" if words else cause

    def _has_arrived(self) -> bool:
        return not self._socket.closed and has_arrived(self._socket)

    def _notice(self) -> None:
        if self._has_arrived():
            self.on_readable()

    def _last_words(self) -> str:
        lines = [line for line in self._tail if line.strip()]
        for index, line in enumerate(lines):
            if line.startswith("Fatal Python error"):
                lines = lines[index : index + _SHOWN_LINES]
        return " | ".join(lines[-_SHOWN_LINES:])[:_SHOWN_CHARACTERS]

    def _copy_output(self, output: BinaryIO) -> None:
        """Pass the process's output on to our standard error, and keep the end of it."""
        with output:
            while line := output.readline(_MOST_LINE_BYTES):
                text = line.decode("utf-8", "replace")
                self._tail.append(" ".join(text.split()))
                # There may be nobody who takes it.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(text)
                    sys.stderr.flush()

    def _wait(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        status = process.wait()
        # A process of its own that lives on may keep the pipe open.
        reader.join(_LAST_WORDS_SECONDS)
        # The loop is closed where nobody wants to know any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_exited, status)

    def _set_exited(self, status: int) -> None:
        if not self.exited.done():
            self.exited.set_result(status)


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (from outside, or from the kernel for want of memory)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (a crash in native code, or a model file that was cut short)",
    signal.SIGILL: " (a crash in native code)",
    signal.SIGFPE: " (a crash in native code)",
    signal.SIGABRT: " (native code gave up)",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _private_folder() -> Path | None:
    """A new folder that only this user can enter, short enough for the address of a socket."""
    folder = tempfile.mkdtemp(prefix="polysilicon-")
    if len(folder) > _LONGEST_ADDRESS - len("/engine"):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="polysilicon-", dir="/tmp")
    return Path(folder)

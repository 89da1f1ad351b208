"""The entry point of the command line. It loads nothing before an interrupt can be silent."""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Run the command line of this process and exit."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        # Loading the commands takes a while, and begins nothing that would have to be ended.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from polysilicon.commands.application import run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _mend_streams()
    sys.exit(run(sys.argv[1:]))


def _mend_streams() -> None:
    """Let the commands rely on the three streams: a closed one is empty, and text that does not fit
    into an encoding is replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

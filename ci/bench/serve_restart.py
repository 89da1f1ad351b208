"""An engine process killed under load: how long its server is down, and what each client got.

    python ci/bench/serve_restart.py MODEL --backend cpu --streams 32 --json out.json

Streams run, then the engine process gets a signal: SIGKILL, SIGSEGV, and SIGSTOP, which looks like
a hang and which `--step-timeout` ends. Seconds since the signal until /health is red, until it is
green again, and until the first new answer. Every client must have got an error event or a 5xx that
names the cause; none may hang. Exit status 1 when one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from polysilicon.testing.served import ServerProcess, serving

HANG_SECONDS = 120.0
POLL_SECONDS = 0.005
CAUSES = {
    signal.SIGKILL: r"SIGKILL",
    signal.SIGSEGV: r"SIGSEGV",
    signal.SIGSTOP: r"no step for \d+ seconds",
}


@dataclasses.dataclass(kw_only=True)
class Outage:
    """What one signal did. Times are seconds since it was sent. clients: by what they got."""

    signal: str
    red: float | None = None
    green: float | None = None
    first_answer: float | None = None
    last_error: float = 0.0
    clients: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)


async def outage(server: ServerProcess, number: signal.Signals, streams: int) -> Outage:
    """Send the engine a signal while streams run, half of them streamed answers."""
    found = Outage(signal=number.name)
    counts: collections.Counter[str] = collections.Counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        flowing = asyncio.Event()
        clients = [
            asyncio.create_task(_client(session, index % 2 == 0, flowing))
            for index in range(streams)
        ]
        await asyncio.wait_for(flowing.wait(), HANG_SECONDS)
        await asyncio.sleep(1)
        engine = server.engine_pid
        if engine is None:
            raise RuntimeError("the server has no engine process")
        began = time.monotonic()
        os.kill(engine, number)
        watching = asyncio.create_task(_watch(session, began, found))
        cause = re.compile(CAUSES[number])
        for client in asyncio.as_completed(clients):
            what, text = await client
            counts[what] += 1
            found.last_error = time.monotonic() - began
            if what == "hung" or what == "answered" or not cause.search(text):
                found.failures.append(f"{what}: {text[:300]}")
        await watching
    found.clients = dict(counts)
    if server.engine_pid in (None, engine):
        found.failures.append("the engine process is not a new one")
    return found


async def _client(
    session: aiohttp.ClientSession, stream: bool, flowing: asyncio.Event
) -> tuple[str, str]:
    """One long request; in a word what came of it, and its words."""
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    text, broken_off = "", ""
    try:
        async with session.post("/v1/completions", json=body) as response:
            async for line in response.content:
                text = line.decode().strip() or text
                if stream and response.status == 200:
                    flowing.set()
                    if text.startswith('data: {"error"'):
                        broken_off = text
    except TimeoutError:
        return "hung", text
    except aiohttp.ClientError as error:
        return "connection broken", str(error)
    if response.status >= 500:
        return f"status {response.status}", text
    if broken_off:
        return "error event", broken_off
    return "answered", text


async def _watch(session: aiohttp.ClientSession, began: float, found: Outage) -> None:
    """Take the times of /health and of the first answer."""
    deadline = began + HANG_SECONDS
    while found.green is None and time.monotonic() < deadline:
        async with session.get("/health") as response:
            now = time.monotonic() - began
            if found.red is None and response.status != 200:
                found.red = now
            elif found.red is not None and response.status == 200:
                found.green = now
        await asyncio.sleep(POLL_SECONDS)
    if found.red is None:
        found.failures.append("/health never was red")
    body = {"prompt": "Once", "max_tokens": 1}
    async with session.post("/v1/completions", json=body) as response:
        text = await response.text()
        if response.status == 200:
            found.first_answer = time.monotonic() - began
        else:
            found.failures.append(f"after the restart: {response.status} {text[:300]}")


def measure(options: argparse.Namespace) -> list[Outage]:
    """Every signal, to one server."""
    arguments = ["--backend", options.backend, "--max-sequences", str(options.streams)]
    arguments += ["--step-timeout", str(options.step_timeout)]
    arguments += ["--max-restarts", str(options.repeats * len(CAUSES))]
    outages = []
    with serving(options.model, arguments) as server:
        for number in CAUSES:
            for _ in range(options.repeats):
                found = asyncio.run(outage(server, number, options.streams))
                outages.append(found)
                print_row(found)
    return outages


def print_row(found: Outage) -> None:
    """A row of the table, and failures below it."""
    times = (found.red, found.green, found.first_answer, found.last_error)
    shown = " ".join("      --" if value is None else f"{value:8.3f}" for value in times)
    clients = ", ".join(f"{count} {what}" for what, count in sorted(found.clients.items()))
    print(f"{found.signal:<8} {shown}  {clients}", flush=True)
    for failure in found.failures[:5]:
        print(f"  FAILED {failure}")


def report(options: argparse.Namespace, outages: list[Outage]) -> Mapping[str, Any]:
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["model"] = os.path.basename(options.model)
    return {**settings, "outages": [dataclasses.asdict(found) for found in outages]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1, help="of each signal")
    parser.add_argument("--step-timeout", type=float, default=3.0, help="seconds, of the server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{options.model}, {options.streams} streams; seconds since the signal")
    print(f"{'signal':<8} {'red':>8} {'green':>8} {'answer':>8} {'last end':>8}  clients")
    outages = measure(options)
    if options.json:
        options.json.write_text(json.dumps(report(options, outages), indent=1) + "\n")
    sys.exit(1 if any(found.failures for found in outages) else 0)


if __name__ == "__main__":
    main()

"""Hundreds of streams of every kind against a server, good and bad: right answers and no leaks.

    python ci/serve_soak.py MODEL --minutes 5 --streams 200 --backend cpu --json out.json

The right answers are computed first by an engine in this process, one request at a time. The server
runs with `--deterministic`, so that what it answers must be equal, token by token, whatever runs
beside it: chat and completions, streamed or not, several choices, stop texts, grammars, seeded
draws, log-probabilities. Between them clients leave at random moments or read slowly, and send bad
bodies, which must get a 4xx with an error object. After every third of the time, with nothing
running, both processes are measured; the first two are warm-up, the last must need no more. Exit
status 1 when an answer was wrong, something leaked or failed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from serve_soak_clients import HEADERS, KEY, Soak
from serve_soak_questions import offline, questions

from polysilicon.catalogue import resolve_model
from polysilicon.config import Config
from polysilicon.testing.served import (
    Resources,
    ServerProcess,
    is_running,
    resources,
    serving,
)

QUIET_SECONDS = 60.0
MOST_MORE_FDS = 4
MOST_MORE_BYTES = 64 << 20
TRACEBACK = re.compile(r"^Traceback .*\n(?: .*\n)*(.*\n)", re.MULTILINE)
"""Of a log; its group is the exception."""


def gauges(text: str) -> dict[str, float]:
    """What must be zero when nothing runs, from the text of /metrics."""
    names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    found = re.findall(rf"^polysilicon:({names})\S* (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


async def quiet(server: ServerProcess, failures: list[str]) -> dict[str, Resources]:
    """Wait until nothing runs, and measure both processes."""
    deadline = time.monotonic() + QUIET_SECONDS
    async with aiohttp.ClientSession(server.url, headers=HEADERS) as session:
        while True:
            async with session.get("/metrics") as response:
                values = gauges(await response.text())
            if len(values) == 3 and not any(values.values()):
                break
            if time.monotonic() > deadline:
                failures.append(f"{QUIET_SECONDS:g} s after the last client: {values}")
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    engine = server.engine_pid
    if engine is None:
        failures.append("there is no engine process")
        return {"server": resources(server.process.pid)}
    return {"server": resources(server.process.pid), "engine": resources(engine)}


def compare(before: Mapping[str, Resources], after: Mapping[str, Resources]) -> list[str]:
    """What grew more than it may."""
    found = []
    for name, first in before.items():
        last = after.get(name)
        if last is None:
            continue
        if last.fds > first.fds + MOST_MORE_FDS:
            found.append(f"{name}: {first.fds} file descriptors became {last.fds}")
        if last.threads > first.threads + MOST_MORE_FDS:
            found.append(f"{name}: {first.threads} threads became {last.threads}")
        if last.rss > first.rss + max(MOST_MORE_BYTES, first.rss // 10):
            found.append(f"{name}: {first.rss >> 20} MiB became {last.rss >> 20} MiB")
    return found


async def soak(soaking: Soak, server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """All of it; the report."""
    failures = soaking.failures
    engine = server.engine_pid
    moments = {"start": await quiet(server, failures)}
    for part, moment in enumerate(("warm", "middle", "end")):
        await soaking.run(
            streams=options.streams, seconds=options.minutes * 20, seed=options.seed + part
        )
        moments[moment] = await quiet(server, failures)
    failures += compare(moments["middle"], moments["end"])
    await soaking.ask_all()
    await quiet(server, failures)
    if server.engine_pid != engine:
        failures.append("the engine was restarted")
    log = "".join(server.lines)
    failures += [f"in the log: {found[1][:300]}" for found in TRACEBACK.finditer(log)]
    print(f"{'kind':<28} {'good':>7}")
    for name, count in soaking.counts.items():
        print(f"{name:<28} {count:7,}")
    print(f"{'refused for load, tried again':<28} {soaking.refused:6,}")
    print(f"{'process':<8} {'moment':<6} {'fds':>5} {'threads':>8} {'RSS':>9}")
    for name in ("server", "engine"):
        for moment, held in moments.items():
            if name in held:
                now = held[name]
                rss = now.rss >> 20
                print(f"{name:<8} {moment:<6} {now.fds:5} {now.threads:8} {rss:5,} MiB")
    return {
        "counts": dict(soaking.counts),
        "refused": soaking.refused,
        "resources": {
            moment: {name: dataclasses.asdict(value) for name, value in held.items()}
            for moment, held in moments.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--kv-pages", type=int, default=256, help="few, so that they are all used, and preempted"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = Config(backend=options.backend, deterministic=True, kv_pages=options.kv_pages)
    pool = questions()
    print(f"{options.model}: {len(pool)} questions, answered offline", flush=True)
    right = offline(config, resolve_model(options.model), pool)
    arguments = ["--backend", options.backend, "--deterministic", "--max-body", "2MB"]
    arguments += ["--kv-pages", str(options.kv_pages)]
    with serving(options.model, arguments, environment={"POLYSILICON_API_KEY": KEY}) as server:
        soaking = Soak(server, pool, right)
        report = asyncio.run(soak(soaking, server, options))
        pids = [server.process.pid, *filter(None, [server.engine_pid])]
    failures = soaking.failures
    if server.process.returncode:
        failures.append(f"the server ended with status {server.process.returncode}")
    failures += [f"process {pid} outlived the server" for pid in pids if is_running(pid)]
    for failure in failures[:20]:
        print(f"FAILED {failure}")
    print(f"{len(failures)} failures")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["model"] = os.path.basename(options.model)
        options.json.write_text(json.dumps({**settings, **report, "failures": failures}, indent=1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

"""How the parts of the device script measure and what they write: one JSON line a case."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from polysilicon.backend import Device

Call = Callable[[], Any]


class Record:
    """Appends cases to a file as they are measured, so that a part that is cut off loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def case(self, **names: Any) -> Iterator[dict[str, Any]]:
        """Gives what to put the figures into; an exception becomes the case's error."""
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            figures["error"] = text[:500]
        line = json.dumps({**names, **figures})
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def arguments() -> argparse.Namespace:
    """What every part takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="file for the JSON lines")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the host")
    parser.add_argument("--weights", default="bf16", help="encoding of the model's weights")
    return parser.parse_args()


def open_device(dry: bool) -> Device:
    if dry:
        from polysilicon_cuda.host import polysilicon_backends

        (backend,) = polysilicon_backends()
        return backend.open(0, {})
    from polysilicon_cuda.device import open_device as open_card

    return open_card(0, {})


def torch_device(dry: bool) -> torch.device:
    return torch.device("cpu") if dry else torch.device("cuda", 0)


def seconds_each(calls: Sequence[Call], device: torch.device, *, least: float = 0.1) -> float:
    """Seconds of one call: all of them captured in one graph, which is replayed for at least
    `least` seconds after it has run twice. On the host, where nothing is captured, one round."""
    if device.type == "cpu":
        calls[0]()
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replays, elapsed = 2, 0.0
        while elapsed < least:
            replays *= 2
            begin_event.record(stream)
            for _ in range(replays):
                graph.replay()
            end_event.record(stream)
            end_event.synchronize()
            elapsed = begin_event.elapsed_time(end_event) / 1e3
    return elapsed / replays / len(calls)

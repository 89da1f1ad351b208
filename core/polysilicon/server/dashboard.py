"""What the dashboard page shows, as JSON."""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.health import Health
from polysilicon.server.history import History
from polysilicon.server.tracking import Record, Tracker

MOST_REQUESTS = 50
"""Running requests that the page lists."""


def page() -> bytes:
    """The page, which loads nothing from elsewhere."""
    return resources.files(__package__).joinpath("dashboard.html").read_bytes()


def state(
    *,
    history: History,
    tracker: Tracker,
    facts: ModelFacts,
    model_name: str,
    health: Health,
    restarts: int,
    since: float,
) -> dict[str, Any]:
    """The state of the server; points of its history only where they are after `since`
    (time.time())."""
    stats = history.stats
    now = time.monotonic()
    running = list(tracker.running)
    return {
        "model": model_name,
        "health": health.state,
        "reason": health.reason,
        "restarts": restarts,
        "now": time.time(),
        "backend": facts.backend,
        "max_length": facts.max_length,
        "page_size": facts.page_size,
        "memory": dict(facts.memory),
        "kv": [
            {
                "name": group.name,
                "total": group.total,
                "free": group.free,
                "cached": group.cached,
                "in_use": group.total - group.free - group.cached,
            }
            for group in stats.kv
        ],
        "waiting": dict(stats.waiting),
        "preemptions": stats.preemptions,
        "num_requests": len(running),
        "requests": [_request(record, now) for record in running[:MOST_REQUESTS]],
        "points": [point for point in history.points if point["at"] > since],
    }


def _request(record: Record, now: float) -> dict[str, Any]:
    return {
        "id": record.request.id,
        "choice": record.choice,
        "prompt_tokens": len(record.request.prompt),
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "max_tokens": record.request.params.max_tokens,
        "seconds": now - record.arrival,
        "ttft_ms": None if record.ttft is None else record.ttft * 1e3,
    }

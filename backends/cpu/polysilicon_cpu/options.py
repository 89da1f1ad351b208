"""The options that a device is opened with (`--backend-option KEY=VALUE`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

ACTIVATIONS = ("auto", "f32", "bf16", "int8")
MAX_THREADS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """threads: how many compute, None for one a physical core that the container may use.
    level: instruction-set level, None for the best that runs.
    activations: what inputs of products are rounded to: `bf16`, `int8`, `f32`, or `auto`: int8 with
        a high byte where inputs are large, and bf16 for weights that are floats.
    deterministic: results are bitwise independent of what else is in the batch.
    pin: threads are bound to their cores. Off by default: where anything else needs the cores (the
        server's own process does), a bound thread waits for its core while another one is idle.
    profile: time is taken by kind of op and printed when the device is closed.
    """

    threads: int | None = None
    level: str | None = None
    activations: str = "auto"
    deterministic: bool = False
    pin: bool = False
    profile: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Raises ValueError for what is not known."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                raise ValueError(
                    f"unknown option {name!r}: the cpu backend has {', '.join(sorted(known))}"
                )
        threads = given.get("threads")
        if threads is not None and not (
            threads.isascii() and threads.isdigit() and 1 <= int(threads) <= MAX_THREADS
        ):
            raise ValueError(f"threads is a number from 1 to {MAX_THREADS}, got {threads!r}")
        activations = given.get("activations", cls.activations)
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations is one of {', '.join(ACTIVATIONS)}, got {activations!r}")
        return cls(
            threads=None if threads is None else int(threads),
            level=given.get("level"),
            activations=activations,
            deterministic=_flag(given, "deterministic"),
            pin=_flag(given, "pin"),
            profile=_flag(given, "profile"),
        )


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} is 0 or 1, got {value!r}")
    return value == "1"

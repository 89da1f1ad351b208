"""The options that a device is opened with (`--backend-option KEY=VALUE`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

SHAPES = ("auto", "cpu", "gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """shapes: of work-groups: `cpu`, one work-item with vectors and caches; `gpu`, many work-items
    with local memory; `auto`, by the kind of device."""

    shapes: str = "auto"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Raises ValueError for what is not known."""
        for name in given:
            if name not in ("shapes", "activations", "deterministic"):
                raise ValueError(
                    f"unknown option {name!r}: the opencl backend has shapes "
                    f"({', '.join(SHAPES)}), activations=f32 and deterministic=0"
                )
        if given.get("activations", "auto") not in ("auto", "f32"):
            raise ValueError(
                "the opencl backend multiplies in float32 only: leave activations out, or make it "
                "f32"
            )
        if given.get("deterministic", "0") != "0":
            raise ValueError(
                "the opencl backend is not deterministic across batch sizes: leave deterministic "
                "out, or choose a backend that declares it"
            )
        shapes = given.get("shapes", cls.shapes)
        if shapes not in SHAPES:
            raise ValueError(f"shapes is one of {', '.join(SHAPES)}, got {shapes!r}")
        return cls(shapes=shapes)

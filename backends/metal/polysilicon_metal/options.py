"""The options that a device is opened with (`--backend-option KEY=VALUE`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

ACTIVATIONS = ("auto", "f32", "f16", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """activations: what inputs and results of products, and dense weights, are rounded to: `f32`,
    `f16` or `bf16`; or `auto`: nothing is rounded, but for products with dense 16-bit weights on a
    GPU, whose inputs are rounded to the weights' own dtype.
    compile: whether forwards go through `mx.compile`, None for: on a GPU. On a CPU MLX calls the
    system's C++ compiler for every kernel that it fuses, which takes about a second each.
    """

    activations: str = "auto"
    compile: bool | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Raises ValueError for what is not known."""
        for name, value in given.items():
            if name == "deterministic":
                if value != "0":
                    raise ValueError(
                        "the metal backend is not deterministic across batch sizes: leave "
                        "deterministic out, or choose a backend that declares it"
                    )
            elif name not in ("activations", "compile"):
                raise ValueError(
                    f"unknown option {name!r}: the metal backend has activations, compile and "
                    "deterministic=0"
                )
        activations = given.get("activations", cls.activations)
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations is one of {', '.join(ACTIVATIONS)}, got {activations!r}")
        compiled = given.get("compile")
        if compiled not in (None, "0", "1"):
            raise ValueError(f"compile is 0 or 1, got {compiled!r}")
        return cls(activations=activations, compile=None if compiled is None else compiled == "1")

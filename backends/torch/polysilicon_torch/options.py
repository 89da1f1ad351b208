"""The options that a torch device is opened with (`--backend-option KEY=VALUE`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """activations: what inputs of products are rounded to, and dense weights with them; `auto` is
    bf16. fp8: inputs of products with e4m3 weights are rounded to e4m3, with a scale a row, where
    the card multiplies those (`activations=fp8`; all else is bf16 then). graphs: whether decode
    steps are captured. deterministic: no torch device is; only 0 is taken."""

    activations: torch.dtype = torch.bfloat16
    fp8: bool = False
    graphs: bool = True

    @classmethod
    def parse(cls, backend: str, given: Mapping[str, str]) -> Options:
        """Raises ValueError for what is not known."""
        known = ("activations", "deterministic", "graphs")
        for name in given:
            if name not in known:
                raise ValueError(
                    f"unknown option {name!r}: the {backend} backend has {', '.join(known)}"
                )
        activations = given.get("activations", "auto")
        if activations not in ("auto", "fp8", *DTYPES):
            raise ValueError(
                f"activations is one of auto, {', '.join(DTYPES)}, fp8, got {activations!r}"
            )
        if given.get("graphs", "1") not in ("0", "1"):
            raise ValueError(f"graphs is 0 or 1, got {given['graphs']!r}")
        if given.get("deterministic", "0") != "0":
            raise ValueError(
                f"the {backend} backend is not deterministic across batch sizes: leave "
                "deterministic out, or choose a backend that declares it"
            )
        return cls(
            activations=DTYPES.get(activations, torch.bfloat16),
            fp8=activations == "fp8",
            graphs=given.get("graphs", "1") == "1",
        )

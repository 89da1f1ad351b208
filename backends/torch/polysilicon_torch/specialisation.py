"""One compilation of a kernel: what the ahead-of-time check compiles, target by target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

OPTIONS = frozenset(
    {"num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "maxnreg"}
)
"""The keys of a tuning choice that go to Triton's compiler; the others are block sizes, which are
constexprs of the kernel under the same name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specialisation:
    """A kernel with everything that Triton compiles it for.

    name: unique in its file, in words (`paged_decode head_dim=128 kv=bf16`). kernel: the
    `@triton.jit` function. signature: its non-constexpr arguments in order, with Triton's type
    names (`*bf16`, `*fp8e4nv`, `i32`, `fp32`). constexprs: the others, None too. divisible: the
    integer arguments that are multiples of 16 (pointers are always taken to be aligned to 16
    bytes). options: num_warps, num_stages and what else OPTIONS names. decode: a kernel of the
    decode path, which must not spill registers.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: frozenset[str] = frozenset()
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decode: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        kernel: Any,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any],
        choice: Mapping[str, int],
        *,
        divisible: frozenset[str] = frozenset(),
        decode: bool = False,
    ) -> Specialisation:
        """A specialisation with the block sizes and the options of a tuning choice, as a launcher
        passes them (`kernel[grid](..., **choice)`)."""
        blocks = {key: value for key, value in choice.items() if key not in OPTIONS}
        return cls(
            name=name,
            kernel=kernel,
            signature=signature,
            constexprs={**constexprs, **blocks},
            divisible=divisible,
            options={key: value for key, value in choice.items() if key in OPTIONS},
            decode=decode,
        )

"""What stands for a value while a forward is traced."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from polysilicon.backend import Batch

_UNKNOWN = (
    "values and shapes (T, S, L, P) are not known while a forward is traced; write it with ops "
    "alone"
)


class Symbol:
    """A value that is not known yet: it can be handed to ops, and nothing else."""

    __slots__ = ()

    def _refuse(self, *_arguments: object) -> NoReturn:
        raise TypeError(_UNKNOWN)

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __int__ = __float__ = __index__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(f".{name}: {_UNKNOWN}")


class Field(Symbol):
    """A field of the batch."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Buffer:
    """Where ops write: rows of `width` floats, one a token, or one a logit row.

    born, last_use: indices of the first and last ops that touch it. uses: how often ops do. output:
    which of the program's outputs it is. over: one that the op which writes this may overwrite.
    """

    __slots__ = (
        "born", "last_use", "memory", "number", "of_logits", "output", "over", "uses", "width",
    )  # fmt: skip

    def __init__(self, width: int, of_logits: bool, now: int) -> None:
        self.width = width
        self.of_logits = of_logits
        self.born = now
        self.last_use = now
        self.uses = 0
        self.output: int | None = None
        self.over: Buffer | None = None
        self.memory = -1
        self.number = -1


class Value(Symbol):
    """Columns of a buffer. tape: the recording that it belongs to."""

    __slots__ = ("buffer", "offset", "tape", "width")

    def __init__(self, tape: object, buffer: Buffer, offset: int, width: int) -> None:
        self.tape = tape
        self.buffer = buffer
        self.offset = offset
        self.width = width


BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


def symbolic_batch() -> Batch:
    """A batch of fields; what holds a tuple, or perhaps None, is one field too."""
    fields = {name: Field(name) for name in BATCH_FIELDS}
    return Batch(**fields)  # type: ignore[arg-type]

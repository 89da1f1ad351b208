"""Symbols in place of arrays, and the tape of ops that a forward called with them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from polysilicon.backend import AdapterRef, Batch, Forward, KVPool, Ops


class ContractError(Exception):
    """The core, or a model definition, broke a rule of `polysilicon.backend`."""


_UNKNOWN = (
    "values and shapes (T, S, L, P) are not known while it is traced; write it with ops alone"
)


class Symbol:
    """A value that is not known yet: it can be handed to ops, and nothing else."""

    __slots__ = ("index", "name", "tape")

    def __init__(self, tape: Tape, index: int, name: str) -> None:
        self.tape = tape
        self.index = index
        self.name = name

    def __repr__(self) -> str:
        return f"<symbol {self.name}>"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise ContractError(f"a forward asks for .{attribute} of {self.name}: {_UNKNOWN}")


_ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
]
_REFUSED = {
    "bool": "tests the truth of",
    "len": "asks for the length of",
    **dict.fromkeys(("iter", "contains"), "iterates over"),
    **dict.fromkeys(("getitem", "setitem"), "indexes"),
    **dict.fromkeys(("array", "int", "float", "index", "complex"), "reads the value of"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "compares"),
    **dict.fromkeys(("neg", "pos", "abs", "invert"), "calculates with"),
    **dict.fromkeys(_ARITHMETIC, "calculates with"),
    **{f"r{name}": "calculates with" for name in _ARITHMETIC},
}
"""Special methods that arrays have, and what calling them is."""


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbol, *_arguments: object, **_options: object) -> NoReturn:
        raise ContractError(f"a forward {what} {self.name}: {_UNKNOWN}")

    return refuse


for _name, _what in _REFUSED.items():
    setattr(Symbol, f"__{_name}__", _refusal(_what))
# numpy then leaves `array * symbol` to the symbol.
Symbol.__array_ufunc__ = None  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """One call of an op: its arguments by name, and the symbols that its results are."""

    op: str
    arguments: Mapping[str, Any]
    results: tuple[Symbol, ...]


class Tape:
    """The ops of a forward, recorded once, in the order in which it called them.

    batch: the symbolic one; a field that holds a tuple, or perhaps None, is one symbol.
    pools: the KV pools that are attended to.
    """

    def __init__(self, forward: Forward, hidden: Sequence[int]) -> None:
        self._nodes: list[_Node] = []
        self._size = 0
        self._closed = False
        self.pools: list[KVPool] = []
        fields: dict[str, Any] = {name: self._symbol(f"batch.{name}") for name in BATCH_FIELDS}
        self.batch = Batch(**fields)
        outputs = forward(_recorder(self), self.batch)
        self._closed = True
        self._logits = self._own(outputs.logits, "logits")
        self._hidden = {layer: self._own(outputs.hidden[layer], "hidden") for layer in hidden}

    def replay(
        self, ops: Ops, batch: Batch, inner: Callable[[Any], Any]
    ) -> tuple[Any, dict[int, Any]]:
        """Logits, and hidden states by layer, of a batch. inner: gives the pool of `ops` for one of
        the trace, and anything else as it is."""
        values: list[Any] = [getattr(batch, name) for name in BATCH_FIELDS]
        values += [None] * (self._size - len(values))

        def actual(value: Any) -> Any:
            if isinstance(value, Symbol):
                return values[value.index]
            if isinstance(value, tuple):
                return tuple(actual(item) for item in value)
            if isinstance(value, Batch):
                return Batch(**{name: actual(getattr(value, name)) for name in BATCH_FIELDS})
            if isinstance(value, AdapterRef):
                return dataclasses.replace(value, pool=inner(value.pool))
            return inner(value)

        for node in self._nodes:
            arguments = {name: actual(value) for name, value in node.arguments.items()}
            result = getattr(ops, node.op)(**arguments)
            results = result if isinstance(result, tuple) else (result,)
            for symbol, value in zip(node.results, results, strict=True):
                values[symbol.index] = value
        hidden = {layer: values[symbol.index] for layer, symbol in self._hidden.items()}
        return values[self._logits.index], hidden

    def record(self, op: str, arguments: Mapping[str, Any]) -> Symbol | tuple[Symbol, ...]:
        if self._closed:
            raise ContractError(f"{op} is called after the forward has returned")
        for name, value in arguments.items():
            self._check(f"{op}'s {name}", value)
        pool = arguments.get("pool")
        if isinstance(pool, KVPool) and pool not in self.pools:
            self.pools.append(pool)
        count = _RESULTS[op](arguments) if op in _RESULTS else None
        results = tuple(
            self._symbol(f"result {index} of {op}, call {len(self._nodes)}")
            for index in range(1 if count is None else count)
        )
        self._nodes.append(_Node(op, arguments, results))
        return results[0] if count is None else results

    def _symbol(self, name: str) -> Symbol:
        self._size += 1
        return Symbol(self, self._size - 1, name)

    def _check(self, what: str, value: object) -> None:
        """Refuse what a device could not have in a captured program."""
        if isinstance(value, np.ndarray):
            raise ContractError(
                f"{what} is a numpy array: values come from ops and the batch alone"
            )
        if isinstance(value, Symbol):
            self._own(value, what)
        if isinstance(value, tuple):
            for item in value:
                self._check(what, item)

    def _own(self, value: object, what: str) -> Symbol:
        if not isinstance(value, Symbol) or value.tape is not self:
            raise ContractError(f"{what} is {value!r:.80}, no value of this forward")
        return value


BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))

_RESULTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "linear": lambda arguments: len(arguments["weight"].parts),
    "lora": lambda arguments: len(arguments["parts"]),
    "rms_norm": lambda _: 2,
    "layer_norm": lambda _: 2,
}
"""How many values an op returns as a tuple; the others return one value, and no tuple."""


@functools.cache
def _recorder_class() -> type[Ops]:
    """Ops whose primitives are recorded; those with a default are traced through it."""

    def recording(op: str) -> Callable[..., Any]:
        signature = inspect.signature(getattr(Ops, op))

        def record(self: Any, *arguments: Any, **named: Any) -> Any:
            bound = signature.bind(self, *arguments, **named)
            del bound.arguments["self"]
            return self.tape.record(op, bound.arguments)

        return record

    primitives = {op: recording(op) for op in Ops.__abstractmethods__}
    return type("RecordingOps", (Ops,), primitives)


def _recorder(tape: Tape) -> Ops:
    ops = cast(Any, _recorder_class())()
    ops.tape = tape
    return cast(Ops, ops)

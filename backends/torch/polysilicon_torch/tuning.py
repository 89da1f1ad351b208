"""Block sizes and launch options of kernels, as data: tables per architecture and per card.

A table is a JSON object `{"family or name or any": {"kernel": [rule, ...]}}`. A rule is
`{"when": {"rows": [1, 16]}, "use": {"BLOCK_N": 64, "num_warps": 4}}`: `when` gives inclusive ranges
of the shape's numbers (one that the rule does not name may be anything; null for no bound), and the
first rule that fits counts. Answers are laid over one another key by key, in this order: the shared
table (`triton/NAME.json` beside the kernels of `triton/NAME.py`, with section `any` for all of
them), the vendor's, the card's own that `polysilicon tune` wrote; in each, section `any`, then the
target's family, then its name. So a vendor or a card names only what differs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polysilicon_torch.target import Target

MAX_FILE_BYTES = 1 << 20
_MAX_RULES = 1000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MAX_VALUE = 1 << 20
_ALLOWED: dict[str, Sequence[int]] = {
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": tuple(range(1, 9)),
    "waves_per_eu": tuple(range(9)),
    "matrix_instr_nonkdim": (0, 4, 16, 32),
    "kpack": (1, 2),
    "maxnreg": tuple(range(8, 256, 8)),
}


class TuningError(ValueError):
    """A tuning table cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """when: inclusive bounds of numbers of the shape. use: what is chosen there."""

    when: Mapping[str, tuple[float, float]]
    use: Mapping[str, int]

    def fits(self, shape: Mapping[str, int]) -> bool:
        return all(
            name in shape and low <= shape[name] <= high for name, (low, high) in self.when.items()
        )


Table = Mapping[str, Mapping[str, Sequence[Rule]]]
"""Rules by section (`any`, family, target name) and kernel."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tables that serve one target, the later over the earlier.

    An answer of `pick` is what a launcher passes on: `kernel[grid](..., **choice)`.
    """

    target: Target
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, target: Target, *tables: Table) -> Tuning:
        """The shared table and, over it, `tables`."""
        return cls(target, (shared_table(), *tables))

    def pick(self, kernel: str, /, **shape: int) -> dict[str, int]:
        """Block sizes and launch options of a kernel for a shape, as keyword arguments of its
        launch. Raises TuningError for a kernel that no table knows."""
        choice: dict[str, int] = {}
        for table in self.tables:
            for section in ("any", self.target.family, self.target.name):
                rules = table.get(section, {}).get(kernel, ())
                choice.update(next((rule.use for rule in rules if rule.fits(shape)), {}))
        if not choice:
            raise TuningError(f"no tuning table has a rule for kernel {kernel} at {shape}")
        return choice

    def over(self, kernel: str, choice: Mapping[str, int]) -> Tuning:
        """The same with `choice` laid over every answer for one kernel: what a tuner tries."""
        rule = Rule(when={}, use=dict(choice))
        return Tuning(self.target, (*self.tables, {self.target.name: {kernel: [rule]}}))


@functools.cache
def shared_table() -> Table:
    """The tables beside the kernels, in one."""
    return read_tables(Path(__file__).with_name("triton"))


def read_tables(folder: Path) -> Table:
    """The tables of all the JSON files of a folder, no two of which name the same kernel in the
    same section. Raises TuningError."""
    merged: dict[str, dict[str, Sequence[Rule]]] = {}
    for path in sorted(folder.glob("*.json")):
        for section, kernels in read_table(path).items():
            into = merged.setdefault(section, {})
            if twice := into.keys() & kernels.keys():
                raise TuningError(f"{path}: another file has rules of {', '.join(twice)} too")
            into.update(kernels)
    return merged


def read_table(path: Path) -> Table:
    """A table's file. Raises TuningError for anything but a well-formed table of bounded size."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TuningError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TuningError(f"{path}: larger than {MAX_FILE_BYTES} bytes: remove it")
    try:
        return parse_table(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise TuningError(f"{path}: {error}: remove it, or run `polysilicon tune`") from None


def parse_table(value: Any) -> Table:
    """The table that a JSON value says. Raises ValueError where it is malformed."""
    table = {
        section: {
            kernel: [_rule(rule, kernel) for rule in _list(rules, kernel)]
            for kernel, rules in _object(kernels, section).items()
        }
        for section, kernels in _object(value, "a tuning table").items()
    }
    if sum(len(rules) for kernels in table.values() for rules in kernels.values()) > _MAX_RULES:
        raise ValueError(f"more than {_MAX_RULES} rules")
    return table


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object")
    for key in value:
        if not _NAME.fullmatch(key):
            raise ValueError(f"{key[:64]!r} is no name of a section, kernel or number")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the rules of {what} must be a JSON list")
    return value


def _rule(value: Any, kernel: str) -> Rule:
    if set(_object(value, f"a rule of {kernel}")) != {"when", "use"}:
        raise ValueError(f'a rule of {kernel} must have "when" and "use", nothing else')
    use = _object(value["use"], f'"use" of {kernel}')
    for name, number in use.items():
        _check_value(f"{kernel}: {name}", name, number)
    when = {
        name: _bounds(bounds, f"{kernel}: {name}")
        for name, bounds in _object(value["when"], f'"when" of {kernel}').items()
    }
    return Rule(when=when, use=use)


def _check_value(what: str, name: str, number: Any) -> None:
    allowed = _ALLOWED.get(name)
    if allowed is not None:
        if type(number) is not int or number not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(map(str, allowed))}")
    elif type(number) is not int or not 0 <= number <= _MAX_VALUE:
        raise ValueError(f"{what} must be an integer of 0 to {_MAX_VALUE}")
    elif name.startswith("BLOCK") and number.bit_count() != 1:
        raise ValueError(f"{what} must be a power of two")


def _bounds(value: Any, what: str) -> tuple[float, float]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(bound is not None and type(bound) is not int for bound in value)
    ):
        raise ValueError(f"{what} must be [lowest, highest], integers or null")
    low, high = value
    return (-math.inf if low is None else low, math.inf if high is None else high)


def card_path(card: str, target: Target) -> Path:
    """Where the table of a card lies: `card` is its name as the driver says it. Begins with `~` for
    a user without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"[^A-Za-z0-9]+", "-", card).strip("-")[:64].lower() or "unnamed"
    return Path(os.path.expanduser(root)) / "polysilicon" / "tuning" / f"{target.name}-{name}.json"


def read_card(card: str, target: Target, below: Sequence[Table]) -> Table:
    """The card's own table, empty where none was written. below: the tables that it is laid over,
    which know every kernel and every key. Raises TuningError."""
    path = card_path(card, target)
    if not os.path.exists(path):  # nor for one who may not look
        return {}
    table = read_table(path)
    known = _keys(below)
    for kernel, keys in _keys([table]).items():
        if strange := keys - known.get(kernel, frozenset()):
            raise TuningError(
                f"{path}: no {', '.join(sorted(strange))} of a kernel {kernel}: written by another"
                " version: remove it, or run `polysilicon tune`"
            )
    return table


def _keys(tables: Sequence[Table]) -> dict[str, set[str]]:
    """The keys that rules of each kernel choose."""
    keys: dict[str, set[str]] = {}
    for table in tables:
        for kernels in table.values():
            for kernel, rules in kernels.items():
                keys.setdefault(kernel, set()).update(*(rule.use for rule in rules))
    return keys


def write_card(card: str, target: Target, rules: Mapping[str, Sequence[Rule]]) -> Path:
    """Write the card's own table whole, in place of the one before. Raises TuningError."""
    path = card_path(card, target)
    value = {
        target.name: {
            kernel: [
                {
                    "when": {name: _written(bounds) for name, bounds in rule.when.items()},
                    "use": dict(rule.use),
                }
                for rule in kernel_rules
            ]
            for kernel, kernel_rules in rules.items()
        }
    }
    parse_table(value)
    if path.parts[0].startswith("~"):
        raise TuningError(f"{path}: there is no home directory: set XDG_CACHE_HOME to a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(value, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        raise TuningError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _written(bounds: tuple[float, float]) -> list[int | None]:
    return [None if math.isinf(bound) else int(bound) for bound in bounds]

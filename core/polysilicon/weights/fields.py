"""Bounded, typed reading of parameters, which come from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.files import shown

_MEND = "Use a file that was converted for this model, or download it again."


class Fields:
    """The parameters of one model: Hugging Face's config.json or GGUF's metadata.

    source: what error messages call the file. Every reader raises ModelError naming the field; a
    null counts as missing.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.source = source
        self._values = values

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """The same parameters, with these values where one is not there; a null stays null."""
        return Fields({**defaults, **self._values}, self.source)

    def with_overrides(self, overrides: Mapping[str, object]) -> Fields:
        """The same parameters, with these values whatever the file has."""
        return Fields({**self._values, **overrides}, self.source)

    @property
    def empty(self) -> bool:
        return not self._values

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def _get(self, name: str, default: object = None) -> object:
        value = self._values.get(name)
        return default if value is None else value

    def refuse(self, name: str, expected: str) -> ModelError:
        """The error for a field whose value cannot be used; `expected` completes 'expected ...'."""
        if not self.has(name):
            return ModelError(f"{self.source} lacks {name}, expected {expected}. {_MEND}")
        return ModelError(
            f"{self.source} has {name} = {_described(self._values[name])}, expected {expected}. "
            f"{_MEND}"
        )

    def integer(
        self, name: str, *, low: int = 1, high: int = 1 << 24, default: int | None = None
    ) -> int:
        """An integer in `[low, high]`. GGUF's lists by layer count when they are uniform."""
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            value = int(value[0]) if bool((value == value[0]).all()) else value
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        name: str,
        *,
        low: float = 1e-30,
        high: float = 1e30,
        default: float | None = None,
    ) -> float:
        """A finite number in `[low, high]`."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._get(name, default)
        if type(value) is not str:
            raise self.refuse(name, "a string")
        return value

    def numbers(self, name: str, length: int) -> list[float]:
        """A list of `length` numbers in `[1e-30, 1e30]`."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.refuse(name, f"a list of {length} numbers")
        for item in value:
            if type(item) not in (int, float) or not 1e-30 <= item <= 1e30:
                raise self.refuse(name, f"a list of {length} numbers from 1e-30 to 1e30")
        return [float(item) for item in value]

    def integers(self, name: str, *, high: int) -> list[int]:
        """A list of integers in `[0, high]`, empty where it is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(
            type(item) is int and 0 <= item <= high for item in value
        ):
            raise self.refuse(name, f"a list of integers from 0 to {high}")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings, empty where it is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of strings")
        return value

    def choices(self, name: str, length: int, allowed: tuple[str, ...]) -> list[str]:
        """A list of `length` strings, each one of `allowed`."""
        value = self._values.get(name)
        expected = f"a list of {length} strings out of {', '.join(allowed)}"
        if not isinstance(value, list) or len(value) != length:
            raise self.refuse(name, expected)
        if not all(isinstance(item, str) and item in allowed for item in value):
            raise self.refuse(name, expected)
        return value

    def flags(self, name: str, length: int) -> list[bool]:
        """The first `length` of a GGUF array of booleans."""
        value = self._get(name)
        if (
            not isinstance(value, np.ndarray)
            or value.dtype.kind not in "biu"
            or len(value) < length
        ):
            raise self.refuse(name, f"{length} booleans")
        return [bool(item) for item in value[:length]]

    def length(self, name: str) -> int:
        """Entries of a GGUF array of strings, 0 where it is missing."""
        value = self._get(name, ())
        if not isinstance(value, tuple):
            raise self.refuse(name, "a list of strings")
        return len(value)

    def is_array(self, name: str) -> bool:
        return isinstance(self._values.get(name), np.ndarray)

    def is_text(self, name: str) -> bool:
        return isinstance(self._values.get(name), str)

    def is_section(self, name: str) -> bool:
        return isinstance(self._values.get(name), Mapping)

    def section(self, name: str) -> Fields:
        """A nested mapping, empty where it is missing."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, "a mapping")
        return Fields(value, f"{self.source}, {name},")


def _described(value: object) -> str:
    """A value as an error message prints it: of bounded length, whatever the file holds."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple | np.ndarray):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"

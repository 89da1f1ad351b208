"""Accelerators by name: how much memory, how fast it is read, how fast products are computed."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from polysilicon.errors import ConfigError
from polysilicon.suggest import nearest

THIS = "this"
"""The name of the machine at hand, which is measured."""

RATE_DTYPES = ("f32", "bf16", "fp8", "int8", "fp4")
"""Dtypes of products whose rates the table may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str


class Hardware(ABC):
    """One accelerator.

    key: what it is called on the command line. name: what its vendor calls it.
    memory: bytes. rates: operations a second of dense products, by dtype, where they are known.
    compute: the dtype that its products are computed in whatever weights are stored in, or None
    where that follows from the weights, as it does where there is no rate of it.
    """

    key: str
    name: str
    memory: Figure
    rates: Mapping[str, Figure]
    compute: str | None = None

    @abstractmethod
    def bandwidth(self, nbytes: int) -> Figure | None:
        """Bytes a second that are read where `nbytes` are read over and over; None: not known."""

    def product_rate(self, dtype: str) -> tuple[str, Figure] | None:
        """The dtype of products, and their rate, for weights that could be multiplied in `dtype`:
        in the 16 bits that every weight can be widened to where the hardware has no rate of it."""
        given = () if self.compute is None else (self.compute,)
        for name in (*given, dtype, "bf16"):
            if name in self.rates:
                return name, self.rates[name]
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownHardware(Hardware):
    """An accelerator of the table, by its vendor's figures."""

    key: str
    name: str
    memory: Figure
    read: Figure
    rates: Mapping[str, Figure]

    def bandwidth(self, nbytes: int) -> Figure:
        return self.read


@functools.cache
def hardware_table() -> Mapping[str, KnownHardware]:
    """The accelerators that are known, by key."""
    text = resources.files("polysilicon.plan").joinpath("hardware.toml").read_text("utf-8")
    return MappingProxyType({key: _entry(key, row) for key, row in tomllib.loads(text).items()})


def _entry(key: str, row: Mapping[str, Any]) -> KnownHardware:
    return KnownHardware(
        key=key,
        name=row["name"],
        memory=_figure(row["memory"]),
        read=_figure(row["bandwidth"]),
        rates={dtype: _figure(cell) for dtype, cell in row.get("rates", {}).items()},
    )


def _figure(cell: list[Any]) -> Figure:
    value, source = cell
    return Figure(value=value, source=source)


def find_hardware(key: str) -> KnownHardware:
    """An accelerator of the table. Raises ConfigError naming those that there are."""
    table = hardware_table()
    if key not in table:
        hint = nearest(key, [*table, THIS]) or "."
        raise ConfigError(
            f"--hardware {key!r:.80} is not known{hint} Known are {', '.join(table)}, and {THIS}, "
            "which measures this machine"
        )
    return table[key]

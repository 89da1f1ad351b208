"""Modules as a config names them: by their names, by expressions, and by their classes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from pydantic_core import SchemaError, SchemaValidator, core_schema

from polysilicon.errors import ModelError
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown

_REGEX = "re:"
_MOST_CHARACTERS = 512
# A million or two are matched in a second.
_MOST_MATCHES = 1 << 23
# What grows with a count is what is refused; two digits of a layer do not.
_COUNTED_DIGITS = re.compile(r"(\\d|\[0-9\])\{\d(,\d?)?\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """names: of modules, and of classes. matched: modules whose names an expression begins."""

    names: frozenset[str]
    matched: frozenset[str]

    def name(self, module: str) -> bool:
        return module in self.names

    def match(self, module: str) -> bool:
        return module in self.matched

    def hold_class(self, module: str) -> bool:
        """Whether a quantised module is of a class named: one that is no embedding is linear."""
        embedding = "embed" in module.rpartition(".")[2]
        return ("Embedding" if embedding else "Linear") in self.names


class Matcher:
    """Reads lists of targets, for the modules that there are.

    Expressions are a stranger's. They are for pydantic's engine (Rust's `regex`), whose time grows
    with an expression's length times a name's, where Python's may take for ever; both are bounded
    here, and so is their number.
    """

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules
        self._left = _MOST_MATCHES

    def targets(self, fields: Fields, name: str) -> Targets:
        """The list of that name. Raises ModelError where it holds what cannot be read."""
        texts = fields.strings(name)
        patterns = [text.removeprefix(_REGEX) for text in texts if text.startswith(_REGEX)]
        self._left -= len(patterns) * (len(self._modules) + 1)
        if self._left < 0:
            raise fields.refuse(name, "fewer expressions")
        return Targets(
            names=frozenset(text for text in texts if not text.startswith(_REGEX)),
            matched=frozenset().union(*(self._matched(fields, name, text) for text in patterns)),
        )

    def _matched(self, fields: Fields, name: str, pattern: str) -> set[str]:
        validator = _validator(pattern)
        if validator is None:
            raise ModelError(
                f"{fields.source} has the expression {shown(pattern)} in {name}, which is not "
                f"read. Use one of at most {_MOST_CHARACTERS} characters, without look-around, "
                "back-references and counted repetition."
            )
        return {
            module
            for module in self._modules
            if len(module) <= _MOST_CHARACTERS and validator.isinstance_python(module)
        }


def _validator(pattern: str) -> SchemaValidator | None:
    """What accepts the names that an expression begins; None for one that is not read."""
    if len(pattern) > _MOST_CHARACTERS or "{" in _COUNTED_DIGITS.sub("", pattern):
        return None
    schema = core_schema.str_schema(pattern=f"^(?:{pattern})", regex_engine="rust-regex")
    try:
        return SchemaValidator(schema)
    except SchemaError:
        return None

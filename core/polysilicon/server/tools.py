"""Tools that a model may call, whatever the wire format that tells of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polysilicon.server.errors import invalid

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema, None for none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def openai(self) -> dict[str, Any]:
        """In the form that templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: that the model is told of. choice: whether it calls; `named` calls the only tool.
    parallel: whether one answer may hold several calls."""

    tools: Sequence[Tool] = ()
    choice: Literal["none", "auto", "required", "named"] = "auto"
    parallel: bool = True


def checked_tool(name: object, description: object, parameters: object, place: str) -> Tool:
    """A tool of these parts. Raises ApiError (400), which names `place`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{place}: name must be letters, digits and _ - . :, up to 128", place)
    if not isinstance(description, str | None):
        raise invalid(f"{place}: description must be a text", place)
    if not isinstance(parameters, dict | None):
        raise invalid(f"{place}: parameters must be a JSON schema, an object", place)
    return Tool(name, description, parameters)


def calls_schema(tools: Mapping[str, Mapping[str, Any]], *, most: int | None) -> dict[str, Any]:
    """A list of one to `most` calls of the tools, which are given by name with the schemas of their
    arguments; references within those are led to their new place.

    Raises ApiError (400) for schemas that are nested too deeply."""
    calls = []
    for number, (name, parameters) in enumerate(tools.items()):
        place = f"#/items/anyOf/{number}/properties/arguments"
        try:
            arguments = _moved(parameters, place)
        except RecursionError:
            raise invalid(f"the parameters of tool {name!r} are nested too deeply") from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        whole["maxItems"] = most
    return whole


def _moved(value: Any, place: str) -> Any:
    """A schema that stands at `place` and no longer at the root."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(item, place) for key, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved

"""Request bodies: strict JSON into pydantic models, and their place in the OpenAPI document."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    ValidationError,
    model_validator,
)
from starlette.requests import Request

from polysilicon.server.errors import ApiError, invalid, of_validation

logger = logging.getLogger(__name__)

SCHEMA_REFERENCE = "#/components/schemas/{model}"
_MOST_NAMES_WARNED = 200
_MISSPELT = 0.87
_MOST_FIELDS = 64
_warned: set[str] = set()


def _whole(value: object) -> object:
    """A float that is a whole number as an int, as JSON does not tell them apart."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int)]


class _FailFast(FailFast):
    # pydantic's own has no hash, which an alternative of a union needs.
    __hash__ = object.__hash__


FAIL_FAST = _FailFast()
"""For every list of a body: a million wrong items would else be a million errors."""


class Part(BaseModel):
    """An object within a body whose fields are all known."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: object) -> object:
        # Each unknown field would be an error of its own.
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise ValueError(f"it has more than {_MOST_FIELDS} fields")
        return value


class Body(BaseModel):
    """A request's body. Types are strict; unknown fields are ignored with a warning in the log, and
    refused where they are a known field misspelt or one that would change what is answered.

    refused: fields that other servers know and this one lacks, with the values that ask for nothing
    (None always does).
    """

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing of the answer."""


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType]) -> BodyType:
    """The request's body as a model. Raises ApiError (400, 415) for whatever is not one."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415, f"the body is of type {media_type[:100]!r}: send Content-Type: application/json"
        )
    try:
        value = msgspec.json.decode(await request.body())
    except RecursionError:
        raise invalid("the body is nested too deeply: send a flatter one") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    return checked(kind, value)


def checked(kind: type[BodyType], value: object) -> BodyType:
    """A parsed body as a model. Raises ApiError (400)."""
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None
    if body.model_extra:
        _check_extra(kind, body.model_extra)
    return body


def _check_extra(kind: type[Body], extra: Mapping[str, Any]) -> None:
    if len(extra) > _MOST_FIELDS:
        raise invalid(f"the body has more than {_MOST_FIELDS} unknown fields: leave them out")
    for name, value in extra.items():
        if value is None or name in kind.ignored:
            continue
        if name in kind.refused:
            harmless = kind.refused[name]
            if not any(value == item and type(value) is type(item) for item in harmless):
                raise invalid(
                    f"{name} is not supported: leave it out", name, "unsupported_parameter"
                )
            continue
        # A long name resembles none, which takes long to find out.
        close = difflib.get_close_matches(name[:100], kind.model_fields, n=1, cutoff=_MISSPELT)
        if close:
            raise invalid(f"unknown field {name[:100]!r}: did you mean {close[0]!r}?", name[:100])
        if name not in _warned and len(_warned) < _MOST_NAMES_WARNED:
            _warned.add(name)
            logger.warning("requests hold the unknown field %.100r, which is ignored", name)


def openapi_body(kind: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `kind` with `read_body`."""
    schema = {"$ref": SCHEMA_REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

"""Errors as clients of the HTTP server see them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polysilicon.errors import (
    PolysiliconError,
    RequestError,
    ServiceUnavailable,
    TemplateError,
)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(PolysiliconError):
    """An error with its HTTP status.

    param: the field of the request that is wrong. code: a short name that programs look for.
    retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "api_error")

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that go with the error."""
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body is not worth reading.
            headers["Connection"] = "close"
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 504:
            # OpenAI's clients would send the same request again and time out again.
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def of_validation(error: ValidationError) -> ApiError:
    """The first of pydantic's errors as a 400 that names the field."""
    return of_details(error.errors(include_url=False, include_context=False))


def of_details(details: list[Mapping[str, Any]] | list[Any]) -> ApiError:
    """The most telling of pydantic's error details as a 400 that names the field."""
    first = _most_telling(details)
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    reason = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return invalid(f"{path or 'the body'} is missing: send it", path or None)
    if not path:
        return invalid(f"the body: {reason}")
    return invalid(f"{path}: {reason}, not {_shown(first.get('input'))}", path)


def _most_telling(details: list[Any]) -> Any:
    """Of a union's errors the one that goes deepest, else the first."""
    return max(details, key=lambda detail: len(detail["loc"]) if detail["loc"] else 0)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlevel = 3


def _shown(value: object) -> str:
    """A value for people to read, shortened before it is written out."""
    return _repr.repr(value)


def api_error(error: PolysiliconError) -> ApiError:
    """What a client sees of an error of the core."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceUnavailable):
        return ApiError(503, str(error), retry_after=error.retry_after)
    if isinstance(error, RequestError | TemplateError):
        return invalid(str(error))
    return ApiError(500, str(error))

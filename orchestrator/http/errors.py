"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import math
import secrets
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from coppice.errors import CoppiceError, InvalidField, Overloaded, Status
from coppice.rpc.server import MAX_DETAILS

log = structlog.get_logger()

CODES = {
    Status.INVALID_ARGUMENT: 400,
    Status.UNAUTHENTICATED: 401,
    Status.PERMISSION_DENIED: 403,
    Status.NOT_FOUND: 404,
    Status.DEADLINE_EXCEEDED: 408,
    Status.CANCELLED: 499,
    Status.RESOURCE_EXHAUSTED: 429,
    Status.UNAVAILABLE: 503,
    Status.FAILED_PRECONDITION: 503,
    Status.INTERNAL: 500,
}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
"""by HTTP status; of all others the class counts"""


def envelope(code: int, message: str, field: str | None = None) -> dict[str, Any]:
    """OpenAI's body of an error. The message may quote what the caller made up."""
    kind = TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    return {"error": {"message": _plain(message), "type": kind, "param": field and _plain(field), "code": code}}


def _plain(text: str) -> str:
    return text[:MAX_DETAILS].encode(errors="replace").decode()


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error and its body. Details of an unexpected one stay in the log under an opaque id."""
    if isinstance(error, CoppiceError):
        code = CODES[error.status]
        return code, envelope(code, str(error), error.field if isinstance(error, InvalidField) else None)
    if isinstance(error, HTTPException):
        message = "it is not served here; /docs lists what is" if error.status_code == 404 else str(error.detail)
        return error.status_code, envelope(error.status_code, message)
    if isinstance(error, RequestValidationError):
        deepest = max(error.errors(), key=lambda each: len(each["loc"]))  # of what pydantic tried there
        field = _path([str(part) for part in deepest["loc"][1:]])
        reason = "is not served (docs/http.md#fields)" if deepest["type"] == "extra_forbidden" else deepest["msg"]
        return 400, envelope(400, f"{field or 'body'}: {reason}", field or None)
    opaque = secrets.token_hex(8)
    log.error("unexpected error", method="HTTP", error_id=opaque, exc_info=error)
    return 500, envelope(500, f"internal error {opaque}")


def response(error: Exception) -> JSONResponse:
    """The answer that an error is."""
    code, body = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, code, headers)


def handle(app: FastAPI) -> None:
    """Have an app answer every error in OpenAI's envelope."""

    @app.exception_handler(CoppiceError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    @app.exception_handler(Exception)
    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError) and "json" not in request.headers.get("content-type", ""):
            error = HTTPException(415, "send Content-Type: application/json")
        return response(error)


def _path(parts: list[str]) -> str:
    """Where in a body an error is, without the names of the types that pydantic tried there."""
    return ".".join(part for number, part in enumerate(parts) if not (number and (part == "str" or "[" in part)))

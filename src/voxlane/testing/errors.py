"""Errors that the emulator responds with; each dialect has its own format for them."""

from __future__ import annotations

_REASONS = {
    400: "invalid",
    403: "forbidden",
    404: "notFound",
    405: "methodNotAllowed",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    501: "notImplemented",
}
_INJECTED_CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    408: "RequestTimeout",
    429: "TooManyRequests",
    503: "SlowDown",
}


class RequestError(Exception):
    """Raised for a request that gets an error response.

    ``code`` is its name in the XML dialects (``NoSuchKey``), ``reason`` its name in JSON (``notFound``), by default the
    usual one of the status. ``head`` contains additional header lines of the response, each ending in CRLF. A response
    with ``status`` 304 has no body.
    """

    def __init__(self, status: int, code: str, message: str, reason: str = "", *, head: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.reason = reason or _REASONS.get(status, "backendError")
        self.head = head


def no_such_upload(upload_id: str) -> RequestError:
    """Return the error for an upload that is not open."""
    return RequestError(404, "NoSuchUpload", f"The upload does not exist or was completed or aborted: {upload_id}")


def precondition_failed(condition: str) -> RequestError:
    """Return the error for a precondition that does not hold."""
    message = f"At least one of the pre-conditions you specified did not hold: {condition}"
    return RequestError(412, "PreconditionFailed", message)


def invalid(message: str, code: str = "InvalidArgument") -> RequestError:
    """Return the error for an invalid request."""
    return RequestError(400, code, message)


def not_implemented(feature: str) -> RequestError:
    """Return the error for a feature of the services that the emulator does not have."""
    return RequestError(501, "NotImplemented", f"The emulator does not implement {feature}")


def unsatisfiable(size: int) -> RequestError:
    """Return the error for a range outside an object."""
    message = f"The requested range is outside the object of {size} bytes"
    return RequestError(416, "InvalidRange", message, head=f"Content-Range: bytes */{size}\r\n")


def throttled(dialect: str) -> RequestError:
    """Return the error of a service for a request above its rate."""
    if dialect == "s3":
        return RequestError(503, "SlowDown", "Please reduce your request rate.")
    return RequestError(429, "TooManyRequests", "The request rate exceeds what the emulator allows")


def injected(status: int) -> RequestError:
    """Return the error of an overloaded or broken service."""
    reason = "" if status in _INJECTED_CODES else "backendError"
    code = _INJECTED_CODES.get(status, "InternalError")
    return RequestError(status, code, "Injected by the voxlane emulator", reason)

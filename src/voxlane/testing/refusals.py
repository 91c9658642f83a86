"""Requests the emulator turns down: one exception, raised anywhere, put into words by each dialect."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that gets an error answer.

    ``code`` is the name in the XML dialects (``NoSuchKey``), ``reason`` the one in JSON (``notFound``).
    ``status`` 304 is an answer without a body.
    """

    def __init__(self, status: int, code: str, message: str, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.reason = reason


def no_such_bucket(bucket: str) -> RefusedError:
    return RefusedError(404, "NoSuchBucket", f"The specified bucket does not exist: {bucket}", "notFound")


def no_such_key(bucket: str, key: str) -> RefusedError:
    return RefusedError(404, "NoSuchKey", f"No such object: {bucket}/{key}", "notFound")


def no_such_upload(upload_id: str) -> RefusedError:
    return RefusedError(
        404, "NoSuchUpload", f"The upload does not exist or was completed or aborted: {upload_id}", "notFound"
    )


def precondition_failed(condition: str) -> RefusedError:
    return RefusedError(
        412,
        "PreconditionFailed",
        f"At least one of the pre-conditions you specified did not hold: {condition}",
        "conditionNotMet",
    )


def not_modified() -> RefusedError:
    return RefusedError(304, "NotModified", "Not Modified", "notModified")


def invalid(message: str, code: str = "InvalidArgument") -> RefusedError:
    return RefusedError(400, code, message, "invalid")


def unsatisfiable(size: int) -> RefusedError:
    return RefusedError(
        416,
        "InvalidRange",
        f"The requested range is outside the object of {size} bytes",
        "requestedRangeNotSatisfiable",
    )


def throttled(dialect: str) -> RefusedError:
    """The error a service gives to a request beyond its rate."""
    if dialect == "s3":
        return RefusedError(503, "SlowDown", "Please reduce your request rate.", "backendError")
    return RefusedError(
        429, "TooManyRequests", "The request rate exceeds what the emulator allows", "rateLimitExceeded"
    )


def injected(status: int) -> RefusedError:
    """The error a service gives with ``status`` when it is overloaded or broken."""
    names = {
        429: ("TooManyRequests", "rateLimitExceeded"),
        500: ("InternalError", "backendError"),
        503: ("SlowDown", "backendError"),
        408: ("RequestTimeout", "backendError"),
        403: ("AccessDenied", "forbidden"),
        404: ("NoSuchKey", "notFound"),
    }
    code, reason = names.get(status, ("InternalError", "backendError"))
    return RefusedError(status, code, "Injected by the voxlane emulator", reason)

"""Translation of obstore's exceptions into voxlane's.

The engine provides a type and a message; the HTTP status and the service's error code are only in the message. So this
is the one place where message texts decide, and tests/store/test_faults.py provokes each kind. Types are matched by
name, because a forked child has its own copy of the engine with its own classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from voxlane import errors
from voxlane.errors import StoreError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_RANGE = re.compile(r"(?:\s|content-)range\b", re.IGNORECASE)
"""The engine's messages about ranges, which have no status; not a bucket named orange in a URL."""
_WRONG_RANGE = re.compile(
    r"error: (Requested \d+\.\.|Received non-partial|Content-Range header not|Failed to parse value for CONTENT_RANGE)"
)
"""The engine's messages about responses that are not the range that was requested."""
_NOT_THE_SERVICES = re.compile(
    r"(?i)(etag|last-modified) header missing|missingetag|missinglastmodified|got invalid \w+ response"
)
"""The engine's messages about successful responses that lack what every service sends: a proxy answered."""
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_BAD_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthFailure"})
_NO_CREDENTIALS = (
    "169.254.169.254",  # the AWS and Azure metadata address: asked only if no other credentials exist
    "metadata.google.internal",
    "Error getting credentials",
    "An error occurred getting credentials",
    "MissingCredentials",
    "InstanceCredential",
    "fetching AWS credentials",
    "performing token request",
    "performing GET request for managed identity",
)

_CONNECTION_ERRORS = ("HTTP error", "HttpError", "error sending request", "reqwest", "timed out")
_CONNECTION_CAUSES = {
    "Connection refused": "connection refused",
    "dns error": "the host name does not resolve",
    "Name or service not known": "the host name does not resolve",
    "Temporary failure in name resolution": "the host name does not resolve",
    "timed out": "timed out",
    "operation timed out": "timed out",
    "TimedOut": "timed out",
    "kind: Timeout": "timed out",
    "IncompleteMessage": "cut off by the server",
    "closed connection without response": "cut off by the server",
    "ConnectionReset": "reset by the server",
    "reset by peer": "reset by the server",
    "IncompleteRead": "the response body was cut off",
    "decoding response body": "the response body was cut off",
    "certificate": "the server's certificate is not trusted",
}

LOGIN_HINTS = {
    "gs": "Run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to a key file, "
    "or use no credentials (StoreConfig(anonymous=True), --anonymous) for a public bucket",
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose an AWS_PROFILE, "
    "or use no credentials (StoreConfig(anonymous=True), --anonymous) for a public bucket",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, run `az login`, "
    "or use no credentials (StoreConfig(anonymous=True), --anonymous) for a public container",
}


class UnknownLengthError(StoreError):
    """Raised when a response has no Content-Length, so that the engine cannot read it."""


class TransientError(Exception):
    """A failure that is worth another attempt."""

    def __init__(self, problem: str, uri: str) -> None:
        super().__init__(problem)
        self.uri = uri

    def to_unavailable(self, attempts: int) -> errors.UnavailableError:
        """Return the error to raise when there is no time left for another attempt."""
        return errors.UnavailableError(
            f"{self}, {attempts} attempt{'s' if attempts > 1 else ''}",
            uri=self.uri,
            fix="Check the network and the endpoint, then try again; StoreConfig.retry sets how long to retry",
        )


class WrongBytesError(TransientError):
    """A read whose bytes are not those that were stored. Something on the way may have changed them, so the object is
    blamed only after several reads."""

    def __init__(self, problem: str, uri: str, blame: Callable[[int], StoreError]) -> None:
        super().__init__(problem, uri)
        self.blame = blame
        """Returns the error to raise after that number of reads."""


def is_foreign(error: BaseException) -> bool:
    """Return whether `error` comes from the engine and needs translating."""
    if isinstance(error, errors.VoxlaneError):
        return False
    is_engine_type = type(error).__module__ == "obstore.exceptions"
    return is_engine_type or isinstance(error, OSError | ValueError | NotImplementedError)


def is_lost_completion(error: BaseException) -> bool:
    """Return whether the response to the request that completes an upload may have been lost. The engine then asks
    again and the upload no longer exists; or it drops the upload, and reports how that failed."""
    text = str(error)
    about_upload = "complete multipart" in text or ("uploadId=" in text and "partNumber=" not in text)
    return about_upload and ("NoSuchUpload" in text or _is_connection_error(text))


def translate(error: BaseException, uri: str) -> StoreError | TransientError:
    """Return voxlane's error for the engine's `error` on `uri` (of an object, or of a prefix for listings)."""
    text = str(error)
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    parts = [match[1] for pattern in (_CODE, _MESSAGE) if (match := pattern.search(text))]
    if malformed := _classify_malformed(text, uri):
        return malformed
    if classified := _classify(error, uri, text, status, f" ({': '.join(parts)})" if parts else ""):
        return classified
    is_invalid = isinstance(error, ValueError) or type(error).__name__ == "InvalidPathError"
    if is_invalid or "illegal character" in text or "empty path" in text:
        return errors.InvalidKeyError(
            f"the byte engine cannot address a key: {' '.join(text.partition('Debug source')[0].split())}", uri=uri
        )
    if status is None and _is_connection_error(text):
        return TransientError(f"the connection failed ({_find_cause(text)})", uri)
    if status is not None:
        return StoreError(f"the service answered {status} ({': '.join(parts) or text.splitlines()[0]})", uri=uri)
    return StoreError(text.splitlines()[0], uri=uri)


def translate_response(status: int, body: bytes, uri: str) -> StoreError | TransientError:
    """Return voxlane's error for a response to a request on `uri` that the engine did not send."""
    text = body.decode(errors="replace")
    parts = [match[1] for pattern in (_CODE, _MESSAGE) if (match := pattern.search(text))]
    try:
        message = ": ".join(parts) or str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    if status == 405:
        return errors.UnsupportedError(f"this store does not support that operation ({message})", uri=uri)
    return _classify(None, uri, text, status, f" ({message})") or StoreError(
        f"the service answered {status} ({message})", uri=uri
    )


def _classify(
    error: BaseException | None, uri: str, text: str, status: int | None, details: str
) -> StoreError | TransientError | None:
    """Return voxlane's error for a failure of a known kind, else None. `details` are the service's code and message."""
    code = match[1] if (match := _CODE.search(text)) else ""
    bucket = "/".join(uri.split("/", 3)[:3])
    login_hint = LOGIN_HINTS.get(uri.partition("://")[0], "")

    def is_any(*kinds: str | int | type[Exception], marks: Sequence[str] = ()) -> bool:
        """Return whether this is one of these types of the engine, codes, statuses or types of Python, or its text has
        one of the marks."""
        own = (type(error).__name__, code, status)
        is_kind = any(isinstance(error, kind) if isinstance(kind, type) else kind in own for kind in kinds)
        return is_kind or any(mark in text for mark in marks)

    if is_any("NoSuchBucket", "ContainerNotFound", marks=["bucket does not exist"]):
        return errors.BucketNotFoundError("no such bucket", uri=bucket, fix="Check its spelling, project and region")
    if is_any(marks=_NO_CREDENTIALS):
        return errors.CredentialsError("no credentials were found", uri=uri, fix=login_hint)
    if is_any("NotFoundError", 404, FileNotFoundError, marks=["os error 20"]):  # 20: part of the path is a file
        problem, fix = "no such object", "It may be misspelt, or was deleted after it was listed"
        if code == "NoSuchUpload":
            problem, fix = "the unfinished upload no longer exists", "Write it again; somebody may have dropped it"
        return errors.NotFoundError(problem, uri=uri, fix=fix)
    if is_any(301, "PermanentRedirect", "AuthorizationHeaderMalformed"):
        return StoreError(f"wrong region{details}", uri=bucket, fix="Set StoreConfig(region=...) or AWS_REGION")
    if is_any("UnauthenticatedError", 401, *_BAD_KEYS):
        return errors.CredentialsError(f"the credentials were not accepted{details}", uri=uri, fix=login_hint)
    if is_any("PermissionDeniedError", 403, PermissionError, marks=["os error 13"]):
        fix = "Ask for read (or write) permission on it, or use another identity"
        return errors.PermissionDeniedError(f"access denied{details}", uri=uri, fix=fix)
    if is_any("AlreadyExistsError", FileExistsError):
        return errors.AlreadyExistsError("the object exists already", uri=uri, fix="Write another key, or overwrite it")
    if is_any("PreconditionError", "NotModifiedError", 412):
        return errors.ChangedError("the object is not the expected version", uri=uri, fix="List or read it again")
    if is_any(416) or _RANGE.search(text[:120]):
        return errors.RangeError("the range lies outside the object", uri=uri, fix="It may have changed: list it again")
    if is_any("NotSupportedError", 501, NotImplementedError):
        return errors.UnsupportedError(f"this store does not support that operation{details}", uri=uri)
    if "QuotaExceeded" in code or is_any(marks=["No space left", "os error 28"]):
        return StoreError("no space left", uri=uri, fix="Free some space, or raise the quota")
    return TransientError(f"the service answered {status}{details}", uri) if status in _RETRIED_STATUS else None


def not_a_listing_error(body: bytes, uri: str) -> TransientError:
    """Return the error for a successful response to a list request that holds something else, such as the page of a
    proxy or a login, or only a part of the listing."""
    start = " ".join(body[:80].decode(errors="replace").split())
    return TransientError(f"the response is not a complete listing (it begins with {start!r})", uri)


def no_etag_error(uri: str) -> TransientError:
    """Return the error for a successful response without an entity tag, which every service sends. A proxy or the page
    of a login may have answered."""
    return TransientError("the response is not the service's: it has no ETag", uri)


def unknown_length_error(uri: str) -> UnknownLengthError:
    """Return the error for a response without a length."""
    problem = "the response has no Content-Length, so it cannot be checked"
    return UnknownLengthError(problem, uri=uri, fix="Check the server, and any proxy before it")


def describe_connection_error(error: Exception) -> str:
    """Return in a few words why a connection of Python's own HTTP client failed."""
    return _find_cause(f"{error}" or type(error).__name__)


def _classify_malformed(text: str, uri: str) -> StoreError | TransientError | None:
    """Return voxlane's error for a response that the engine could not check, else None."""
    if _WRONG_RANGE.search(text):
        return TransientError(f"the response is not the requested range ({text.splitlines()[0]})", uri)
    if "Content-Length Header missing" in text:
        return unknown_length_error(uri)
    if _NOT_THE_SERVICES.search(text):
        return TransientError(f"the response is not the service's ({text.splitlines()[0][:200]})", uri)
    return None


def _is_connection_error(text: str) -> bool:
    return any(mark in text for mark in _CONNECTION_ERRORS)


def _find_cause(text: str) -> str:
    causes = (cause for mark, cause in _CONNECTION_CAUSES.items() if mark in text)
    return next(causes, text.splitlines()[0][-160:])

"""obstore's exceptions, translated once into ours.

The engine gives a type and a text; the text holds the HTTP status and, from S3 and GCS, the service's error code.
Types are matched by name, because a forked child has its own copy of the engine with classes of its own.
"""

from __future__ import annotations

import re

from voxlane import errors
from voxlane.errors import StoreError

ENGINE_ERRORS = frozenset(
    {
        "GenericError",
        "NotFoundError",
        "InvalidPathError",
        "JoinError",
        "NotSupportedError",
        "AlreadyExistsError",
        "PreconditionError",
        "NotModifiedError",
        "PermissionDeniedError",
        "UnauthenticatedError",
        "UnknownConfigurationKeyError",
        "BaseError",
    }
)
"""Every exception type of obstore; a test fails when the engine grows one that is not here."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_BAD_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthFailure"})
_NO_CREDENTIALS = (
    "169.254.169.254",  # the AWS and Azure metadata address: nothing else was found
    "metadata.google.internal",
    "Error getting credentials",
    "An error occurred getting credentials",
    "MissingCredentials",
    "InstanceCredential",
    "fetching AWS credentials",
    "performing token request",
    "performing GET request for managed identity",
)

LOGIN = {
    "gs": "Run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to a key file, "
    "or go without (StoreConfig(anonymous=True), --anonymous) for a public bucket",
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose an AWS_PROFILE, "
    "or go without (StoreConfig(anonymous=True), --anonymous) for a public bucket",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, run `az login`, "
    "or go without (StoreConfig(anonymous=True), --anonymous) for a public container",
}


class Transient(Exception):
    """A failure worth another attempt."""

    def __init__(self, what: str, uri: str) -> None:
        super().__init__(what)
        self.what = what
        self.uri = uri

    def final(self, attempts: int) -> errors.UnavailableError:
        """What to raise when there is no time left for another attempt."""
        return errors.UnavailableError(
            f"{self.what}, {attempts} attempt{'s' if attempts > 1 else ''}",
            uri=self.uri,
            fix="Check the network and the endpoint, then try again; StoreConfig.retry sets how long to insist",
        )


def is_foreign(error: BaseException) -> bool:
    """Whether `error` comes from the engine and needs translating."""
    return type(error).__name__ in ENGINE_ERRORS or isinstance(error, OSError | ValueError | NotImplementedError)


def is_lost_completion(error: BaseException) -> bool:
    """Whether the answer to the request that completes an upload may have been lost. The engine then asks again, and
    the upload is no longer there; or it drops the upload, and what we hear of is how that failed."""
    text = str(error)
    about_whole_upload = "complete multipart" in text or ("uploadId=" in text and "partNumber=" not in text)
    return about_whole_upload and ("NoSuchUpload" in text or _is_connection(text))


def translate(error: BaseException, uri: str) -> StoreError | Transient:
    """Our error for the engine's `error` met on `uri` (an object's URI, or a prefix's for listings)."""
    text = str(error)
    name = type(error).__name__
    scheme = uri.partition("://")[0]
    bucket = "/".join(uri.split("/", 3)[:3])
    status = int(match[1]) if (match := _STATUS.search(text)) else None
    code = match[1] if (match := _CODE.search(text)) else ""
    said = _said(text)

    if code == "NoSuchBucket" or "bucket does not exist" in text or code == "ContainerNotFound":
        return errors.BucketNotFoundError("no such bucket", uri=bucket, fix="Check its spelling, project and region")
    if any(mark in text for mark in _NO_CREDENTIALS):
        return errors.CredentialsError("no credentials were found", uri=uri, fix=LOGIN.get(scheme, ""))
    # os error 20: a file on the path is taken for a folder.
    if isinstance(error, FileNotFoundError) or name == "NotFoundError" or status == 404 or "os error 20" in text:
        return errors.NotFoundError(
            "no such object", uri=uri, fix="It may be misspelt, or was deleted after it was listed"
        )
    if status == 301 or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return errors.StoreError(f"wrong region{said}", uri=bucket, fix="Set StoreConfig(region=...) or AWS_REGION")
    if name == "UnauthenticatedError" or status == 401 or code in _BAD_KEYS:
        return errors.CredentialsError(f"the credentials were not accepted{said}", uri=uri, fix=LOGIN.get(scheme, ""))
    if name == "PermissionDeniedError" or status == 403 or isinstance(error, PermissionError) or "os error 13" in text:
        return errors.PermissionDeniedError(
            f"access denied{said}", uri=uri, fix="Ask for read (or write) permission on it, or use another identity"
        )
    if name == "AlreadyExistsError" or isinstance(error, FileExistsError):
        return errors.AlreadyExistsError("the object exists already", uri=uri, fix="Write another key, or overwrite it")
    if name in ("PreconditionError", "NotModifiedError") or status == 412:
        return errors.ChangedError("the object is not the expected version", uri=uri, fix="List or read it again")
    if status == 416 or "range" in text.lower()[:120]:
        return errors.RangeError("the range lies outside the object", uri=uri, fix="It may have changed: list it again")
    if name == "NotSupportedError" or status == 501 or isinstance(error, NotImplementedError):
        return errors.UnsupportedError(f"this store cannot do that{said}", uri=uri)
    if "No space left" in text or "os error 28" in text or "QuotaExceeded" in code:
        return errors.StoreError("no space left", uri=uri, fix="Free some, or raise the quota")
    if (
        isinstance(error, ValueError)
        or name == "InvalidPathError"
        or "illegal character" in text
        or "empty path" in text
    ):
        return errors.StoreError(
            f"a key that cannot be addressed: {text.splitlines()[0]}",
            uri=uri,
            fix="Keys need non-empty segments between slashes, without control characters; rename it or use "
            "a prefix without it",
        )
    if status in RETRIED_STATUS or (status is None and _is_connection(text)):
        what = f"the service answered {status}{said}" if status else f"the connection failed ({_cause(text)})"
        return Transient(what, uri)
    return errors.StoreError(f"{text.splitlines()[0]}", uri=uri)


def _said(text: str) -> str:
    parts = [match[1] for pattern in (_CODE, _MESSAGE) if (match := pattern.search(text))]
    return f" ({': '.join(parts)})" if parts else ""


def _is_connection(text: str) -> bool:
    return any(mark in text for mark in ("HTTP error", "HttpError", "error sending request", "reqwest", "timed out"))


def _cause(text: str) -> str:
    for mark, words in (
        ("Connection refused", "connection refused"),
        ("dns error", "the host name does not resolve"),
        ("operation timed out", "timed out"),
        ("TimedOut", "timed out"),
        ("kind: Timeout", "timed out"),
        ("IncompleteMessage", "cut off by the server"),
        ("ConnectionReset", "reset by the server"),
        ("decoding response body", "the body broke off"),
        ("certificate", "the server's certificate is not trusted"),
    ):
        if mark in text:
            return words
    return text.splitlines()[0][-160:]

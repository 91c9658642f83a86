"""Check the credentials and permissions of requests."""

from __future__ import annotations

from dataclasses import dataclass

from voxlane.testing.counters import Kind
from voxlane.testing.errors import RequestError
from voxlane.testing.request_parsing import ApiRequest, XmlDialect


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Credentials to require and permissions to deny. By default every request is accepted.

    Signatures are not verified: an S3 request is accepted when it names ``access_key_id``.
    """

    bearer_token: str | None = None
    """Token that GCS requests must have; others get 401."""
    access_key_id: str | None = None
    """Access key that S3 requests must be signed with; others get 403."""
    denied_permissions: frozenset[str] = frozenset()
    """GCS permission names, such as ``storage.objects.create``. ``testIamPermissions`` does not return
    them, and requests of any dialect that need one get 403."""

    anonymous_dialect: XmlDialect = "gcs"
    """Service that an XML request is meant for when it has no credentials and no header of either service, such as one
    of obstore with ``skip_signature``: ``"gcs"`` or ``"s3"``."""

    def __post_init__(self) -> None:
        if self.anonymous_dialect not in ("gcs", "s3"):
            raise ValueError(f"anonymous_dialect: expected 'gcs' or 's3', got {self.anonymous_dialect!r}")
        object.__setattr__(self, "denied_permissions", frozenset(self.denied_permissions))  # JSON has a list


_REQUIRED_PERMISSIONS: dict[Kind, str] = {
    "get": "storage.objects.get",
    "head": "storage.objects.get",
    "list": "storage.objects.list",
    "put": "storage.objects.create",
    "copy": "storage.objects.create",
    "compose": "storage.objects.create",
    "part": "storage.objects.create",
    "delete": "storage.objects.delete",
}


def check_access(access: Access, request: ApiRequest) -> None:
    """Raise 401 or 403 unless a request has the required credentials and permissions."""
    if access.bearer_token is not None or access.access_key_id is not None:
        _check_credentials(access, request)
    permission = _REQUIRED_PERMISSIONS.get(request.kind)
    if permission in access.denied_permissions:
        raise RequestError(403, "AccessDenied", f"The caller does not have {permission} access")


def _check_credentials(access: Access, request: ApiRequest) -> None:
    authorization = request.headers.get("Authorization", "")
    if request.dialect != "json" and not authorization and not _parse_access_key_id(authorization, request):
        # It may be meant for either service, so it is denied if either requires credentials.
        message = f"Anonymous caller does not have {_REQUIRED_PERMISSIONS.get(request.kind, 'storage')} access"
        raise RequestError(403, "AccessDenied", message)
    if request.dialect == "s3":
        if access.access_key_id is not None:
            _check_access_key(access.access_key_id, _parse_access_key_id(authorization, request))
    elif access.bearer_token is not None and authorization != f"Bearer {access.bearer_token}":
        message, reason = "Invalid Credentials", "authError"
        if not authorization:
            message, reason = "Anonymous caller does not have access", "required"
        head = 'WWW-Authenticate: Bearer realm="https://accounts.google.com/"\r\n'
        raise RequestError(401, "AuthenticationRequired", message, reason, head=head)


def _check_access_key(expected: str, access_key_id: str) -> None:
    if not access_key_id:
        raise RequestError(403, "AccessDenied", "Access Denied")
    if access_key_id != expected:
        message = "The AWS Access Key Id you provided does not exist in our records."
        raise RequestError(403, "InvalidAccessKeyId", message)


def _parse_access_key_id(authorization: str, request: ApiRequest) -> str:
    """Return the access key id from the header or the presigned query of an S3 request; empty if anonymous."""
    _, _, credential = authorization.partition("Credential=")
    # boto3 still presigns with version 2, which uses another name for the key.
    credential = credential or request.param("X-Amz-Credential")
    return credential.partition("/")[0] or request.param("AWSAccessKeyId")

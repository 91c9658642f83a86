"""Check the credentials and permissions of requests."""

from __future__ import annotations

from dataclasses import dataclass

from voxlane.testing.counters import Kind
from voxlane.testing.errors import RequestError
from voxlane.testing.request_parsing import ApiRequest


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

    def __post_init__(self) -> None:
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
    authorization = request.headers.get("Authorization", "")
    # An anonymous XML request may be meant for either service. If only a token is configured, it needs the token.
    if request.dialect == "s3" and (authorization or access.access_key_id or not access.bearer_token):
        if access.access_key_id is not None:
            _check_access_key(access.access_key_id, _parse_access_key_id(authorization, request))
    elif access.bearer_token is not None and authorization != f"Bearer {access.bearer_token}":
        message, reason = "Invalid Credentials", "authError"
        if not authorization:
            message, reason = "Anonymous caller does not have access", "required"
        head = 'WWW-Authenticate: Bearer realm="https://accounts.google.com/"\r\n'
        raise RequestError(401, "AuthenticationRequired", message, reason, head=head)
    permission = _REQUIRED_PERMISSIONS.get(request.kind)
    if permission in access.denied_permissions:
        raise RequestError(403, "AccessDenied", f"The caller does not have {permission} access")


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

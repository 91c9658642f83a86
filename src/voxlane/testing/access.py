"""Check the credentials and permissions of requests."""

from __future__ import annotations

from dataclasses import dataclass

from voxlane.testing.counters import Kind
from voxlane.testing.errors import RequestError


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


def check_permission(access: Access, kind: Kind) -> None:
    """Raise 403 when a request of this kind needs a permission that is denied."""
    permission = _REQUIRED_PERMISSIONS.get(kind)
    if permission in access.denied_permissions:
        raise RequestError(403, "AccessDenied", f"The caller does not have {permission} access")


def check_bearer(access: Access, authorization: str) -> None:
    """Raise 401 unless a GCS request carries the token."""
    if access.bearer_token is None or authorization == f"Bearer {access.bearer_token}":
        return
    if not authorization:
        raise RequestError(401, "AuthenticationRequired", "Anonymous caller does not have access", "required")
    raise RequestError(401, "AuthenticationRequired", "Invalid Credentials", "authError")


def check_access_key(access: Access, access_key_id: str) -> None:
    """Raise 403 unless an S3 request names the access key; "" is an anonymous request."""
    if access.access_key_id is None or access_key_id == access.access_key_id:
        return
    if not access_key_id:
        raise RequestError(403, "AccessDenied", "Access Denied")
    message = "The AWS Access Key Id you provided does not exist in our records."
    raise RequestError(403, "InvalidAccessKeyId", message)

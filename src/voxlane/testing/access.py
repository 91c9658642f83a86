"""Who may do what: credentials the emulator asks for and permissions it withholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from voxlane.testing.counters import Kind
from voxlane.testing.refusals import RefusedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Credentials to demand and permissions to deny. By default anything is accepted.

    Signatures are not verified: an S3 request is accepted when it names ``access_key_id``.
    """

    bearer_token: str | None = None
    """GCS requests must carry this token, or get 401."""
    access_key_id: str | None = None
    """S3 requests must be signed with this access key, or get 403."""
    denied_permissions: frozenset[str] = frozenset()
    """GCS permission names, such as ``storage.objects.create``. They are missing from ``testIamPermissions``,
    and requests of any dialect that need one get 403."""

    def to_json(self) -> dict[str, Any]:
        """A form that :func:`json.dumps` takes."""
        return asdict(self) | {"denied_permissions": sorted(self.denied_permissions)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Access:
        """The inverse of :meth:`to_json`."""
        return cls(**dict(data) | {"denied_permissions": frozenset(data.get("denied_permissions", ()))})


_NEEDS: dict[Kind, str] = {
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
    needed = _NEEDS.get(kind)
    if needed in access.denied_permissions:
        raise RefusedError(403, "AccessDenied", f"The caller does not have {needed} access", "forbidden")


def check_bearer(access: Access, authorization: str) -> None:
    """Raise 401 unless a GCS request carries the token."""
    if access.bearer_token is None or authorization == f"Bearer {access.bearer_token}":
        return
    if not authorization:
        raise RefusedError(401, "AuthenticationRequired", "Anonymous caller does not have access", "required")
    raise RefusedError(401, "AuthenticationRequired", "Invalid Credentials", "authError")


def check_access_key(access: Access, access_key_id: str) -> None:
    """Raise 403 unless an S3 request names the access key; "" is an anonymous request."""
    if access.access_key_id is None or access_key_id == access.access_key_id:
        return
    if not access_key_id:
        raise RefusedError(403, "AccessDenied", "Access Denied", "forbidden")
    message = "The AWS Access Key Id you provided does not exist in our records."
    raise RefusedError(403, "InvalidAccessKeyId", message, "forbidden")

"""Refuse what the emulator does not implement, by the name of the parameter, header or field.

A request that asks for more than the emulator does must not succeed as if it had not asked: a test that passes because
an encryption key or ``versions=true`` was ignored proves nothing about the service. docs/testing.md lists the scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from voxlane.testing import errors
from voxlane.testing.request_parsing import ApiRequest

_JSON_PARAMETERS = frozenset(
    {
        *("copySourceAcl", "destinationKmsKeyName", "destinationPredefinedAcl", "dropContextGroups"),
        *("enableObjectRetention", "filter", "includeTrailingDelimiter", "kmsKeyName", "matchGlob"),
        *("maxBytesRewrittenPerCall", "overrideUnlockedRetention", "predefinedAcl", "predefinedDefaultObjectAcl"),
        *("provisionalUserProject", "restoreToken", "returnPartialSuccess", "rewriteToken", "softDeleted"),
        "userProject",
    }
)
"""Documented parameters of the JSON API that the emulator does not implement."""
_XML_PARAMETERS = frozenset(
    {
        # Parts of an object.
        *("acl", "attributes", "compose", "encryption", "legal-hold", "object-lock", "partNumber", "renameObject"),
        *("restore", "retention", "select", "tagging", "torrent", "versionId"),
        *("response-cache-control", "response-content-disposition", "response-content-encoding"),
        *("response-content-language", "response-content-type", "response-expires"),
        # Parts of a bucket.
        *("accelerate", "analytics", "billing", "cors", "defaultObjectAcl", "encryptionConfig", "intelligent-tiering"),
        *("inventory", "lifecycle", "logging", "metadataTable", "metrics", "notification", "ownershipControls"),
        *("policy", "policyStatus", "publicAccessBlock", "replication", "requestPayment", "session", "storageClass"),
        *("versions", "website", "websiteConfig"),
        # Listings.
        *("fetch-owner", "generation-marker", "key-marker", "version-id-marker"),
    }
)
"""Documented parameters and subresources of the XML dialects that the emulator does not implement."""
_PARAMETERS_BY_OPERATION = {
    "bucket_list": frozenset({"maxResults", "pageToken"}),
    "bucket_uploads": frozenset({"delimiter", "key-marker", "max-uploads", "upload-id-marker"}),
    "create_bucket": frozenset({"location", "versioning"}),
    "delete_bucket": frozenset({"location", "versioning"}),
}
"""Documented parameters that the emulator implements for other operations only."""
_PARTS = frozenset({"part", "part_copy"})
"""Operations with the parameter partNumber, which selects a part of an object in others."""
_HARMLESS_VALUES: dict[str, tuple[str, ...]] = {
    "projection": ("noacl", "full"),
    "softDeleted": ("false",),
    "includeTrailingDelimiter": ("false",),
    "enableObjectRetention": ("false",),
    "predefinedAcl": ("private", "projectprivate", "bucketownerfullcontrol"),
    "predefinedDefaultObjectAcl": ("private", "projectprivate", "bucketownerfullcontrol"),
    "fetch-owner": ("false",),
    "versionId": ("null",),
    "x-amz-acl": ("private", "bucket-owner-full-control"),
    "x-goog-acl": ("private", "project-private", "bucket-owner-full-control"),
    "x-amz-tagging-directive": ("copy",),
    "x-amz-bucket-object-lock-enabled": ("false",),
    "x-amz-server-side-encryption": ("aes256",),
}
"""Values, in lower case, of other parameters and headers that ask for nothing."""
_HEADERS = frozenset(
    {
        # Signing, telemetry and transfer, which do not concern objects.
        *("x-amz-date", "x-amz-content-sha256", "x-amz-security-token", "x-amz-user-agent", "x-amz-te"),
        *("x-amz-decoded-content-length", "x-amz-trailer", "x-amz-expected-bucket-owner", "x-amz-api-version"),
        *("x-goog-date", "x-goog-content-sha256", "x-goog-api-client", "x-goog-user-project", "x-goog-project-id"),
        *("x-goog-request-params", "x-goog-gcs-idempotency-token", "x-goog-api-version"),
        # Implemented.
        *("x-amz-storage-class", "x-amz-metadata-directive", "x-amz-copy-source", "x-amz-copy-source-range"),
        *("x-goog-storage-class", "x-goog-metadata-directive", "x-goog-copy-source", "x-goog-copy-source-range"),
        *("x-goog-copy-source-generation", "x-goog-hash"),
        *(f"x-goog-copy-source-if-{name}" for name in ("generation-match", "match", "none-match")),
        *(f"x-amz-copy-source-if-{name}" for name in ("match", "none-match")),
        *(f"x-goog-if-{meta}generation{no}-match" for meta in ("", "meta") for no in ("", "-not")),
    }
)
_HEADER_PREFIXES = ("x-amz-meta-", "x-goog-meta-", "x-amz-checksum-", "x-amz-sdk-checksum-")
"""Prefixes of further headers; checksums of S3 are accepted, but not stored and not verified."""

OBJECT_REFUSED = frozenset(
    {
        *("acl", "contexts", "customTime", "customerEncryption", "eventBasedHold", "kmsKeyName", "retention"),
        "temporaryHold",
    }
)
"""Fields of an object resource that the emulator does not implement."""
BUCKET_REFUSED = frozenset(
    {
        *("acl", "autoclass", "billing", "cors", "customPlacementConfig", "defaultEventBasedHold", "encryption"),
        *("defaultObjectAcl", "hierarchicalNamespace", "ipFilter", "lifecycle", "logging", "objectRetention"),
        *("retentionPolicy", "rpo", "softDeletePolicy", "versioning", "website"),
    }
)
"""Fields of a bucket resource that the emulator does not implement."""


def check_scope(request: ApiRequest) -> None:
    """Raise 501 if a request has a parameter or a header that the emulator does not implement."""
    if request.query:
        refused = _JSON_PARAMETERS if request.dialect == "json" else _XML_PARAMETERS
        # The services ignore parameters that they do not know, and tensorstore sends some.
        for name in request.query:
            if name in refused or name in _PARAMETERS_BY_OPERATION.get(request.op, ()):
                _refuse("the query parameter", name, request.param(name), request.op)
    for name in request.headers:
        # Most headers begin with another letter, and reads have no time for more than that comparison.
        if name[0] in "xX" and _is_refused_header(name):
            _refuse("the header", name.lower(), request.headers[name], request.op)


@lru_cache(maxsize=4096)
def _is_refused_header(name: str) -> bool:
    lower = name.lower()
    if lower in _HEADERS or lower.startswith(_HEADER_PREFIXES):
        return False
    return lower.startswith(("x-amz-", "x-goog-"))


def check_fields(resource: Mapping[str, Any], refused: Iterable[str]) -> None:
    """Raise 501 if a JSON resource sets one of the fields in ``refused``; empty values and false set nothing."""
    for name in refused:
        value = resource.get(name)
        # Clients that send a complete resource send switches like {"enabled": false}.
        if value and value != {"enabled": False}:
            raise errors.not_implemented(f"the field {name}")


def _refuse(description: str, name: str, value: str, op: str) -> None:
    if value.lower() in _HARMLESS_VALUES.get(name, ()) or (name == "partNumber" and op in _PARTS):
        return
    raise errors.not_implemented(f"{description} {name}")  # not its value, which may be a key

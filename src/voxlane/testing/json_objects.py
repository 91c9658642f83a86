"""Render object resources of the JSON API quickly: a page of a listing has a thousand of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from voxlane.testing.objects import Bucket, StoredObject, SyntheticFill
from voxlane.testing.responses import OBJECT_FIELDS, format_iso_date

_UNSAFE = re.compile("[^A-Za-z0-9_.~/-]")
# Placeholders for a name in a template. The first cannot be in JSON text, where control characters are escaped;
# the second cannot be in a quoted name or anywhere else in a resource.
_NAME, _NAME_ESCAPED, _QUOTED = "\x00", "\\u0000", "<quoted>"


def parse_fields(fields: str) -> tuple[set[str] | None, tuple[str, ...] | None]:
    """Parse the ``fields`` parameter of a listing into (members of the page, members of field item).

    None means all. Understands ``items(name,size),nextPageToken`` and ``items/name``; like the service, a
    listing whose fields leave out nextPageToken gets none.
    """
    if not fields or "*" in fields:
        return None, None
    top: set[str] = set()
    items: list[str] = []
    for name, group in re.findall(r"([A-Za-z0-9_/]+)(?:\(([^()]*)\))?", fields):
        head, _, tail = name.partition("/")
        top.add(head)
        if head == "items":
            items.extend(field.strip() for field in group.split(",") if field.strip())
            items.extend([tail] if tail else [])
    return top, tuple(items) or None


class ResourceRenderer:
    """Render object resources with links to a server."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def resource(self, bucket: str, stored: StoredObject, fields: Collection[str] | None = None) -> str:
        """Return the resource of an object as JSON text, cached in the object."""
        cache_key = f"json {bucket} {fields}"
        rendered = stored.rendered.get(cache_key)
        if rendered is None:
            members = self._members(bucket, stored, fields)
            rendered = stored.rendered[cache_key] = json.dumps(members, ensure_ascii=False)
        return rendered

    def items(self, bucket: Bucket, keys: Sequence[str], fields: Collection[str] | None) -> Iterable[str]:
        """Return the resources of a page of keys, restricted to ``fields`` unless that is None."""
        templates: dict[SyntheticFill, list[str]] = {}
        # Checked once per page, because hardly any page needs escaping.
        plain = not _UNSAFE.search("".join(keys))
        rows: list[str] = []
        for key in keys:
            entry = bucket.entry(key)
            if isinstance(entry, StoredObject):
                rows.append(self.resource(bucket.name, entry, fields))
                continue
            template = templates.get(entry)
            if template is None:
                template = templates[entry] = self._template(bucket.name, entry, fields)
            name = key if plain else json.dumps(key, ensure_ascii=False)[1:-1]
            quoted = key.replace("/", "%2F") if plain else quote(key, safe="")
            rows.append(quoted.join(template).replace(_NAME, name))
        return rows

    def _template(self, bucket: str, fill: SyntheticFill, fields: Collection[str] | None) -> list[str]:
        """Return the resource of a fill, split where the quoted name belongs; ``_NAME`` marks the plain name."""
        members = self._members(bucket, fill.stored("k"), fields, name=_NAME, quoted=_QUOTED)
        return json.dumps(members).replace(_NAME_ESCAPED, _NAME).split(_QUOTED)

    def _members(
        self, bucket: str, stored: StoredObject, fields: Collection[str] | None, name: str = "", quoted: str = ""
    ) -> dict[str, Any]:
        name = name or stored.key
        quoted = quoted or quote(stored.key, safe="")
        path = f"storage/v1/b/{quote(bucket, safe='')}/o/{quoted}"
        created, updated = format_iso_date(stored.created_s), format_iso_date(stored.updated_s)
        members: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{stored.generation}",
            "selfLink": f"{self._base_url}/{path}",
            "mediaLink": f"{self._base_url}/download/{path}?generation={stored.generation}&alt=media",
            "name": name,
            "bucket": bucket,
            "generation": str(stored.generation),
            "metageneration": str(stored.metageneration),
            "contentType": stored.content_type,
            "storageClass": "STANDARD",
            "size": str(stored.body.size),
            "etag": stored.json_etag,
            "timeCreated": created,
            "updated": updated,
            "timeStorageClassUpdated": created,
            "timeFinalized": created,
        }
        for algorithm, value in stored.hashes().items():
            members["md5Hash" if algorithm == "md5" else algorithm] = value
        if stored.component_count is not None:
            members["componentCount"] = stored.component_count
        if stored.metadata:
            members["metadata"] = stored.metadata
        for field_name, header in OBJECT_FIELDS.items():
            if header in stored.headers:
                members[field_name] = stored.headers[header]
        return members if fields is None else {key: value for key, value in members.items() if key in fields}

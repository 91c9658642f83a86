"""Object resources of the JSON API, written quickly: a page of a listing holds a thousand of them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from voxlane.testing.objects import Bucket, Fill, Stored, json_etag
from voxlane.testing.replies import iso_date

KEPT_FIELDS = {
    "contentType": "Content-Type",
    "contentEncoding": "Content-Encoding",
    "contentDisposition": "Content-Disposition",
    "contentLanguage": "Content-Language",
    "cacheControl": "Cache-Control",
}
_UNSAFE = re.compile("[^A-Za-z0-9_.~/-]")
# They stand for a name in a template. The first cannot be in JSON text, where control characters are escaped;
# the second cannot be in a quoted name or anywhere else in a resource.
_NAME, _NAME_ESCAPED, _QUOTED = "\x00", "\\u0000", "<quoted>"


def wanted_fields(fields: str) -> tuple[set[str] | None, tuple[str, ...] | None]:
    """What a ``fields`` parameter of a listing selects: (members of the page, members of each item).

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
            items.extend(each.strip() for each in group.split(",") if each.strip())
            items.extend([tail] if tail else [])
    return top, tuple(items) or None


class Renderer:
    """Writes object resources with links to one server."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def resource(self, bucket: str, stored: Stored) -> str:
        """The resource of one object as JSON text, kept with the object."""
        found = stored.rendered.get("json " + bucket)
        if found is None:
            found = stored.rendered["json " + bucket] = json.dumps(self._members(bucket, stored), ensure_ascii=False)
        return found

    def items(self, bucket: Bucket, keys: Sequence[str], fields: Collection[str] | None) -> Iterable[str]:
        """The resources of a page of keys, each cut down to ``fields`` unless None."""
        templates: dict[Fill, list[str]] = {}
        # Looked at once for the page, because nearly every page needs no escaping.
        plain = not _UNSAFE.search("".join(keys))
        rows: list[str] = []
        for key in keys:
            held = bucket.entry(key)
            if isinstance(held, Stored):
                rows.append(self._item(bucket.name, held, fields))
                continue
            template = templates.get(held)
            if template is None:
                template = templates[held] = self._template(bucket.name, held, fields)
            name = key if plain else json.dumps(key, ensure_ascii=False)[1:-1]
            quoted = key.replace("/", "%2F") if plain else quote(key, safe="")
            rows.append(quoted.join(template).replace(_NAME, name))
        return rows

    def _item(self, bucket: str, stored: Stored, fields: Collection[str] | None) -> str:
        if fields is None:
            return self.resource(bucket, stored)
        cached = f"json {bucket} {fields}"
        found = stored.rendered.get(cached)
        if found is None:
            members = self._members(bucket, stored)
            chosen = {name: value for name, value in members.items() if name in fields}
            found = stored.rendered[cached] = json.dumps(chosen, ensure_ascii=False)
        return found

    def _template(self, bucket: str, fill: Fill, fields: Collection[str] | None) -> list[str]:
        """A resource of the fill, split where the quoted name goes; ``_NAME`` marks where the plain name
        goes."""
        members = self._members(bucket, fill.stored("k"), name=_NAME, quoted=_QUOTED)
        if fields is not None:
            members = {name: value for name, value in members.items() if name in fields}
        return json.dumps(members).replace(_NAME_ESCAPED, _NAME).split(_QUOTED)

    def _members(self, bucket: str, stored: Stored, name: str = "", quoted: str = "") -> dict[str, Any]:
        name = name or stored.key
        quoted = quoted or quote(stored.key, safe="")
        path = f"storage/v1/b/{quote(bucket, safe='')}/o/{quoted}"
        created, updated = iso_date(stored.created_s), iso_date(stored.updated_s)
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
            "etag": json_etag(stored.generation, stored.metageneration),
            "timeCreated": created,
            "updated": updated,
            "timeStorageClassUpdated": created,
            "timeFinalized": created,
        }
        if (crc32c := stored.crc32c()) is not None:
            members["crc32c"] = crc32c
        if stored.md5 is not None:
            members["md5Hash"] = base64.b64encode(stored.md5).decode()
        if stored.component_count is not None:
            members["componentCount"] = stored.component_count
        if stored.metadata:
            members["metadata"] = stored.metadata
        for field_name, header in KEPT_FIELDS.items():
            if header in stored.headers:
                members[field_name] = stored.headers[header]
        return members

"""The XML dialects: S3 REST, and the XML API of Google Cloud Storage, which grew from the same root.

They share paths, verbs and documents. Where they differ (header names, generations, entity tags of multipart
objects), the dialect of the call decides.
"""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from voxlane.testing import refusals
from voxlane.testing.bodies import Blob, Body
from voxlane.testing.calls import Call
from voxlane.testing.listing import after, after_prefix, plan_page, start_of, token_of
from voxlane.testing.objects import (
    NO_PRECONDITIONS,
    Bucket,
    Fill,
    Objects,
    Part,
    Preconditions,
    Stored,
    Upload,
)
from voxlane.testing.refusals import RefusedError
from voxlane.testing.replies import (
    Reply,
    date_seconds,
    header_lines,
    http_date,
    iso_date,
    kept_headers,
    prefixed,
    wanted_range,
)

_NAMESPACE = {
    "s3": "http://s3.amazonaws.com/doc/2006-03-01/",
    "gcs": "http://doc.s3.amazonaws.com/2006-03-01",
}
_XML_HEAD = "Content-Type: application/xml\r\n"
_UNSAFE_IN_XML = re.compile("[&<>\\x00-\\x1f\\x7f]")
_UNSAFE_IN_URL = re.compile("[^A-Za-z0-9_.~/-]")
_MAX_KEYS = 1000
_CONDITION_HEADERS = ("If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since")


def document(root: str, content: str, dialect: str = "s3", status: int = 200, head: str = "") -> Reply:
    """An XML answer."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE[dialect]}">{content}</{root}>'
    return Reply(status, _XML_HEAD + head, [text.encode()])


def error_reply(refused: RefusedError, call: Call) -> Reply:
    """The answer to a refused request."""
    head = ""
    if refused.status == 416:
        head = f"Content-Range: bytes */{refused.message.rsplit(' ', 2)[1]}\r\n"
    if refused.status == 304:
        return Reply(304, head)
    if refused.status == 401:
        head = 'WWW-Authenticate: Bearer realm="https://accounts.google.com/"\r\n'
    resource = f"/{call.bucket}/{call.key}" if call.bucket else "/"
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{refused.code}</Code><Message>{_text(refused.message)}</Message>"
        f"<Resource>{_text(resource)}</Resource><RequestId>EMULATOR</RequestId></Error>"
    ).encode()
    if call.method == "HEAD":
        return Reply(refused.status, _XML_HEAD + head, length=0)
    return Reply(refused.status, _XML_HEAD + head, [text])


def _text(value: str) -> str:
    """Text inside an element. Control characters become references, which lenient readers take."""
    if not _UNSAFE_IN_XML.search(value):
        return value
    return re.sub("[\\x00-\\x1f\\x7f]", lambda match: f"&#x{ord(match[0]):x};", escape(value))


class XmlApi:
    """Answers calls of the dialects ``s3`` and ``gcs``."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._ops: dict[str, Callable[[Call], Reply]] = {
            "get": self._get,
            "head": self._head,
            "put": self._put,
            "delete": self._delete,
            "copy": self._copy,
            "list_objects": self._list_objects,
            "delete_many": self._delete_many,
            "initiate": self._initiate,
            "part": self._part,
            "part_copy": self._part_copy,
            "complete": self._complete,
            "abort": self._abort,
            "list_parts": self._list_parts,
            "bucket_uploads": self._list_uploads,
            "bucket_location": self._location,
            "bucket_versioning": self._versioning,
            "list_buckets": self._list_buckets,
            "create_bucket": self._create_bucket,
            "head_bucket": self._head_bucket,
            "delete_bucket": self._delete_bucket,
        }

    def answer(self, call: Call) -> Reply:
        """Carry out a call; raises :class:`RefusedError`."""
        op = self._ops.get(call.op)
        if op is None:
            raise RefusedError(405, "MethodNotAllowed", f"{call.method} is not supported here", "methodNotAllowed")
        return op(call)

    # Objects

    def _get(self, call: Call) -> Reply:
        stored = self._readable(call)
        size = stored.body.size
        span = wanted_range(call.headers.get("Range"), size)
        if span is None:
            return Reply(200, _object_head(stored, call.dialect), stored.body.slices(0, size), size)
        start, stop = span
        head = f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n{_object_head(stored, call.dialect)}"
        return Reply(206, head, stored.body.slices(start, stop), stop - start)

    def _head(self, call: Call) -> Reply:
        stored = self._readable(call)
        return Reply(200, _object_head(stored, call.dialect), length=stored.body.size)

    def _readable(self, call: Call) -> Stored:
        stored = self._objects.need(call.bucket).need(call.key)
        wanted = call.arg("generation")
        if wanted and wanted != str(stored.generation):
            raise refusals.no_such_key(call.bucket, call.key)
        conditions = _conditions(call)
        if conditions is not NO_PRECONDITIONS:
            conditions.check_read(stored, stored.etag)
        return stored

    def _put(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        _check_write(call, bucket.find(call.key))
        _check_digests(call)
        stored = self._objects.stored(
            call.key,
            Blob(call.body),
            call.md5(),
            headers=kept_headers(call.headers),
            metadata=_metadata(call),
        )
        bucket.put(stored)
        return Reply(200, _written_head(stored, call.dialect))

    def _delete(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        stored = bucket.find(call.key)
        if stored is None and call.dialect == "gcs":
            raise refusals.no_such_key(call.bucket, call.key)
        _check_write(call, stored)
        if stored is not None:
            bucket.remove(call.key)
        return Reply(204)

    def _copy(self, call: Call) -> Reply:
        source = self._copy_source(call)
        bucket = self._objects.need(call.bucket)
        _check_write(call, bucket.find(call.key))
        headers, metadata = dict(source.headers), dict(source.metadata)
        directive = call.headers.get("x-amz-metadata-directive") or call.headers.get("x-goog-metadata-directive")
        if directive and directive.upper() == "REPLACE":
            headers, metadata = kept_headers(call.headers), _metadata(call)
        stored = self._objects.stored(call.key, source.body, source.md5, headers=headers, metadata=metadata)
        stored.has_crc32c = source.has_crc32c
        bucket.put(stored)
        content = f"<LastModified>{iso_date(stored.created_s)}</LastModified><ETag>{_text(stored.etag)}</ETag>"
        return document("CopyObjectResult", content, call.dialect, head=_written_head(stored, call.dialect))

    def _copy_source(self, call: Call) -> Stored:
        text = call.headers.get("x-amz-copy-source") or call.headers["x-goog-copy-source"]
        bucket, _, key = unquote(text.partition("?versionId=")[0].removeprefix("/")).partition("/")
        source = self._objects.need(bucket).need(key)
        start = "x-goog-copy-source-if-" if call.dialect == "gcs" else "x-amz-copy-source-if-"
        Preconditions(
            generation=_number(call.headers.get(start + "generation-match")),
            etags=call.headers.get(start + "match"),
        ).check_read(source, source.etag)
        unwanted = call.headers.get(start + "none-match")
        if unwanted is not None:
            # On a copy a match is a failed precondition, not "not modified".
            Preconditions(not_etags=unwanted).check_write(source, source.etag)
        return source

    def _delete_many(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        root = _parsed(call.body)
        quiet = (_child(root, "Quiet") or "").lower() == "true"
        rows: list[str] = []
        for each in _children(root, "Object"):
            key = _child(each, "Key") or ""
            if bucket.find(key) is not None:
                bucket.remove(key)
            if not quiet:
                rows.append(f"<Deleted><Key>{_text(key)}</Key></Deleted>")
        return document("DeleteResult", "".join(rows), call.dialect)

    # Listings

    def _list_objects(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        v2 = call.arg("list-type") == "2"
        prefix, delimiter = call.arg("prefix"), call.arg("delimiter")
        token, marker = call.arg("continuation-token"), call.arg("start-after" if v2 else "marker")
        start = _listing_start(token, marker, "" if v2 else delimiter)
        limit = min(_limit(call.arg("max-keys")), _MAX_KEYS)
        page = plan_page(bucket.keys(), prefix=prefix, delimiter=delimiter, start=start, end=None, limit=limit)
        encoded = call.arg("encoding-type") == "url"
        encode = quote if encoded else _text
        head = [
            f"<Name>{_text(call.bucket)}</Name><Prefix>{encode(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>",
            f"<Delimiter>{encode(delimiter)}</Delimiter>" if delimiter else "",
            "<EncodingType>url</EncodingType>" if encoded else "",
            f"<IsTruncated>{'false' if page.resume is None else 'true'}</IsTruncated>",
        ]
        if v2:
            head.append(f"<KeyCount>{len(page.keys) + len(page.prefixes)}</KeyCount>")
            head.append(f"<ContinuationToken>{_text(token)}</ContinuationToken>" if token else "")
            head.append(f"<StartAfter>{encode(marker)}</StartAfter>" if marker else "")
            if page.resume is not None:
                head.append(f"<NextContinuationToken>{token_of(page.resume)}</NextContinuationToken>")
        else:
            head.append(f"<Marker>{encode(marker)}</Marker>")
            if page.resume is not None:
                head.append(f"<NextMarker>{encode(page.last)}</NextMarker>")
        rows = _rows(bucket, page.keys, call.dialect, encoded)
        rolled = [f"<CommonPrefixes><Prefix>{encode(each)}</Prefix></CommonPrefixes>" for each in page.prefixes]
        return document("ListBucketResult", "".join(head) + "".join(rows) + "".join(rolled), call.dialect)

    def _list_buckets(self, call: Call) -> Reply:
        rows = "".join(
            f"<Bucket><Name>{_text(bucket.name)}</Name>"
            f"<CreationDate>{iso_date(bucket.created_s)}</CreationDate></Bucket>"
            for _, bucket in sorted(self._objects.buckets.items())
        )
        owner = "<Owner><ID>emulator</ID><DisplayName>emulator</DisplayName></Owner>"
        return document("ListAllMyBucketsResult", f"{owner}<Buckets>{rows}</Buckets>", call.dialect)

    # Multipart uploads

    def _initiate(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        upload = self._objects.start_upload(bucket, call.key, kept_headers(call.headers), _metadata(call))
        return document("InitiateMultipartUploadResult", _upload_names(call, upload), call.dialect)

    def _part(self, call: Call) -> Reply:
        upload = self._objects.need(call.bucket).need_upload(call.arg("uploadId"), call.key)
        _check_digests(call)
        # GCS objects made of parts have no MD5, so their parts need none either; it would cost half of the
        # server's time during an upload.
        md5 = call.md5() if call.dialect == "s3" else None
        part = self._add_part(upload.parts, call, Blob(call.body), md5)
        return Reply(200, f"ETag: {part.etag}\r\n")

    def _part_copy(self, call: Call) -> Reply:
        upload = self._objects.need(call.bucket).need_upload(call.arg("uploadId"), call.key)
        source = self._copy_source(call)
        asked = call.headers.get("x-amz-copy-source-range") or call.headers.get("x-goog-copy-source-range")
        start, stop = wanted_range(asked, source.body.size) or (0, source.body.size)
        data = b"".join(source.body.slices(start, stop))
        call.body = data
        part = self._add_part(upload.parts, call, Blob(data), call.md5())
        content = f"<LastModified>{iso_date(part.created_s)}</LastModified><ETag>{_text(part.etag)}</ETag>"
        return document("CopyPartResult", content, call.dialect)

    def _add_part(self, parts: dict[int, Part], call: Call, body: Body, md5: bytes | None) -> Part:
        number = _number(call.arg("partNumber"))
        if number is None or not 1 <= number <= 10_000:
            raise refusals.invalid("Part number must be an integer between 1 and 10000, inclusive")
        generation = self._objects.next_generation()
        etag = f'"{md5.hex()}"' if md5 is not None else f'"part-{generation:x}"'
        part = parts[number] = Part(body, etag, md5, generation / 1e6)
        return part

    def _complete(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        upload = bucket.need_upload(call.arg("uploadId"), call.key)
        _check_write(call, bucket.find(call.key))
        wanted = [
            (int(_child(each, "PartNumber") or 0), _child(each, "ETag") or "")
            for each in _children(_parsed(call.body), "Part")
        ]
        stored = self._objects.finish_upload(bucket, upload, wanted, s3_etag=call.dialect == "s3")
        content = (
            f"<Location>/{_text(call.bucket)}/{_text(call.key)}</Location><Bucket>{_text(call.bucket)}</Bucket>"
            f"<Key>{_text(call.key)}</Key><ETag>{_text(stored.etag)}</ETag>"
        )
        return document(
            "CompleteMultipartUploadResult", content, call.dialect, head=_version_head(stored, call.dialect)
        )

    def _abort(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        del bucket.uploads[bucket.need_upload(call.arg("uploadId"), call.key).upload_id]
        return Reply(204)

    def _list_parts(self, call: Call) -> Reply:
        upload = self._objects.need(call.bucket).need_upload(call.arg("uploadId"), call.key)
        limit = min(_limit(call.arg("max-parts")), _MAX_KEYS)
        numbers = sorted(number for number in upload.parts if number > (_number(call.arg("part-number-marker")) or 0))
        shown = numbers[:limit]
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><LastModified>{iso_date(part.created_s)}</LastModified>"
            f"<ETag>{_text(part.etag)}</ETag><Size>{part.body.size}</Size></Part>"
            for number, part in ((number, upload.parts[number]) for number in shown)
        )
        content = (
            f"{_upload_names(call, upload)}<MaxParts>{limit}</MaxParts>"
            f"<IsTruncated>{'true' if len(numbers) > limit else 'false'}</IsTruncated>"
            f"<NextPartNumberMarker>{shown[-1] if shown else 0}</NextPartNumberMarker>{rows}"
        )
        return document("ListPartsResult", content, call.dialect)

    def _list_uploads(self, call: Call) -> Reply:
        bucket = self._objects.need(call.bucket)
        found = sorted(
            (upload for upload in bucket.uploads.values() if upload.key.startswith(call.arg("prefix"))),
            key=lambda upload: (upload.key, upload.started_s),
        )
        encoded = call.arg("encoding-type") == "url"
        encode = quote if encoded else _text
        rows = "".join(
            f"<Upload><Key>{encode(upload.key)}</Key><UploadId>{upload.upload_id}</UploadId>"
            f"<Initiated>{iso_date(upload.started_s)}</Initiated></Upload>"
            for upload in found
        )
        encoding = "<EncodingType>url</EncodingType>" if encoded else ""
        content = f"<Bucket>{_text(call.bucket)}</Bucket>{encoding}<IsTruncated>false</IsTruncated>{rows}"
        return document("ListMultipartUploadsResult", content, call.dialect)

    # Buckets

    def _create_bucket(self, call: Call) -> Reply:
        if call.bucket in self._objects.buckets:
            raise RefusedError(409, "BucketAlreadyOwnedByYou", "You already own this bucket", "conflict")
        self._objects.create(call.bucket)
        return Reply(200, f"Location: /{quote(call.bucket)}\r\n")

    def _head_bucket(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        return Reply(200, "x-amz-bucket-region: us-east-1\r\n")

    def _delete_bucket(self, call: Call) -> Reply:
        if len(self._objects.need(call.bucket)):
            raise RefusedError(409, "BucketNotEmpty", "The bucket you tried to delete is not empty", "conflict")
        del self._objects.buckets[call.bucket]
        return Reply(204)

    def _location(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        return document("LocationConstraint", "", call.dialect)

    def _versioning(self, call: Call) -> Reply:
        self._objects.need(call.bucket)
        return document("VersioningConfiguration", "", call.dialect)


# Reading calls


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise refusals.invalid(f"Not a number: {text}")
    return int(text)


def _limit(text: str) -> int:
    number = _number(text)
    return _MAX_KEYS if number is None else number


def _listing_start(token: str, marker: str, delimiter: str) -> str:
    """Where a page begins, inclusive. ``delimiter`` is given for V1, whose marker may name a rolled-up
    prefix."""
    if token:
        try:
            return start_of(token)
        except ValueError:
            raise refusals.invalid("The continuation token provided is incorrect") from None
    if delimiter and marker.endswith(delimiter):
        return after_prefix(marker) or after(marker)
    return after(marker) if marker else ""


def _conditions(call: Call) -> Preconditions:
    headers = call.headers
    if call.dialect == "s3" and not any(name in headers for name in _CONDITION_HEADERS):
        return NO_PRECONDITIONS
    conditions = Preconditions(
        etags=headers.get("If-Match"),
        not_etags=headers.get("If-None-Match"),
        modified_since_s=date_seconds(headers.get("If-Modified-Since")),
        unmodified_since_s=date_seconds(headers.get("If-Unmodified-Since")),
    )
    if call.dialect == "s3":
        return conditions
    return conditions._replace(
        generation=_number(headers.get("x-goog-if-generation-match")),
        not_generation=_number(headers.get("x-goog-if-generation-not-match")),
        metageneration=_number(headers.get("x-goog-if-metageneration-match")),
        not_metageneration=_number(headers.get("x-goog-if-metageneration-not-match")),
    )


def _check_write(call: Call, stored: Stored | None) -> None:
    _conditions(call).check_write(stored, stored.etag if stored else "")


def _check_digests(call: Call) -> None:
    """Refuse a body that differs from the MD5 or CRC32C its sender gives."""
    sent = call.headers.get("Content-MD5")
    if sent is not None and sent != base64.b64encode(call.md5()).decode():
        raise refusals.invalid("The Content-MD5 you specified did not match what we received", "BadDigest")
    for each in call.headers.get("x-goog-hash", "").split(","):
        name, _, value = each.strip().partition("=")
        if name == "md5" and value != base64.b64encode(call.md5()).decode():
            raise refusals.invalid("The MD5 you specified did not match what we received", "BadDigest")


def _metadata(call: Call) -> dict[str, str]:
    return prefixed(call.headers, "x-goog-meta-" if call.dialect == "gcs" else "x-amz-meta-")


def _parsed(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise refusals.invalid("The XML you provided was not well-formed", "MalformedXML") from None


def _children(root: ElementTree.Element, name: str) -> Iterable[ElementTree.Element]:
    # Clients differ in whether they give a namespace, so only the local name counts.
    return (each for each in root if each.tag.rpartition("}")[2] == name)


def _child(root: ElementTree.Element, name: str) -> str | None:
    return next((each.text for each in _children(root, name)), None)


# Writing answers


def _object_head(stored: Stored, dialect: str) -> str:
    """The headers that describe an object, the same for GET and HEAD."""
    found = stored.rendered.get(dialect + " head")
    if found is None:
        found = stored.rendered[dialect + " head"] = (
            f"ETag: {stored.etag}\r\nLast-Modified: {http_date(stored.updated_s)}\r\nAccept-Ranges: bytes\r\n"
            + header_lines({"Content-Type": stored.content_type} | stored.headers)
            + header_lines(stored.metadata, "x-goog-meta-" if dialect == "gcs" else "x-amz-meta-")
            + _version_head(stored, dialect)
        )
    return found


def _upload_names(call: Call, upload: Upload) -> str:
    bucket, key = _text(call.bucket), _text(call.key)
    return f"<Bucket>{bucket}</Bucket><Key>{key}</Key><UploadId>{upload.upload_id}</UploadId>"


def _written_head(stored: Stored, dialect: str) -> str:
    return f"ETag: {stored.etag}\r\n{_version_head(stored, dialect)}"


def _version_head(stored: Stored, dialect: str) -> str:
    if dialect == "s3":
        return "x-amz-request-id: EMULATOR\r\n"
    crc32c = stored.crc32c()
    lines = [
        f"x-goog-generation: {stored.generation}\r\nx-goog-metageneration: {stored.metageneration}\r\n",
        f"x-goog-stored-content-length: {stored.body.size}\r\nx-goog-storage-class: STANDARD\r\n",
    ]
    if crc32c is not None:
        lines.append(f"x-goog-hash: crc32c={crc32c}\r\n")
    if stored.md5 is not None:
        lines.append(f"x-goog-hash: md5={base64.b64encode(stored.md5).decode()}\r\n")
    if stored.component_count is not None:
        lines.append(f"x-goog-component-count: {stored.component_count}\r\n")
    return "".join(lines)


def _rows(bucket: Bucket, keys: Sequence[str], dialect: str, encoded: bool) -> list[str]:
    """A Contents element for each key. The whole page is checked for characters to escape, not each key."""
    shown: Iterable[str] = keys
    unsafe = _UNSAFE_IN_URL if encoded else _UNSAFE_IN_XML
    if unsafe.search("".join(keys)):
        encode = quote if encoded else _text
        shown = [encode(key) for key in keys]
    rows: list[str] = []
    tails: dict[Fill, str] = {}
    for key, name in zip(keys, shown, strict=True):
        held = bucket.entry(key)
        if type(held) is Fill:
            tail = tails.get(held)
            if tail is None:
                tail = _row_tail(held.created_s, held.size, held.generation, 1, dialect)
                tails[held] = tail
            # Quotes need no escaping inside an element.
            rows.append(f"<Contents><Key>{name}</Key><ETag>{held.etag(key)}</ETag>{tail}")
            continue
        assert isinstance(held, Stored)
        row = held.rendered.get(dialect + " row")
        if row is None:
            tail = _row_tail(held.updated_s, held.body.size, held.generation, held.metageneration, dialect)
            row = held.rendered[dialect + " row"] = f"</Key><ETag>{held.etag}</ETag>{tail}"
        rows.append(f"<Contents><Key>{name}{row}")
    return rows


def _row_tail(updated_s: float, size: int, generation: int, metageneration: int, dialect: str) -> str:
    versions = ""
    if dialect == "gcs":
        versions = f"<Generation>{generation}</Generation><MetaGeneration>{metageneration}</MetaGeneration>"
    return (
        f"<LastModified>{iso_date(updated_s)}</LastModified><Size>{size}</Size>{versions}"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )

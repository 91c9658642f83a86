"""XML dialects: S3 REST and the similar XML API of Google Cloud Storage.

They share paths, verbs and documents. Where they differ (header names, generations, entity tags of multipart
objects), the dialect of the request decides.
"""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

import google_crc32c

from voxlane.testing import errors
from voxlane.testing.bodies import Blob
from voxlane.testing.errors import RequestError
from voxlane.testing.listing import decode_token, encode_token, end_of_prefix, plan_page, successor
from voxlane.testing.objects import (
    NO_PRECONDITIONS,
    Bucket,
    ObjectStore,
    Preconditions,
    StoredObject,
    SyntheticFill,
    Upload,
    format_crc32c,
)
from voxlane.testing.request_parsing import ApiRequest, parse_number
from voxlane.testing.responses import (
    METADATA_PREFIXES,
    Handler,
    Response,
    build_read_response,
    build_version_headers,
    format_iso_date,
    parse_http_date,
    parse_range,
    select_object_headers,
)
from voxlane.testing.storage_class import check_gcs_class, check_s3_class

_S3_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_GCS_NAMESPACE = "http://doc.s3.amazonaws.com/2006-03-01"
_S3_DOCUMENTS = {
    *("InitiateMultipartUploadResult", "CompleteMultipartUploadResult", "ListPartsResult"),
    *("ListMultipartUploadsResult", "CopyPartResult"),
}
"""Documents of multipart uploads, which have the namespace of S3 in GCS too."""
_GCS_MESSAGES = {
    "AccessDenied": "Access denied.",
    "AuthenticationRequired": "Authentication required.",
    "BadDigest": "The Content-MD5 you specified did not match what we received.",
    "CrcMismatch": "The CRC32C you specified did not match what we received.",
    "InvalidArgument": "Invalid argument.",
    "InvalidRange": "The requested range cannot be satisfied.",
    "NoSuchBucket": "The specified bucket does not exist.",
    "NoSuchKey": "The specified key does not exist.",
    "NoSuchUpload": "The requested upload was not found.",
    "NotImplemented": "A header or query you provided requested a function that is not implemented.",
    "PreconditionFailed": "At least one of the pre-conditions you specified did not hold.",
    "TooManyRequests": "Too many requests.",
}
"""Messages of GCS by code; what is specific to a request stands in the details of an error."""
_XML_HEAD = "Content-Type: application/xml\r\n"
_UNSAFE_IN_XML = re.compile("[&<>\\x00-\\x1f\\x7f]")
_UNSAFE_IN_URL = re.compile("[^A-Za-z0-9_.~/-]")
_MAX_KEYS = 1000
_HTTP_CONDITIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "If-Match": ("etags", str),
    "If-None-Match": ("not_etags", str),
    "If-Modified-Since": ("modified_since_s", parse_http_date),
    "If-Unmodified-Since": ("unmodified_since_s", parse_http_date),
}
_GOOGLE_CONDITIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "x-goog-if-generation-match": ("generation", parse_number),
    "x-goog-if-generation-not-match": ("not_generation", parse_number),
    "x-goog-if-metageneration-match": ("metageneration", parse_number),
    "x-goog-if-metageneration-not-match": ("not_metageneration", parse_number),
}
_CONDITIONS = {"s3": _HTTP_CONDITIONS, "gcs": _HTTP_CONDITIONS | _GOOGLE_CONDITIONS}
"""Headers of preconditions by dialect, with the field of :class:`Preconditions` and the parser of each."""


def build_xml_response(root: str, content: str, dialect: str = "s3", status: int = 200, head: str = "") -> Response:
    """Build an XML response."""
    namespace = _S3_NAMESPACE if dialect == "s3" or root in _S3_DOCUMENTS else _GCS_NAMESPACE
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{namespace}">{content}</{root}>'
    return Response(status, _XML_HEAD + head, [text.encode()])


def build_error_response(error: RequestError, request: ApiRequest) -> Response:
    """Build the response to a failed request."""
    if request.dialect == "gcs":
        message = _GCS_MESSAGES.get(error.code, error.message)
        content = _elements(Code=error.code, Message=message, Details=error.message)
    else:
        resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
        content = _elements(Code=error.code, Message=error.message, Resource=resource, RequestId="EMULATOR")
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{content}</Error>'.encode()
    return Response(error.status, _XML_HEAD + error.head, [] if request.method == "HEAD" else [text])


def _escape(value: str) -> str:
    """Escape text inside an element; control characters become references, which lenient readers accept."""
    if not _UNSAFE_IN_XML.search(value):
        return value
    return re.sub("[\\x00-\\x1f\\x7f]", lambda match: f"&#x{ord(match[0]):x};", escape(value))


def _elements(**texts: object) -> str:
    """Return an element for each name, with its text; None omits an element."""
    return "".join(f"<{name}>{_escape(str(text))}</{name}>" for name, text in texts.items() if text is not None)


class XmlApi:
    """Handle requests of the dialects ``s3`` and ``gcs``."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def handle(self, request: ApiRequest) -> Response:
        """Handle a request; raise :class:`RequestError` if it fails."""
        handler: Handler | None = getattr(self, f"_do_{request.op}", None)
        if handler is None:
            raise errors.not_implemented(f"{request.method} {_describe_resource(request)}")
        if request.op in ("create_bucket", "list_buckets"):
            return handler(request)
        return handler(request, self._objects.require(request.bucket))

    # Objects

    def _do_get(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_read_response(_find_readable(request, bucket), request.dialect, request.headers, head=False)

    def _do_head(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_read_response(_find_readable(request, bucket), request.dialect, request.headers, head=True)

    def _do_put(self, request: ApiRequest, bucket: Bucket) -> Response:
        _check_write(request, bucket.find(request.key))
        _check_digests(request)
        stored = StoredObject(
            request.key,
            Blob(request.body),
            request.md5(),
            self._objects.next_generation(),
            headers=select_object_headers(request.headers),
            metadata=_parse_metadata(request),
            storage_class=_choose_class(request, bucket),
        )
        bucket.put(stored)
        return Response(200, _build_write_headers(stored, request.dialect))

    def _do_delete(self, request: ApiRequest, bucket: Bucket) -> Response:
        stored = bucket.find(request.key)
        if request.dialect == "gcs":
            stored = bucket.require(request.key, request.param("generation"))
        _check_write(request, stored)
        if stored is not None:
            bucket.remove(request.key)
        return Response(204)

    def _do_copy(self, request: ApiRequest, bucket: Bucket) -> Response:
        source = self._copy_source(request)
        _check_write(request, bucket.find(request.key))
        stored = source.copy(
            request.key,
            self._objects.next_generation(),
            etag="",
            component_count=None,
            storage_class=_choose_class(request, bucket),
        )
        directive = request.headers.get("x-amz-metadata-directive") or request.headers.get("x-goog-metadata-directive")
        if directive and directive.upper() == "REPLACE":
            stored.headers, stored.metadata = select_object_headers(request.headers), _parse_metadata(request)
        bucket.put(stored)
        content = _elements(LastModified=format_iso_date(stored.created_s), ETag=stored.etag)
        head = _build_write_headers(stored, request.dialect)
        return build_xml_response("CopyObjectResult", content, request.dialect, head=head)

    def _copy_source(self, request: ApiRequest) -> StoredObject:
        text = request.headers.get("x-amz-copy-source") or request.headers["x-goog-copy-source"]
        path, _, version = text.partition("?versionId=")
        if version not in ("", "null"):
            raise errors.not_implemented("versionId in x-amz-copy-source")
        bucket_name, _, key = unquote(path.removeprefix("/")).partition("/")
        source = self._objects.require(bucket_name).require(key, request.headers.get("x-goog-copy-source-generation"))
        start = "x-goog-copy-source-if-" if request.dialect == "gcs" else "x-amz-copy-source-if-"
        Preconditions(
            generation=parse_number(request.headers.get(start + "generation-match")),
            etags=request.headers.get(start + "match"),
        ).check_read(source, source.etag)
        excluded_etags = request.headers.get(start + "none-match")
        if excluded_etags is not None:
            # On a copy a match is a failed precondition, not "not modified".
            Preconditions(not_etags=excluded_etags).check_write(source, source.etag)
        return source

    def _do_delete_many(self, request: ApiRequest, bucket: Bucket) -> Response:
        root = _parse_body(request.body)
        quiet = root.findtext("{*}Quiet", "").lower() == "true"
        rows: list[str] = []
        for element in root.iterfind("{*}Object"):
            key = element.findtext("{*}Key", "")
            if bucket.find(key) is not None:
                bucket.remove(key)
            if not quiet:
                rows.append(f"<Deleted>{_elements(Key=key)}</Deleted>")
        return build_xml_response("DeleteResult", "".join(rows), request.dialect)

    # Listings

    def _do_list_objects(self, request: ApiRequest, bucket: Bucket) -> Response:
        v2 = request.param("list-type") == "2"
        prefix, delimiter = request.param("prefix"), request.param("delimiter")
        token, marker = request.param("continuation-token"), request.param("start-after" if v2 else "marker")
        start = _parse_listing_start(token, marker, "" if v2 else delimiter)
        limit = _parse_limit(request, "max-keys")
        page = plan_page(bucket.keys(), prefix=prefix, delimiter=delimiter, start=start, end=None, limit=limit)
        encoded = request.param("encoding-type") == "url"
        encode = quote if encoded else str
        head = _elements(
            Name=request.bucket,
            Prefix=encode(prefix),
            MaxKeys=limit,
            Delimiter=encode(delimiter) or None,
            EncodingType="url" if encoded else None,
            IsTruncated="false" if page.resume is None else "true",
        )
        if v2:
            count, resume = len(page.keys) + len(page.prefixes), page.resume and encode_token(page.resume)
            head += _elements(KeyCount=count, ContinuationToken=token or None, StartAfter=encode(marker) or None)
            head += _elements(NextContinuationToken=resume)
        else:
            head += _elements(Marker=encode(marker), NextMarker=encode(page.last) if page.resume else None)
        rows = _build_rows(bucket, page.keys, request.dialect, encoded)
        prefixes = [f"<CommonPrefixes>{_elements(Prefix=encode(name))}</CommonPrefixes>" for name in page.prefixes]
        return build_xml_response("ListBucketResult", "".join([head, *rows, *prefixes]), request.dialect)

    def _do_list_buckets(self, request: ApiRequest) -> Response:
        rows = "".join(
            f"<Bucket>{_elements(Name=bucket.name, CreationDate=format_iso_date(bucket.created_s))}</Bucket>"
            for _, bucket in sorted(self._objects.buckets.items())
        )
        owner = "<Owner><ID>emulator</ID><DisplayName>emulator</DisplayName></Owner>"
        return build_xml_response("ListAllMyBucketsResult", f"{owner}<Buckets>{rows}</Buckets>", request.dialect)

    # Multipart uploads

    def _do_initiate(self, request: ApiRequest, bucket: Bucket) -> Response:
        headers, metadata = select_object_headers(request.headers), _parse_metadata(request)
        upload = Upload(request.key, headers, metadata, _choose_class(request, bucket))
        bucket.uploads[upload.upload_id] = upload
        return build_xml_response("InitiateMultipartUploadResult", _format_upload(request, upload), request.dialect)

    def _do_part(self, request: ApiRequest, bucket: Bucket) -> Response:
        upload = bucket.require_upload(request.param("uploadId"), request.key)
        _check_digests(request)
        part = self._add_part(upload, request, request.md5() if needs_part_md5(request) else None)
        head = f"ETag: {part.etag}\r\n"
        if request.dialect == "gcs":
            hashes = ",".join(f"{name}={value}" for name, value in part.hashes().items())
            head += f"x-goog-hash: {hashes}\r\n"
        return Response(200, head)

    def _do_part_copy(self, request: ApiRequest, bucket: Bucket) -> Response:
        upload = bucket.require_upload(request.param("uploadId"), request.key)
        source = self._copy_source(request)
        range_header = request.headers.get("x-amz-copy-source-range") or request.headers.get("x-goog-copy-source-range")
        start, stop = parse_range(range_header, source.body.size) or (0, source.body.size)
        request.body = b"".join(source.body.slices(start, stop))
        part = self._add_part(upload, request, request.md5())
        content = _elements(LastModified=format_iso_date(part.created_s), ETag=part.etag)
        return build_xml_response("CopyPartResult", content, request.dialect)

    def _add_part(self, upload: Upload, request: ApiRequest, md5: bytes | None) -> StoredObject:
        number = request.number("partNumber")
        if number is None or not 1 <= number <= 10_000:
            raise errors.invalid("Part number must be an integer between 1 and 10000, inclusive")
        part = StoredObject(request.key, Blob(request.body), md5, self._objects.next_generation())
        upload.parts[number] = part
        return part

    def _do_complete(self, request: ApiRequest, bucket: Bucket) -> Response:
        upload = bucket.require_upload(request.param("uploadId"), request.key)
        _check_write(request, bucket.find(request.key))
        listed = [
            (int(element.findtext("{*}PartNumber") or 0), element.findtext("{*}ETag", ""))
            for element in _parse_body(request.body).iterfind("{*}Part")
        ]
        stored = self._objects.finish_upload(bucket, upload, listed, s3_etag=request.dialect == "s3")
        head = build_version_headers(stored, request.dialect)
        location = f"/{bucket.name}/{request.key}"
        content = _elements(Location=location, Bucket=bucket.name, Key=request.key, ETag=stored.etag)
        return build_xml_response("CompleteMultipartUploadResult", content, request.dialect, head=head)

    def _do_abort(self, request: ApiRequest, bucket: Bucket) -> Response:
        del bucket.uploads[bucket.require_upload(request.param("uploadId"), request.key).upload_id]
        return Response(204)

    def _do_list_parts(self, request: ApiRequest, bucket: Bucket) -> Response:
        upload = bucket.require_upload(request.param("uploadId"), request.key)
        limit = _parse_limit(request, "max-parts")
        numbers = sorted(number for number in upload.parts if number > (request.number("part-number-marker") or 0))
        shown = numbers[:limit]
        content = _format_upload(request, upload) + _elements(
            MaxParts=limit,
            IsTruncated="true" if len(numbers) > limit else "false",
            NextPartNumberMarker=shown[-1] if shown else 0,
        )
        for number in shown:
            part = upload.parts[number]
            modified = format_iso_date(part.created_s)
            row = _elements(PartNumber=number, LastModified=modified, ETag=part.etag, Size=part.body.size)
            content += f"<Part>{row}</Part>"
        return build_xml_response("ListPartsResult", content, request.dialect)

    def _do_bucket_uploads(self, request: ApiRequest, bucket: Bucket) -> Response:
        uploads = sorted(
            (upload for upload in bucket.uploads.values() if upload.key.startswith(request.param("prefix"))),
            key=lambda upload: (upload.key, upload.started_s),
        )
        encoded = request.param("encoding-type") == "url"
        content = _elements(Bucket=request.bucket, EncodingType="url" if encoded else None, IsTruncated="false")
        for upload in uploads:
            key, started = quote(upload.key) if encoded else upload.key, format_iso_date(upload.started_s)
            content += f"<Upload>{_elements(Key=key, UploadId=upload.upload_id, Initiated=started)}</Upload>"
        return build_xml_response("ListMultipartUploadsResult", content, request.dialect)

    # Buckets

    def _do_create_bucket(self, request: ApiRequest) -> Response:
        declared = _parse_body(request.body).findtext("{*}StorageClass") if request.body else None
        storage_class = check_gcs_class(declared)
        bucket = self._objects.create(request.bucket)
        bucket.storage_class = storage_class or bucket.storage_class
        return Response(200, f"Location: /{quote(request.bucket)}\r\n")

    def _do_head_bucket(self, request: ApiRequest, bucket: Bucket) -> Response:
        return Response(200, "x-amz-bucket-region: us-east-1\r\n" if request.dialect == "s3" else "")

    def _do_delete_bucket(self, request: ApiRequest, bucket: Bucket) -> Response:
        self._objects.delete(request.bucket)
        return Response(204)

    def _do_bucket_location(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_xml_response("LocationConstraint", "", request.dialect)

    def _do_bucket_versioning(self, request: ApiRequest, bucket: Bucket) -> Response:
        return build_xml_response("VersioningConfiguration", "", request.dialect)


# Parsing requests


def _parse_limit(request: ApiRequest, name: str) -> int:
    number = request.number(name)
    return _MAX_KEYS if number is None else min(number, _MAX_KEYS)


def _parse_listing_start(token: str, marker: str, delimiter: str) -> str:
    """Return the inclusive start of a page; ``delimiter`` is set for V1, whose marker may be a common prefix."""
    if token:
        return decode_token(token)
    if delimiter and marker.endswith(delimiter):
        return end_of_prefix(marker) or successor(marker)
    return successor(marker) if marker else ""


def _parse_preconditions(request: ApiRequest) -> Preconditions:
    headers, conditions = request.headers, _CONDITIONS[request.dialect]
    values = {field: parse(headers[name]) for name, (field, parse) in conditions.items() if name in headers}
    return Preconditions(**values) if values else NO_PRECONDITIONS


def _find_readable(request: ApiRequest, bucket: Bucket) -> StoredObject:
    stored = bucket.require(request.key, request.param("generation"))
    conditions = _parse_preconditions(request)
    if conditions is not NO_PRECONDITIONS:
        conditions.check_read(stored, stored.etag)
    return stored


def _check_write(request: ApiRequest, stored: StoredObject | None) -> None:
    _parse_preconditions(request).check_write(stored, stored.etag if stored else "")


def _check_digests(request: ApiRequest) -> None:
    """Raise 400 if a body differs from the MD5 that the client sent."""
    expected = request.headers.get("Content-MD5")
    if expected is not None and expected != base64.b64encode(request.md5()).decode():
        raise errors.invalid("The Content-MD5 you specified did not match what we received", "BadDigest")
    if "x-goog-hash" not in request.headers:
        return
    for item in request.headers["x-goog-hash"].split(","):
        name, _, value = item.strip().partition("=")
        if name == "md5" and value != base64.b64encode(request.md5()).decode():
            raise errors.invalid("The MD5 you specified did not match what we received", "BadDigest")
        if name == "crc32c" and value != format_crc32c(google_crc32c.value(request.body)):
            raise errors.invalid("The CRC32C you specified did not match what we received", "CrcMismatch")


def needs_part_md5(request: ApiRequest) -> bool:
    """Return whether the response to an uploaded part needs its MD5.

    GCS returns it for all parts. Google's own clients may verify it and are known by their header; other clients do not
    look, and computing it would take half of the server's time during their uploads.
    """
    return request.dialect == "s3" or "x-goog-api-client" in request.headers


def _choose_class(request: ApiRequest, bucket: Bucket) -> str:
    """Return the storage class of a new object: that of the request, otherwise the default."""
    if request.dialect == "gcs":
        return check_gcs_class(request.headers.get("x-goog-storage-class")) or bucket.storage_class
    return check_s3_class(request.headers.get("x-amz-storage-class")) or bucket.storage_class


def _describe_resource(request: ApiRequest) -> str:
    """Return what an unknown operation is for: the service, a bucket or an object."""
    return "of an object" if request.key else "of a bucket" if request.bucket else "of the service"


def _parse_metadata(request: ApiRequest) -> dict[str, str]:
    prefix, headers = METADATA_PREFIXES[request.dialect], request.headers
    return {name[len(prefix) :].lower(): text for name, text in headers.items() if name.lower().startswith(prefix)}


def _parse_body(body: bytes) -> ElementTree.Element:
    """Parse an XML document. Find its elements as ``{*}Name``, because only some clients use a namespace."""
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise errors.invalid("The XML you provided was not well-formed", "MalformedXML") from None


# Building responses


def _format_upload(request: ApiRequest, upload: Upload) -> str:
    return _elements(Bucket=request.bucket, Key=request.key, UploadId=upload.upload_id)


def _build_write_headers(stored: StoredObject, dialect: str) -> str:
    return f"ETag: {stored.etag}\r\n{build_version_headers(stored, dialect)}"


def _build_rows(bucket: Bucket, keys: Sequence[str], dialect: str, encoded: bool) -> list[str]:
    """Return the Contents elements of the keys; the page is checked at once for characters to escape."""
    names, unsafe = keys, _UNSAFE_IN_URL if encoded else _UNSAFE_IN_XML
    if unsafe.search("".join(keys)):
        names = [quote(key) if encoded else _escape(key) for key in keys]
    if keys and (fill := bucket.common_fill(keys)) is not None:
        end = _render_row_end(fill, dialect)
        return ["<Contents><Key>", f"</Key>{end}<Contents><Key>".join(names), "</Key>", end]
    return [
        f"<Contents><Key>{name}</Key>{_render_row_end(bucket.entry(key), dialect)}"
        for key, name in zip(keys, names, strict=True)
    ]


def _render_row_end(entry: StoredObject | SyntheticFill, dialect: str) -> str:
    """Return the part of a row after the key, cached in the entry."""
    cache_key = dialect + " row"
    if cache_key not in entry.rendered:
        stored = entry if isinstance(entry, StoredObject) else entry.stored("")
        entry.rendered[cache_key] = _build_row_end(stored, dialect)
    return entry.rendered[cache_key]


def _build_row_end(stored: StoredObject, dialect: str) -> str:
    versions = ""
    if dialect == "gcs":
        versions = _elements(Generation=stored.generation, MetaGeneration=stored.metageneration)
    modified = _elements(LastModified=format_iso_date(stored.updated_s), Size=stored.body.size)
    storage_class = f"<StorageClass>{stored.storage_class}</StorageClass>"
    return f"<ETag>{stored.etag}</ETag>{modified}{versions}{storage_class}</Contents>"

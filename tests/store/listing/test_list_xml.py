"""Pages of listings in the forms that services send."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane.store.list_xml import _S3, _cut_rows, _search_rows, parse_azure_page, parse_s3_page

AMAZON = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bkt</Name><Prefix/><KeyCount>3</KeyCount>
<NextContinuationToken>1ueG&amp;=</NextContinuationToken><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>
<Contents><Key>a+b/%2B%25%0A</Key><LastModified>2026-03-23T15:29:28.000Z</LastModified>
<ETag>&quot;6761d6772dc789aa1a2be9e51757c93b&quot;</ETag><Size>10</Size><StorageClass>STANDARD</StorageClass></Contents>
<Contents><Key>folder/</Key><LastModified>2026-03-23T15:29:28.000Z</LastModified><Size>0</Size></Contents>
</ListBucketResult>"""
AZURE = b"""<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="https://a.blob.core.windows.net/c">
<Blobs><Blob><Name>a &amp; b+%41</Name><Properties><Creation-Time>Mon, 01 Jun 2026 10:00:00 GMT</Creation-Time>
<Last-Modified>Tue, 02 Jun 2026 11:22:33 GMT</Last-Modified><Etag>0x8CBFF45D8A29A19</Etag>
<Content-Length>100</Content-Length></Properties></Blob><Blob><Name Encoded="true">bell%07%2B+</Name><Properties>
<Last-Modified>Tue, 02 Jun 2026 11:22:33 GMT</Last-Modified><Etag>0x1</Etag><Content-Length>7</Content-Length>
</Properties></Blob></Blobs><NextMarker>2!80!x</NextMarker></EnumerationResults>"""
EMPTY = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>"""


def test_page_of_amazon() -> None:
    page = parse_s3_page(AMAZON)
    assert page.token == "1ueG&="
    assert page.batch.column("path").to_pylist() == ["a b/+%\n", "folder/"]
    assert page.batch.column("size").to_pylist() == [10, 0]
    assert page.batch.column("e_tag").to_pylist() == ['"6761d6772dc789aa1a2be9e51757c93b"', None]
    assert page.batch.column("last_modified").to_pylist()[0] == datetime(2026, 3, 23, 15, 29, 28, tzinfo=UTC)


def test_page_of_azure() -> None:
    page = parse_azure_page(AZURE)
    assert page.token == "2!80!x"
    assert page.batch.column("path").to_pylist() == ["a & b+%41", "bell\x07++"]
    assert page.batch.column("size").to_pylist() == [100, 7]
    assert page.batch.column("e_tag").to_pylist() == ["0x8CBFF45D8A29A19", "0x1"]
    assert page.batch.column("last_modified").to_pylist()[1] == datetime(2026, 6, 2, 11, 22, 33, tzinfo=UTC)


@pytest.mark.parametrize("parse", [parse_s3_page, parse_azure_page])
def test_empty_page(parse: type) -> None:
    batch, token = parse(EMPTY)
    assert (batch.num_rows, token) == (0, None)
    assert batch.schema == parse_s3_page(AMAZON).batch.schema


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), max_size=8))
def test_server_that_ignores_the_encoding(keys: list[str]) -> None:
    """Some compatible servers send the keys as XML, with references for what XML cannot hold."""
    rows = "".join(
        f"<Contents><Key>{''.join(f'&#x{ord(c):x};' if c in '<>&' or ord(c) < 32 else c for c in key)}</Key>"
        "<LastModified>2026-03-23T15:29:28Z</LastModified><Size>1</Size></Contents>"
        for key in keys
    )
    page = parse_s3_page(f"<ListBucketResult>{rows}</ListBucketResult>".encode())
    assert page.batch.column("path").equals(pa.array(keys, pa.large_string()))


ROWS = st.lists(
    st.lists(st.sampled_from(["Key", "ETag", "Size", "LastModified", "Owner"]), min_size=1, max_size=5), max_size=4
)


@given(ROWS, st.booleans())
def test_cutting_rows_equals_searching_them(rows: list[list[str]], same: bool) -> None:
    """The fast way is used for rows of one form only, whatever the elements and their order."""
    elements = [rows[0]] * len(rows) if same and rows else rows
    text = "".join(
        f"<Contents>{''.join(f'<{name}>{row}{name}</{name}>' for name in names)}</Contents>"
        for row, names in enumerate(elements)
    )
    body = f"<ListBucketResult><Name>b</Name>{text}</ListBucketResult>".encode()
    cut, searched = _cut_rows(body, _S3), _search_rows(body, _S3)
    if cut is None:
        is_complete = all({"Key", "ETag", "Size", "LastModified"} <= set(names) for names in elements)
        assert not (elements and is_complete and all(names == elements[0] for names in elements))
    else:
        assert [column.to_pylist() for column in cut] == [column.to_pylist() for column in searched]

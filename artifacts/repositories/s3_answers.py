"""Answers of an S3 service: a page of a listing, a refusal, and the digest of an object.

They come from the server that a tenant names, so they are bounded before they are parsed, XML with a document type is
refused, and no text of theirs is repeated but what has the form of a region.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from artifacts.errors import ArtifactError, Reason
from artifacts.repositories.repository import RepositoryFile
from artifacts.repositories.s3_access import ENDPOINT_VARIABLE, KEY_ID_VARIABLE, REGION_VARIABLE, SECRET_KEY_VARIABLE
from artifacts.repositories.s3_access import SESSION_TOKEN_VARIABLE as SESSION_TOKEN

PAGE_BYTES: Final = 4 << 20
"""Limit of a page: 1,000 keys of 1,024 bytes, each of which may be quoted."""
_MOST_MARKS: Final = 64_000
"""Limit of tags and attributes of a page: up to 64 for each of its 1,000 keys; services send some 20."""
_MOST_SIZE: Final = 1 << 62
_REGION: Final = re.compile(r"[a-z0-9-]{1,40}", re.ASCII)
_ENTITY_TAG: Final = re.compile(r"[\x21\x23-\x7e]{1,200}")
_FORBIDDEN: Final = 403
_NOT_FOUND: Final = 404
_MOVED: Final = 301

_OTHER_REGION: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
"""Codes of refusals by which a service says that the bucket is in another region."""
_KEYS: Final = f"{KEY_ID_VARIABLE} and {SECRET_KEY_VARIABLE} of spec.sourceSecretRef, or of the environment"
_REFUSALS: Final[Mapping[str, tuple[Reason, str]]] = {
    "NoSuchBucket": (
        "SourceNotFound",
        f"there is no such bucket: check its name, and {ENDPOINT_VARIABLE} if it is not at AWS",
    ),
    "NoSuchKey": ("SourceNotFound", "the bucket has no such object: check the key; for a folder, end it with a slash"),
    "InvalidAccessKeyId": ("SourceUnauthorized", f"the service does not know the access key: check {_KEYS}"),
    "SignatureDoesNotMatch": ("SourceUnauthorized", f"the secret key does not belong to the access key: check {_KEYS}"),
    "ExpiredToken": ("SourceUnauthorized", f"the temporary keys have expired: write new ones, with {SESSION_TOKEN}"),
    "InvalidToken": ("SourceUnauthorized", f"the service does not take {SESSION_TOKEN}: write it and its keys again"),
    "RequestTimeTooSkewed": ("SourceUnauthorized", "this machine's clock is wrong: set it, and try again"),
    "InvalidObjectState": ("SourceRefused", "the object is in an archive: restore it first"),
    "MethodNotAllowed": ("SourceRefused", "the service does not allow to read it: check the endpoint"),
}
"""Reason and way out by the code of a refusal."""


class ListingPage(NamedTuple):
    """A page of a listing; `next_token` asks for the next page, empty: this is the last one."""

    objects: list[RepositoryFile]
    """The path of each is its key, and its revision the entity tag."""
    next_token: str


class _NoDocumentType(ET.TreeBuilder):
    """Builder that refuses a document type, and so every entity that XML does not have by itself."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        del name, pubid, system
        raise ValueError("a document type")


def parse_page(text: bytes) -> ListingPage:
    """Return the page that a ListObjectsV2 with `encoding-type=url` answers.

    Raises:
        ValueError: the text is no such page; the message has none of its text.
    """
    root = _parse_xml(text)
    if _local_name(root) != "ListBucketResult":
        raise ValueError("no ListBucketResult")

    # `values` has what the page states beside its objects, by name.
    objects, values = [], {}
    for child in root:
        if _local_name(child) == "Contents":
            objects.append(_read_object({_local_name(element): element.text or "" for element in child}))
        else:
            values[_local_name(child)] = child.text or ""

    # A truncated page is followed by another, which its token names.
    is_truncated = values.get("IsTruncated") == "true"
    next_token = values.get("NextContinuationToken", "") if is_truncated else ""
    if is_truncated and not next_token:
        raise ValueError("a truncated page without the token of the next one")
    return ListingPage(objects, next_token)


def _read_object(fields: Mapping[str, str]) -> RepositoryFile:
    """Return one object of a listing. Raises ValueError if a field that is needed is missing."""
    size, entity_tag = fields.get("Size", ""), fields.get("ETag", "").strip('"')
    if not fields.get("Key") or not _ENTITY_TAG.fullmatch(entity_tag):
        raise ValueError("an object without key or entity tag")
    if not re.fullmatch(r"\d{1,19}", size, re.ASCII) or int(size) > _MOST_SIZE:
        raise ValueError("an object without size")
    return RepositoryFile(path=unquote(fields["Key"]), size_bytes=int(size), sha256=None, revision=entity_tag)


def explain_refusal(
    place: str, status: int, headers: Mapping[str, str], text: bytes, *, signed: bool
) -> ArtifactError | None:
    """Return the error for an answer with this status; None if it is not particular to S3.

    Args:
        place: bucket and key, for the message.
        status: status of the answer.
        headers: its headers.
        text: the start of its body.
        signed: True if the request had a signature.
    """
    try:
        fields = {_local_name(element): element.text or "" for element in _parse_xml(text)}
    except ValueError:
        fields = {}  # many services and proxies before them refuse without a body

    # S3 states an error code in the body, and the region of the bucket there or in a header.
    code = fields.get("Code", "")
    region = fields.get("Region") or headers.get("x-amz-bucket-region", "")

    # The most particular first: another region, a known code, then the status alone.
    if status == _MOVED or code in _OTHER_REGION:
        where = f"is in region {region}" if _REGION.fullmatch(region) else "is in another region"
        way_out = f"set {REGION_VARIABLE} to it, in spec.sourceSecretRef or in the environment"
        return ArtifactError("SourceRefused", f"{place}: the bucket {where}: {way_out}")
    if code in _REFUSALS:
        reason, way_out = _REFUSALS[code]
        return ArtifactError(reason, f"{place}: {code}: {way_out}")
    if status == _FORBIDDEN:
        way_out = (
            "the keys may not read it: allow them s3:GetObject, and for a folder s3:ListBucket, or check the key"
            if signed
            else f"it is not public: give {_KEYS}"
        )
        return ArtifactError("SourceUnauthorized", f"{place}: access denied: {way_out}")
    if status == _NOT_FOUND:
        return ArtifactError("SourceNotFound", f"{place}: HTTP 404: there is no such object: check bucket and key")
    return None


def _parse_xml(text: bytes) -> ET.Element:
    """Return the root of a short XML text without a document type. Raises ValueError."""
    # Count the marks of elements and attributes first: parsed, these take a hundred times their bytes.
    if text.count(b"<") + text.count(b"=") > _MOST_MARKS:
        raise ValueError("more elements than a page has")
    try:
        parser = ET.XMLParser(target=_NoDocumentType())  # noqa: S314  bounded, and without a document type
        parser.feed(text)
        root: ET.Element = parser.close()
    except (ET.ParseError, LookupError) as error:
        raise ValueError("no XML") from error
    return root


def _local_name(element: ET.Element) -> str:
    """Return the name without its namespace, which some services leave out."""
    return element.tag.rpartition("}")[2]

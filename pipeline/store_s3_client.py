"""What an S3 client is made of and says: its options, the headers that objects keep, and what its errors mean."""

from __future__ import annotations

import base64
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from operators.errors import (
    ArchiveError,
    DeniedError,
    ExistsError,
    NotFoundError,
    StoreError,
    UsageError,
)
from pipeline.store import TAG_COUNT, Headers, is_header
from pipeline.store_base import changed

REQUESTS_AT_ONCE = 8
"""Of one read; a client has connections for several of them."""

# fmt: off
_OPTIONS = (
    "endpoint_url", "addressing_style", "anon", "key", "secret", "token", "region", "profile", "sse", "sse_kms_key_id",
    "requester_pays", "connect_timeout", "read_timeout",
)
# fmt: on
_ABSENT = {"404", "NoSuchKey", "NoSuchBucket", "NoSuchVersion", "NotFound"}
_REFUSED = {"403", "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
BUSY = {"409", "ConditionalRequestConflict", "OperationAborted"}
_TAKEN = {"412", "PreconditionFailed"}
_NO_CREDENTIALS = re.compile("locate credentials|Partial credentials|config profile")
"""In the text of an error of the client that asking again does not mend."""

_TAGGING = "x-amz-tagging"
_KEPT = {
    "cache-control": "CacheControl",
    "content-disposition": "ContentDisposition",
    "content-encoding": "ContentEncoding",
    "content-language": "ContentLanguage",
    "content-type": "ContentType",
    _TAGGING: "Tagging",
}
"""Headers of a PUT that an object keeps, with what the client calls them; beside them is user metadata."""
_METADATA = "x-amz-meta-"
WRITE_ID = "write-id"
"""User metadata of what we write, that tells it from what others write."""
METADATA_BYTES_MAX = 2048
"""S3's limit on the user metadata of an object, names included."""


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of s3fs: explicit options first, then the environment, then what suits the endpoint.

    Raises
    ------
    UsageError
        An option is unknown or malformed.
    """
    _refuse_unknown(options)
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = options.get("endpoint_url") or environment
    host = urlsplit(endpoint or "").hostname or "amazonaws.com"
    is_aws = host.endswith(("amazonaws.com", "amazonaws.com.cn"))
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    s3: dict[str, Any] = {"addressing_style": options.get("addressing_style", "auto" if is_aws else "path")}
    config: dict[str, Any] = {
        "connect_timeout": _seconds(options, "connect_timeout", "10"),
        "read_timeout": _seconds(options, "read_timeout", "60"),
        "max_pool_connections": 4 * REQUESTS_AT_ONCE,
        "s3": s3,
    }
    if not is_aws:
        # Lookalikes answer unknown checksum trailers with errors; signing the payload hashes every byte again.
        s3["payload_signing_enabled"] = False
        for side in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{side.upper()}" not in os.environ:
                config[side] = "when_required"
        region = region or "us-east-1"
    extra = {"ServerSideEncryption": options.get("sse"), "SSEKMSKeyId": options.get("sse_kms_key_id")}
    return {
        "endpoint_url": endpoint,
        "anon": _flag(options, "anon"),
        "key": options.get("key"),
        "secret": options.get("secret"),
        "token": options.get("token"),
        "requester_pays": _flag(options, "requester_pays"),
        "client_kwargs": {"region_name": region} if region else {},
        "config_kwargs": config,
        "s3_additional_kwargs": {name: value for name, value in extra.items() if value},
        "use_listings_cache": False,
        "skip_instance_cache": True,
    } | ({"profile": options["profile"]} if "profile" in options else {})


def _refuse_unknown(options: Mapping[str, str]) -> None:
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_OPTIONS)}"
            raise UsageError("a storage option of S3", repr(name), "--storage-option", hint)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in {"true", "false", "1", "0"}:
        raise UsageError("true or false", text, f"--storage-option {name}")
    return text in {"true", "1"}


def _seconds(options: Mapping[str, str], name: str, default: str) -> int:
    text = options.get(name, default)
    if not text.isdecimal() or not int(text):
        raise UsageError("whole seconds", text, f"--storage-option {name}")
    return int(text)


def headers_of(answer: Mapping[str, Any], tags: Iterable[Mapping[str, str]] | None) -> Headers:
    """Return what an object keeps beside its bytes, from the answer to a GET and, where they were read, its tags.

    They are in the order of names, and named and spelt as a PUT has them; our own id of a write is left out.
    """
    found: list[tuple[str, str]] = []
    for name, value in answer["ResponseMetadata"]["HTTPHeaders"].items():
        is_kept = name in _KEPT or (name.startswith(_METADATA) and name != _METADATA + WRITE_ID)
        if is_kept and is_header(name, value):
            found.append((name, value))
    if tags is not None:
        found.append((_TAGGING, urlencode(sorted((tag["Key"], tag["Value"]) for tag in tags), quote_via=quote)))
    elif answer.get("TagCount"):
        found.append((TAG_COUNT, str(answer["TagCount"])))
    return tuple(sorted(found))


def arguments_of(headers: Headers, write_id: str) -> dict[str, Any]:
    """Return the arguments of a write that keeps `headers`, and our id of it where the metadata leave room for one."""
    metadata = {name.removeprefix(_METADATA): _ascii(value) for name, value in headers if name.startswith(_METADATA)}
    if sum(map(len, (*metadata, *metadata.values(), WRITE_ID, write_id))) <= METADATA_BYTES_MAX:
        metadata[WRITE_ID] = write_id
    return {_KEPT[name]: value for name, value in headers if name in _KEPT} | {"Metadata": metadata}


def tags_of(headers: Headers) -> list[dict[str, str]]:
    """Return the tags among `headers`, as a request of their own has them."""
    pairs = parse_qsl(dict(headers).get(_TAGGING, ""), keep_blank_values=True)
    return [{"Key": name, "Value": value} for name, value in pairs]


def _ascii(value: str) -> str:
    """Return metadata as a request can have them: what is not ASCII as RFC 2047 spells it, as S3 does in answers."""
    if value.isascii():
        return value
    return f"=?UTF-8?B?{base64.b64encode(value.encode('utf-8', 'surrogateescape')).decode()}?="


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag of an answer or of an entry of a listing, in quotes: some stores leave them out in listings."""
    etag: str = answer["ETag"]
    return etag if etag.endswith('"') else f'"{etag}"'


def code_of(error: BaseException | None) -> str:
    """S3's own code behind an exception; the Python class that s3fs chooses differs from store to store."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, Mapping):
            code = str(answer.get("Error", {}).get("Code", ""))
            return code or str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        error = error.__cause__
    return ""


def typed(error: Exception, where: str, *, creates: bool) -> ArchiveError:
    """The error of the tree for whatever a request raised; `creates` tells a taken key from a changed object."""
    code = code_of(error)
    if isinstance(error, ArchiveError):
        return error
    if code in _ABSENT or isinstance(error, FileNotFoundError):
        return NotFoundError("an object", code or "nothing", where, "check bucket, prefix and endpoint")
    if code in _TAKEN:
        return ExistsError("a free key", "an object", where) if creates else changed(where)
    if code in _REFUSED or code in EXPIRED or isinstance(error, PermissionError) or _NO_CREDENTIALS.search(str(error)):
        return DeniedError("access", code or str(error), where, "check credentials and policy")
    return StoreError("an answer from the store", f"{code} {error}".strip(), where, "check the endpoint and run again")

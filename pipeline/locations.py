"""From a path or a URL, as users write it, to the store there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from operators.errors import UsageError
from pipeline.store import SourceStore, Store


def open_source(
    url: str, options: Mapping[str, str] | None = None, *, versions: bool = False, as_of: str | None = None
) -> SourceStore:
    """A store that can only be read.

    Parameters
    ----------
    url : str
        Local path, ``file://``, ``s3://bucket/prefix`` or any fsspec URL. A folder; one object; or, ending in ``*``,
        everything whose key starts so.
    options : mapping of str to str, optional
        Storage options ``key=value``; a local path, which may stand beside a bucket in one command, has none.
    versions : bool
        List each object with its version, where the store keeps some and says so; reading takes the newest alone.
    as_of : str, optional
        List what was there at the end of this second, in UTC, ``YYYY-MM-DDTHH:MM:SSZ``.

    Raises
    ------
    UsageError
        The URL or an option is not understood, or the store knows no other time than now.
    """
    protocol, rest = split_url(url)
    if as_of is not None and protocol != "s3":
        raise UsageError("a bucket that keeps versions", "another place", url, "leave out --as-of")
    if protocol == "file":
        from pipeline.store_local import LocalSource

        return LocalSource(rest)
    if protocol == "s3":
        from pipeline.store_s3 import S3Source

        return S3Source(rest, options or {}, versions=versions, as_of=as_of)
    from pipeline.store_fsspec import FsspecSource

    return FsspecSource(url, options or {})


def open_store(url: str, options: Mapping[str, str] | None = None, *, single_writer: bool = False) -> Store:
    """A store that can be written; parameters as for `open_source`.

    Parameters
    ----------
    single_writer : bool
        The caller promises to be the only writer: create-only writes become a look and a write, for stores that know
        no conditional write. Weaker, and refused unless asked for.
    """
    protocol, rest = split_url(url)
    if protocol == "file":
        from pipeline.store_local import LocalStore

        return LocalStore(rest)
    if protocol == "s3":
        from pipeline.store_s3 import S3Store

        return S3Store(rest, options or {}, single_writer=single_writer)
    from pipeline.store_fsspec import FsspecStore

    return FsspecStore(url, options or {}, single_writer=single_writer)


def absolute_url(url: str) -> str:
    """The URL as any process of any working folder understands it.

    Raises
    ------
    UsageError
        The URL is empty or names no bucket.
    """
    protocol, rest = split_url(url)
    if protocol != "file":
        return url
    path = str(Path(rest).absolute())
    return path if path == "/" or not rest.endswith("/") else f"{path}/"


def folder_url(url: str) -> str:
    """The one spelling of a folder, however links and slashes spell it, with a slash at its end."""
    protocol, rest = split_url(url)
    path = os.path.realpath(rest) if protocol == "file" else rest  # pathlib refuses a loop of links
    return f"{protocol}://{path.rstrip('/')}/"


def source_folder(url: str) -> str:
    """The folder that keys of a source are relative to: that above, where its URL ends in a star."""
    return url.rpartition("/")[0] if url.endswith("*") else url.rstrip("/")


def split_url(url: str) -> tuple[str, str]:
    """Protocol and the rest of a URL: ``file`` for bare paths, ``s3`` for ``s3a`` as well.

    Raises
    ------
    UsageError
        Empty, or a bucket without a name.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", url, re.DOTALL)
    protocol, rest = (match[1].lower(), match[2]) if match else ("file", url)
    protocol = {"s3a": "s3", "local": "file"}.get(protocol, protocol)
    if not rest or (protocol == "s3" and rest.startswith("/")):
        raise UsageError("a path or a URL such as s3://bucket/prefix", repr(url))
    return protocol, rest

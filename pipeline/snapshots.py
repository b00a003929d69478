"""Snapshots: what one commit says, as a value and as canonical JSON.

The JSON has sorted keys, no floats, no white space beyond a final newline, and the digest of all other
fields, so that a snapshot whose bytes changed anywhere is refused: it is the one object of an archive that
nothing else names by digest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blake3 import blake3

from configs.loader import canonical_json
from operators.errors import FormatError, UnsupportedError
from pipeline.canonical import digest_of_json
from pipeline.keys import name_order
from pipeline.plan import Finding
from pipeline.store import Headers, ObjectInfo, is_header

LAYOUT_VERSION = 0
"""Version of the archive's layout; `pipeline/ARCHIVE.md` has the table."""
FEATURES: frozenset[str] = frozenset()
"""Features that this reader knows; a snapshot names those that reading it needs."""

JSON_DEPTH_MAX = 8
"""Deepest nesting of values in a snapshot; what later steps do with a value recurses."""

_HEX = re.compile(r"[0-9a-f]{64}")


def package_version() -> str:
    """Return the version of the package, also where it runs from a checkout."""
    try:
        return version("brevis")
    except PackageNotFoundError:
        return "0+checkout"


def time_text(moment: datetime) -> str:
    """Return a time in UTC as snapshots state it, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def clock_text(seconds: int) -> str:
    """Return a time of a store's clock, in seconds since 1970, as `time_text`."""
    return time_text(datetime.fromtimestamp(seconds, UTC))


def file_digest(segments: Iterable[tuple[int, bytes]]) -> str:
    """Return the digest of a file: BLAKE3-256 over the size (eight bytes, little-endian) and digest of each segment."""
    hasher = blake3()
    for n_bytes, digest in segments:
        hasher.update(n_bytes.to_bytes(8, "little") + digest)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One archived file: its generation in the source, how it was cut, and the digest of its bytes.

    `digest` is what `file_digest` gives. `headers` are what the source kept beside its bytes.
    """

    key: str
    n_bytes: int
    etag: str
    version: str | None
    format: str
    reason: str | None
    digest: str
    headers: Headers = ()

    @property
    def info(self) -> ObjectInfo:
        """The generation that was archived."""
        return ObjectInfo(self.key, self.n_bytes, self.etag, self.version)

    @property
    def current(self) -> ObjectInfo:
        """The same, to be compared with what is there now, whatever versions are kept."""
        return ObjectInfo(self.key, self.n_bytes, self.etag)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a snapshot; `stored_bytes` are the bytes of its packs, whole."""

    files: int
    tensors: int
    segments: int
    source_bytes: int
    packs: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit.

    Attributes
    ----------
    checkpoint : str
    seq, base : int
        Its number, and the number of the snapshot that its plan saw; 0 for none.
    run, recipe, inventory : str
        Digests of what was to be done, how, and of the listing of the source, failed objects included.
    writer : str
        Version of the package that wrote it.
    features : tuple of str
        What a reader has to know beyond the layout version.
    manifest, manifest_bytes : str, int
        Digest and size of the manifest.
    content : str
        Digest of the rows without place: equal for equal archives.
    files : tuple of FileEntry
        In the order of keys.
    failures : tuple of Finding
        Objects of the inventory that are not in the archive.
    totals : Totals
    time : str
        When, in UTC; the one value that differs between two runs over the same source.
    """

    checkpoint: str
    seq: int
    base: int
    run: str
    recipe: str
    inventory: str
    writer: str
    features: tuple[str, ...]
    manifest: str
    manifest_bytes: int
    content: str
    files: tuple[FileEntry, ...]
    failures: tuple[Finding, ...]
    totals: Totals
    time: str

    @property
    def name(self) -> str:
        """``<checkpoint>/<seq>``, as commands print and take it."""
        return f"{self.checkpoint}/{self.seq}"

    def to_json(self) -> bytes:
        """Return the canonical JSON."""
        content = {
            **asdict(self),
            "files": [_entry_values(entry) for entry in self.files],  # a snapshot may name a hundred thousand
            "layout_version": LAYOUT_VERSION,
        }
        return canonical_json({**content, "digest": digest_of_json(content)}) + b"\n"


def _entry_values(entry: FileEntry) -> list[Any]:
    """Return a file as JSON has it: what most have none of, at its end, is left out."""
    *values, headers = astuple(entry)
    return [*values, headers] if headers else values


def headers_to_json(headers: Mapping[str, Headers]) -> bytes:
    """Return the headers of files, by key, as canonical JSON in the order of keys."""
    return canonical_json([[key, headers[key]] for key in sorted(headers, key=name_order)]) + b"\n"


def headers_from_json(data: bytes, where: str) -> dict[str, Headers]:
    """Return what `headers_to_json` took.

    Raises
    ------
    FormatError
        It is damaged, or was never that.
    """
    reader = _Reader(where)
    try:
        return {reader.text(key): reader.headers(value) for key, value in json.loads(data)}
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError("headers of files as JSON", str(error)[:200], where, "remove it and run again") from error


def inventory_digest(files: Iterable[ObjectInfo]) -> str:
    """Return the digest of a listing: keys relative to the source, sizes and generations, in order."""
    return digest_of_json([[info.key, info.n_bytes, info.etag, info.version] for info in files])


def from_json(data: bytes, where: str) -> Snapshot:
    """Return the snapshot that `Snapshot.to_json` wrote.

    Raises
    ------
    UnsupportedError
        A newer writer wrote it.
    FormatError
        It is damaged or was never a snapshot.
    """
    try:
        content = json.loads(data, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError) as error:
        raise FormatError("a snapshot as JSON", str(error)[:200], where) from error
    if not isinstance(content, dict):
        raise FormatError("a snapshot", "another JSON value", where)
    _refuse_deep(content, where)
    _refuse_newer(content, where)
    digest = content.pop("digest", None)
    if digest != digest_of_json(content):
        raise FormatError("a snapshot of the digest that it names", "other content", where, "take another copy")
    del content["layout_version"]
    try:
        snapshot = _Reader(where).snapshot(content)
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError("the fields of a snapshot", str(error)[:200], where) from error
    if snapshot.to_json() != data:
        raise FormatError("canonical JSON", "another spelling", where)
    return snapshot


def _refuse_deep(content: Any, where: str) -> None:
    level = [content]
    for _ in range(JSON_DEPTH_MAX):
        values = (value.values() if isinstance(value, dict) else value for value in level)
        level = [child for children in values for child in children if isinstance(child, dict | list)]
    if level:
        raise FormatError(f"JSON of depth {JSON_DEPTH_MAX} or less", "a deeper one", where)


def _refuse_newer(content: Mapping[str, Any], where: str) -> None:
    version = content.get("layout_version")
    if type(version) is not int or version < 0:
        raise FormatError("a layout version", repr(version)[:80], where)
    if version > LAYOUT_VERSION:
        raise UnsupportedError(f"layout version {LAYOUT_VERSION} or lower", f"{version}", where, "upgrade the reader")
    features = content.get("features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise FormatError("a list of features", repr(features)[:80], where)
    if unknown := sorted(set(features) - FEATURES):
        raise UnsupportedError("features of this reader", ", ".join(unknown)[:200], where, "upgrade the reader")


def _no_float(number: str) -> Any:
    raise ValueError(f"{number} in a snapshot")


class _Reader:
    """Turns parsed JSON into dataclasses, checking every type: JSON of a stranger is not to be trusted."""

    def __init__(self, where: str) -> None:
        self._where = where

    def snapshot(self, content: dict[str, Any]) -> Snapshot:
        take = dict(content)
        built = Snapshot(
            checkpoint=self.text(take.pop("checkpoint")),
            seq=self._count(take.pop("seq")),
            base=self._count(take.pop("base")),
            run=self._digest(take.pop("run")),
            recipe=self._digest(take.pop("recipe")),
            inventory=self._digest(take.pop("inventory")),
            writer=self.text(take.pop("writer")),
            features=tuple(take.pop("features")),
            manifest=self._digest(take.pop("manifest")),
            manifest_bytes=self._count(take.pop("manifest_bytes")),
            content=self._digest(take.pop("content")),
            files=self._each(take.pop("files"), self._file),
            failures=self._each(take.pop("failures"), self._finding),
            totals=Totals(**{name: self._count(value) for name, value in self._object(take.pop("totals")).items()}),
            time=self._time(take.pop("time")),
        )
        if take:
            raise FormatError("no further field", ", ".join(sorted(take))[:200], self._where)
        return built

    def _file(self, value: Any) -> FileEntry:
        if not isinstance(value, list) or not 0 <= len(fields(FileEntry)) - len(value) <= 1:
            raise FormatError("a list that describes a file", repr(value)[:80], self._where)
        key, n_bytes, etag, version, kind, reason, digest, *headers = value
        return FileEntry(
            self.text(key),
            self._count(n_bytes),
            self.text(etag),
            None if version is None else self.text(version),
            self.text(kind),
            None if reason is None else self.text(reason),
            self._digest(digest),
            *map(self.headers, headers),
        )

    def headers(self, value: Any) -> Headers:
        """Return headers, which may come to stand in a request: none ends a line."""
        found = self._each(value, self._header)
        if list(found) != sorted(dict(found).items()):
            raise FormatError("headers in the order of names, each once", repr(value)[:80], self._where)
        return found

    def _header(self, value: Any) -> tuple[str, str]:
        name, text = self._each(value, self.text)
        if not is_header(name, text):
            raise FormatError("a header of one line, its name in lower case", repr(value)[:80], self._where)
        return name, text

    def _finding(self, value: Any) -> Finding:
        take = self._object(value)
        return Finding(self.text(take["key"]), self.text(take["reason"]), self.text(take["detail"]))

    def _each(self, value: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise FormatError("a list", type(value).__name__, self._where)
        return tuple(map(read, value))

    def _object(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise FormatError("an object", type(value).__name__, self._where)
        return value

    def text(self, value: Any) -> str:
        """Return a text."""
        if not isinstance(value, str):
            raise FormatError("text", type(value).__name__, self._where)
        return value

    def _time(self, value: Any) -> str:
        text = self.text(value)
        try:
            is_ours = time_text(datetime.fromisoformat(text)) == text
        except ValueError:
            is_ours = False
        if not is_ours:
            raise FormatError("a time as YYYY-MM-DDTHH:MM:SSZ", repr(text)[:80], self._where)
        return text

    def _count(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise FormatError("a count", repr(value)[:80], self._where)
        return value

    def _digest(self, value: Any) -> str:
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            raise FormatError("a digest", repr(value)[:80], self._where)
        return value

"""The archive as its readers see it: keys, snapshots, manifests. `ARCHIVE.md` is the norm; `commit.py` writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import unquote

from blake3 import blake3

from operators.errors import (
    ArchiveError,
    ArchiveNotFoundError,
    DamageError,
    DeniedError,
    DigestError,
    ExistsError,
    FormatError,
    LimitError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from pipeline.locations import folder_url
from pipeline.packs import pack_key
from pipeline.parquet import from_parquet
from pipeline.plan import Finding
from pipeline.rows import Row, Rows, values_of
from pipeline.snapshots import LAYOUT_VERSION, Snapshot, from_json, time_text
from pipeline.store import SourceStore, Store

FORMAT_KEY = "FORMAT"
FORMAT_BYTES_MAX = 1 << 10
FOLDERS = frozenset({"packs", "runs", "manifests", "snapshots", "tags", "expired", "verify", "gc", "release", "jobs"})
"""Below which all else lies."""
SNAPSHOT_BYTES_MAX = 64 << 20
ROWS_BYTES_MAX = 1 << 30
CHECKPOINT_BYTES_MAX = 200
"""Longest escaped name of a checkpoint: a part of a path, with room for temporary names."""
PUT_ATTEMPTS = 3
"""How often a create-only put is sent while its outcome is unknown and nothing is there."""
REQUESTS = 16
"""Small requests in flight."""

_FORMAT = re.compile(rb"brevis archive, layout (0|[1-9][0-9]{0,8})\n")
_SEQ = re.compile(r"([0-9]{8})\.json")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


# -- keys ---------------------------------------------------------------------------------------


def escape(checkpoint: str) -> str:
    """Return the name of a checkpoint as one part of a key: percent-escapes for all but ``A-Z a-z 0-9 . _ -``.

    Raises
    ------
    UsageError
        The name is empty or too long.
    """
    text = "".join(
        symbol if symbol.isascii() and (symbol.isalnum() or symbol in "._-") else _percent(symbol)
        for symbol in checkpoint
    )
    if text.startswith("."):
        text = "%2E" + text[1:]
    if not text or len(text) > CHECKPOINT_BYTES_MAX:
        raise UsageError(f"a name of 1 to {CHECKPOINT_BYTES_MAX} escaped bytes", checkpoint[:80], "--name")
    return text


def _percent(symbol: str) -> str:
    return "".join(f"%{byte:02X}" for byte in symbol.encode("utf-8", "surrogateescape"))


def unescape(folder: str) -> str | None:
    """Return the name that `escape` made `folder` of, or None where it makes it of none."""
    checkpoint = unquote(folder, errors="surrogateescape")
    try:
        return checkpoint if escape(checkpoint) == folder else None
    except (UsageError, UnicodeEncodeError):
        return None


def manifest_key(digest: str) -> str:
    """Return the key of a manifest."""
    return f"manifests/{digest}.parquet"


def snapshot_key(checkpoint: str, seq: int) -> str:
    """Return the key of a snapshot."""
    return f"snapshots/{escape(checkpoint)}/{seq:08d}.json"


def plan_key(run: str) -> str:
    """Return the key of the plan of a run."""
    return f"runs/{run}/plan"


def prior_key(run: str) -> str:
    """Return the key of the prior of a run."""
    return f"runs/{run}/prior"


def headers_key(run: str) -> str:
    """Return the key of what the source keeps beside the bytes of the files of a run."""
    return f"runs/{run}/headers"


def receipt_key(run: str, task: str) -> str:
    """Return the key of the receipt of the task with this id."""
    return f"runs/{run}/receipts/{task}"


# -- the archive itself -------------------------------------------------------------------------


def refuse_own_folders(archive_url: str, url: str) -> None:
    """Refuse `url`, to read a source from or to restore to, where it is a part of the archive.

    Raises
    ------
    UsageError
        It is.
    """
    archive, place = folder_url(archive_url), folder_url(url)
    if place.startswith(archive) and place.removeprefix(archive).partition("/")[0] in FOLDERS:
        raise UsageError("a place apart from the archive", "a folder of it", url, "name another")


def create_archive(store: Store, *, single_writer: bool = False) -> None:
    """Make the store an archive unless it is one.

    Parameters
    ----------
    store : Store
    single_writer : bool
        The caller promises to be the only writer; the store need not refuse a second one.

    Raises
    ------
    UnsupportedError
        A newer writer made it.
    UsageError
        The store lets anybody overwrite: no commit would be safe.
    """
    try:
        open_archive(store)
    except ArchiveNotFoundError:
        with _named(store):
            if not single_writer and not store.supports_create_only():
                found, step = "one that overwrites", "use --single-writer or another"
                raise UsageError("a store with create-only writes", found, store.url, step) from None
            _refuse_other_format(put_once(store, FORMAT_KEY, b"brevis archive, layout %d\n" % LAYOUT_VERSION))


def open_archive(store: SourceStore) -> None:
    """Check that the store holds an archive that this reader knows.

    Raises
    ------
    ArchiveNotFoundError
        There is none.
    UnsupportedError
        A newer writer made it.
    FormatError
        Something else is in its place.
    """
    with _named(store):
        try:
            data = store.get(FORMAT_KEY, max_bytes=FORMAT_BYTES_MAX)
        except NotFoundError as error:
            raise ArchiveNotFoundError("an archive", "no FORMAT object", store.url, "check the location") from error
        _refuse_other_format(data)


@contextmanager
def _named(store: SourceStore) -> Iterator[None]:
    """Tell with the place of the archive of what fails where it is met first: mostly the place itself is wrong."""
    try:
        yield
    except ArchiveError as error:
        where = error.where if error.where.startswith(store.url) else f"{store.url.rstrip('/')}/{error.where}"
        raise type(error)(error.expected, error.found, where, error.next_step) from error


def _refuse_other_format(data: bytes) -> None:
    match = _FORMAT.fullmatch(data)
    if match is None:
        raise FormatError("the FORMAT of an archive", repr(data[:80]), FORMAT_KEY)
    if int(match[1]) > LAYOUT_VERSION:
        raise UnsupportedError(f"layout {LAYOUT_VERSION} or lower", match[1].decode(), FORMAT_KEY, "upgrade the reader")


def checkpoints(store: SourceStore) -> dict[str, list[int]]:
    """Return every checkpoint of the archive with the numbers of its snapshots, both in ascending order.

    Objects that no writer put there, as the markers of folders and what file managers leave, are passed over.
    """
    found: dict[str, list[int]] = {}
    for info in store.list("snapshots/"):
        _, *parts = info.key.split("/")
        match = _SEQ.fullmatch(parts[-1])
        checkpoint = unescape(parts[0]) if match and len(parts) == 2 else None
        if match and checkpoint is not None:
            found.setdefault(checkpoint, []).append(int(match[1]))
    return {checkpoint: sorted(found[checkpoint]) for checkpoint in sorted(found)}


def snapshot_numbers(store: SourceStore, checkpoint: str) -> list[int]:
    """Return the numbers of the snapshots of one checkpoint, in ascending order."""
    prefix = f"snapshots/{escape(checkpoint)}/"
    names = (_SEQ.fullmatch(info.key.removeprefix(prefix)) for info in store.list(prefix))
    return sorted(int(match[1]) for match in names if match)


def load_snapshot(store: SourceStore, checkpoint: str, seq: int) -> Snapshot:
    """Return a snapshot.

    Raises
    ------
    ArchiveNotFoundError
        There is none of that name.
    DamageError, UnsupportedError
        It cannot be read.
    """
    key = snapshot_key(checkpoint, seq)
    try:
        snapshot = from_json(store.get(key, max_bytes=SNAPSHOT_BYTES_MAX), key)
    except NotFoundError as error:
        raise ArchiveNotFoundError("a snapshot", "none", key, "see `brevis list`") from error
    if (snapshot.checkpoint, snapshot.seq) != (checkpoint, seq):
        raise FormatError(f"the snapshot {checkpoint}/{seq}", snapshot.name, key, "it was copied from elsewhere")
    return snapshot


def each_snapshot(
    store: SourceStore, checkpoint: str, numbers: Iterable[int]
) -> Iterator[tuple[int, Snapshot | DamageError]]:
    """Yield snapshots of a checkpoint by their numbers, or what is wrong with one; those that went meanwhile, not."""
    for seq in numbers:
        try:
            yield seq, load_snapshot(store, checkpoint, seq)
        except DamageError as error:
            yield seq, error
        except ArchiveNotFoundError:
            continue  # a prune was here


def find_snapshot(store: SourceStore, name: str | None = None, as_of: str | None = None) -> Snapshot:
    """Return the snapshot that a user names as ``CHECKPOINT`` (its newest) or ``CHECKPOINT/SEQ``.

    A name that is both, since checkpoints may have slashes in theirs, is that of the snapshot, as `list` prints it.

    Parameters
    ----------
    store : SourceStore
    name : str, optional
        May be left out where there is one checkpoint.
    as_of : str, optional
        Take the newest snapshot of the checkpoint that is no later than this day or time; see `latest_time`.

    Raises
    ------
    ArchiveNotFoundError
        No archive, checkpoint or snapshot of that name, or none of that age.
    UsageError
        No name was given, and the archive holds several checkpoints; or `as_of` is no time, or one of a snapshot.
    """
    open_archive(store)
    known = checkpoints(store)
    if name is None:
        if len(known) > 1:
            raise UsageError("one of several checkpoints", "no name", "--snapshot", f"known: {', '.join(known)[:400]}")
        name = next(iter(known), "")
    if name in known and as_of is not None:
        return _newest_of(store, name, known[name], latest_time(as_of))
    checkpoint, _, seq = name.rpartition("/")
    if checkpoint in known and seq.isdecimal() and int(seq) in known[checkpoint]:
        if as_of is not None:
            raise UsageError("CHECKPOINT/SEQ or --as-of", "both", name)
        return load_snapshot(store, checkpoint, int(seq))
    if name in known:
        return load_snapshot(store, name, known[name][-1])
    hint = f"known: {', '.join(known)[:400]}" if known else "nothing was committed yet"
    raise ArchiveNotFoundError("a checkpoint or CHECKPOINT/SEQ", name or "none", store.url, hint)


def _newest_of(store: SourceStore, checkpoint: str, numbers: Sequence[int], latest: str) -> Snapshot:
    """Return the newest snapshot of a time; one that cannot be read fails it only where it may be that one."""
    unread: DamageError | None = None
    for seq in reversed(numbers):
        try:
            snapshot = load_snapshot(store, checkpoint, seq)
        except DamageError as error:
            unread = unread or error
            continue
        if snapshot.time > latest:
            unread = None
        elif unread is not None:
            raise unread
        else:
            return snapshot
    if unread is not None:
        raise unread
    raise ArchiveNotFoundError(f"a snapshot of {latest} or before", "none", checkpoint, "see `brevis list`")


def latest_time(text: str) -> str:
    """Return the last second that a user means by a time or day, in UTC and as snapshots have it, to be compared.

    Raises
    ------
    UsageError
        It is neither ``YYYY-MM-DD`` nor a time as ISO 8601 has it.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError("YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ", text, "--as-of") from error
    if not re.search(r"[0-9][T ][0-9]", text):
        time = time.replace(hour=23, minute=59, second=59)
    return time_text(time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC))


def load_manifest(store: SourceStore, snapshot: Snapshot) -> Rows:
    """Return the rows of a snapshot, checked against it and tiling its files.

    Raises
    ------
    DamageError
        The manifest is gone, or size, digest or content are not those that the snapshot names.
    """
    key = manifest_key(snapshot.manifest)
    try:
        data = manifest_bytes(store, snapshot)
    except NotFoundError as error:
        raise DamageError("the manifest of a snapshot", "none", key, "see `brevis rebuild`") from error
    rows = from_parquet(data, key)
    check_tiles({entry.key: entry.n_bytes for entry in snapshot.files}, rows, key)
    return rows


def manifest_bytes(store: SourceStore, snapshot: Snapshot) -> bytes:
    """Return the manifest of a snapshot as it is stored, of the size and digest that the snapshot names.

    Raises
    ------
    DamageError
        It has others.
    NotFoundError
        It is gone.
    """
    key = manifest_key(snapshot.manifest)
    if snapshot.manifest_bytes > ROWS_BYTES_MAX:
        raise LimitError(f"a manifest of at most {ROWS_BYTES_MAX} bytes", f"{snapshot.manifest_bytes}", key)
    data = store.get(key, max_bytes=snapshot.manifest_bytes)
    if len(data) != snapshot.manifest_bytes or blake3(data).hexdigest() != snapshot.manifest:
        raise DigestError("the manifest that the snapshot names", "other bytes", key, "take another copy")
    return data


def check_tiles(files: Mapping[str, int], rows: Iterable[Row], where: str) -> None:
    """Check that ordered `rows` tile `files` exactly: no gap, no overlap, no file too much or too few.

    Raises
    ------
    FormatError
        They do not; the first file is named.
    """
    filled: dict[str, int] = {}
    for file, offset_bytes, n_bytes in values_of(rows, "file", "offset_bytes", "n_bytes"):
        end = filled.get(file, 0)
        if offset_bytes != end:
            raise FormatError(f"a segment at {end}", f"one at {offset_bytes}", f"{where}: {file}")
        filled[file] = offset_bytes + n_bytes
    for key in sorted(filled.keys() | files.keys()):
        if filled.get(key, 0) != files.get(key, -1):
            expected = f"{files[key]} bytes" if key in files else "no segment"
            raise FormatError(expected, f"{filled.get(key, 0)} bytes in segments", f"{where}: {key}")


def pack_sizes(rows: Iterable[Row]) -> dict[bytes, int]:
    """Return every pack that `rows` refer to with its size, in the order of first use.

    Raises
    ------
    FormatError
        A row has no record, or two rows disagree.
    """
    sizes: dict[bytes, int] = {}
    columns = ("file", "offset_bytes", "pack", "pack_bytes", "pack_offset", "stored_bytes")
    for file, offset_bytes, *record in values_of(rows, *columns):
        if None in record:
            raise FormatError("a row with a record", "none", f"{file}@{offset_bytes}")
        pack, pack_bytes, _, _ = record
        if sizes.setdefault(pack, pack_bytes) != pack_bytes:
            raise FormatError(f"a pack of {sizes[pack]} bytes", f"{pack_bytes}", f"{file}@{offset_bytes}")
    return sizes


def missing_packs(store: SourceStore, sizes: Mapping[bytes, int]) -> list[Finding]:
    """Return the packs that are not there with their size."""

    def fault(item: tuple[bytes, int]) -> Finding | None:
        key = pack_key(item[0])
        try:
            n_bytes = store.head(key).n_bytes
        except NotFoundError:
            return Finding(key, "not_found", f"expected {item[1]} bytes")
        return None if n_bytes == item[1] else Finding(key, "wrong_size", f"expected {item[1]} bytes, found {n_bytes}")

    return [found for found in each(fault, sizes.items()) if found]


# -- small requests ----------------------------------------------------------------------------


def put_once(store: Store, key: str, data: bytes, max_bytes: int = FORMAT_BYTES_MAX) -> bytes:
    """Create an object and return what is stored: `data`, or the bytes of whoever was first.

    A put whose answer is lost may have been stored, and one that is refused may have been refused by its own
    first sending; so whatever is not plain success is settled by reading the object.
    """
    fault: StoreError = ExistsError("an object", "none after a refused put", key, "run again")
    for _ in range(PUT_ATTEMPTS):
        try:
            store.put_new(key, data)
        except DeniedError:
            raise
        except StoreError as error:
            fault = error
        else:
            return data
        try:
            return store.get(key, max_bytes=max_bytes)
        except NotFoundError:
            continue
        except StoreError as error:
            raise StoreError("to know whether the object is stored", str(error), key, "run again") from fault
    raise fault


def each(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Map `work` over small requests, some at a time, in order."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(work, items))

"""Snapshots: how they are named and found, and that no other bytes pass for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import (
    ArchiveError,
    ArchiveNotFoundError,
    DamageError,
    FormatError,
    UnsupportedError,
    UsageError,
)
from pipeline.archive import (
    checkpoints,
    create_archive,
    escape,
    find_snapshot,
    load_manifest,
    manifest_key,
    open_archive,
    snapshot_key,
)
from pipeline.commit import find_base
from pipeline.snapshots import from_json
from tests.memory_store import MemoryStore
from tests.pipeline.runs import OTHER_RECIPE, drive, source
from tests.strategies import damage


@given(st.text(min_size=1, max_size=12))
def test_names_of_checkpoints_are_one_part_of_a_key_and_come_back(name: str) -> None:
    escaped = escape(name)
    assert set(escaped) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-%")
    assert not escaped.startswith(".")
    assert list(checkpoints(MemoryStore({f"snapshots/{escaped}/00000001.json": b""}))) == [name]


def test_objects_that_no_writer_put_among_the_snapshots_are_passed_over() -> None:
    strays = ["", ".DS_Store", "00000001.json", "model/", "model/.DS_Store", "model/a/00000001.json", "/00000001.json"]
    others = ["a b", "%41", "%2f", "\u00e9", ".hidden", "x" * 201, "\ud800"]  # no escaped form of a name
    keys = [f"snapshots/{key}" for key in [*strays, *(f"{name}/00000001.json" for name in others)]]
    archived = MemoryStore(dict.fromkeys([*keys, snapshot_key("model", 2)], b""))
    assert checkpoints(archived) == {"model": [2]}


@pytest.mark.parametrize("name", ["", "x" * 201, "é" * 100])
def test_names_that_no_key_holds_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        escape(name)


def test_snapshots_are_found_by_name() -> None:
    archived, origin = MemoryStore(), source()
    with pytest.raises(ArchiveNotFoundError) as caught:
        find_snapshot(archived)
    assert caught.value.exit_code == 10
    create_archive(archived)
    with pytest.raises(ArchiveNotFoundError):
        find_snapshot(archived)
    drive(archived, origin)
    second = drive(archived, origin, OTHER_RECIPE)
    assert find_snapshot(archived) == second
    assert find_snapshot(archived, "model/1").seq == 1
    for name in ("other", "model/3", "model/x", "other/1"):
        with pytest.raises(ArchiveNotFoundError):
            find_snapshot(archived, name)
    archived.objects[snapshot_key("a/b", 7)] = b""
    with pytest.raises(UsageError, match="several"):
        find_snapshot(archived)
    assert checkpoints(archived) == {"a/b": [7], "model": [1, 2]}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"brevis archive, layout 1\n", UnsupportedError),
        (b"brevis archive, layout 00\n", FormatError),
        (b"something else", FormatError),
        (b"", FormatError),
    ],
)
def test_other_formats_are_refused(data: bytes, expected: type[ArchiveError]) -> None:
    with pytest.raises(expected):
        open_archive(MemoryStore({"FORMAT": data}))
    with pytest.raises(expected):
        create_archive(MemoryStore({"FORMAT": data}))


def test_a_store_that_lets_anybody_overwrite_is_refused_unless_promised_to_one() -> None:
    store = MemoryStore(create_only=False)
    with pytest.raises(UsageError, match="create-only"):
        create_archive(store)
    create_archive(store, single_writer=True)
    open_archive(store)


def edited(data: bytes, **changes: Any) -> bytes:
    """Return a snapshot with other fields, and the digest that fits them."""
    content = {**json.loads(data), **changes}
    content = {name: value for name, value in content.items() if value is not ... and name != "digest"}
    digest = blake3(_spelled(content)).hexdigest()
    return _spelled({**content, "digest": digest}) + b"\n"


def _spelled(content: dict[str, Any]) -> bytes:
    """As canonical JSON, but for any value."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def committed() -> tuple[MemoryStore, str]:
    archived = MemoryStore()
    drive(archived, source())
    return archived, snapshot_key("model", 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout_version": 1}, UnsupportedError),
        ({"features": ["books"]}, UnsupportedError),
        ({"features": "books"}, FormatError),
        ({"layout_version": True}, FormatError),
        ({"layout_version": ...}, FormatError),
        ({"seq": -1}, FormatError),
        ({"seq": "1"}, FormatError),
        ({"seq": 1 << 64}, FormatError),
        ({"run": "x"}, FormatError),
        ({"manifest": "../" + "0" * 61}, FormatError),
        ({"files": {}}, FormatError),
        ({"files": [[]]}, FormatError),
        ({"files": ["a"]}, FormatError),
        ({"files": [["a", 1, "tag", None, "opaque", None, "digest"]]}, FormatError),
        ({"files": [["a", 1.5, "tag", None, "opaque", None, "0" * 64]]}, FormatError),
        ({"failures": [{"key": 1, "reason": "", "detail": ""}]}, FormatError),
        ({"totals": {}}, FormatError),
        ({"totals": {"files": 1, "more": 1}}, FormatError),
        ({"extra": 1}, FormatError),
        ({"time": None}, FormatError),
        ({"content": ...}, FormatError),
    ],
)
def test_snapshots_of_another_kind_are_refused(
    committed: tuple[MemoryStore, str], changes: dict[str, Any], expected: type[ArchiveError]
) -> None:
    archived, key = committed
    with pytest.raises(expected):
        from_json(edited(archived.objects[key], **changes), key)


@pytest.mark.parametrize("depth", [8, 900, 992, 1100])
@pytest.mark.parametrize("field", ["features", "layout_version", "extra"])
def test_a_deeply_nested_snapshot_is_refused(committed: tuple[MemoryStore, str], field: str, depth: int) -> None:
    archived, key = committed
    nested = b',"' + field.encode() + b'":' + b"[" * depth + b"]" * depth + b"}\n"
    with pytest.raises(FormatError, match=r"depth|as JSON"):
        from_json(archived.objects[key].removesuffix(b"}\n") + nested, key)


@pytest.mark.parametrize(
    "spell",
    [
        lambda data: b" " + data,
        lambda data: data[:-1],
        lambda data: data.replace(b'"seq":1', b'"seq": 1'),
        lambda _: b"[" * 100_000,
        lambda _: b"[]",
        lambda _: b"\xff",
        lambda data: data.replace(b'"seq":1', b'"seq":1.0'),
        lambda data: data.replace(b'"seq":1', b'"seq":1,"seq":1'),
    ],
)
def test_other_spellings_of_a_snapshot_are_refused(
    committed: tuple[MemoryStore, str], spell: Callable[[bytes], bytes]
) -> None:
    archived, key = committed
    with pytest.raises(FormatError):
        from_json(spell(archived.objects[key]), key)


def test_every_flip_and_every_cut_of_a_snapshot_is_noticed(committed: tuple[MemoryStore, str]) -> None:
    archived, key = committed
    data = archived.objects[key]
    for position in range(len(data)):
        for bit in range(8):
            damaged = data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
            with pytest.raises((FormatError, UnsupportedError)):
                from_json(damaged, key)
        with pytest.raises(FormatError):
            from_json(data[:position], key)


@given(st.data())
def test_damage_of_a_manifest_is_noticed(data: st.DataObject) -> None:
    archived = MemoryStore()
    snapshot = drive(archived, source())
    key = manifest_key(snapshot.manifest)
    archived.objects[key] = data.draw(damage(archived.objects[key]))
    with pytest.raises(DamageError):
        load_manifest(archived, snapshot)


def test_a_snapshot_of_another_place_is_refused() -> None:
    archived = MemoryStore()
    drive(archived, source())
    archived.objects[snapshot_key("model", 2)] = archived.objects[snapshot_key("model", 1)]
    with pytest.raises(FormatError, match="copied"):
        find_snapshot(archived, "model/2")
    archived.objects[snapshot_key("twin", 1)] = archived.objects[snapshot_key("model", 1)]
    with pytest.raises(FormatError, match="copied"):
        find_snapshot(archived, "twin")


def test_a_damaged_newest_snapshot_is_told_and_gone_on_from() -> None:
    archived, origin = MemoryStore(), source()
    drive(archived, origin)
    archived.objects[snapshot_key("model", 1)] = b"{}"
    base = find_base(archived, "model")
    assert (base.seq, base.snapshot) == (1, None)
    assert isinstance(base.fault, DamageError)
    assert drive(archived, origin).name == "model/2"


def test_missing_manifests_are_named() -> None:
    archived = MemoryStore()
    snapshot = drive(archived, source())
    del archived.objects[manifest_key(snapshot.manifest)]
    with pytest.raises(DamageError, match=r"manifests/.*brevis rebuild"):
        load_manifest(archived, snapshot)

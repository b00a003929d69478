"""Damage of a whole archive: whatever byte changes, wherever it is cut, swapped or lost, it is noticed and named.

T3, T4, T22, T23: files whose bytes are not touched still restore, and no command ever gives wrong bytes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from operators.errors import DamageError
from operators.run import digest_of, execute
from pipeline.archive import find_snapshot, load_manifest, manifest_key, snapshot_key
from pipeline.packs import pack_key
from pipeline.reading import Decoder
from pipeline.rows import Row
from pipeline.snapshots import Snapshot
from pipeline.store import Data, Headers
from tests import cases
from tests.memory_store import MemoryStore, reach
from tests.pipeline.commands import Capture, Patch, Ran

SETTINGS = ("tasks_in_flight=1", "task_bytes=12000", "synth.prior=shipped", "synth.budget=4")
SHARED = cases.bf16(1, 3000)
SOURCE = {
    "a.safetensors": cases.safetensors([("shared", "BF16", [30, 100], SHARED), ("own", "U8", [5000], bytes(5000))]),
    "b.safetensors": cases.safetensors(
        [("same", "BF16", [30, 100], SHARED), ("x", "F32", [1500], cases.noise(2, 6000))]
    ),
    "config.json": b'{"hidden": 64}' * 20,
    "copy.json": b'{"hidden": 64}' * 20,
    "empty.txt": b"",
    "noise.bin": cases.noise(3, 9000),
    "z/noise.bin": cases.noise(4, 9000),
}
READ = ("packs/", "manifests/", "snapshots/", "FORMAT")
"""What readers need: nothing below ``runs/``."""


class Target(MemoryStore):
    """A store that files are restored to."""

    def write(self, key: str, data: Iterable[Data], *, n_bytes: int, overwrite: bool, headers: Headers = ()) -> None:
        self.objects[key] = b"".join(map(bytes, data))
        assert len(self.objects[key]) == n_bytes


@dataclass(frozen=True)
class Vault:
    """An archive of `SOURCE`, and commands on damaged copies of it."""

    objects: dict[str, bytes]
    stores: dict[str, Any]
    capsys: Capture

    @property
    def snapshot(self) -> Snapshot:
        return find_snapshot(MemoryStore(dict(self.objects)), "source")

    @property
    def rows(self) -> Sequence[Row]:
        return load_manifest(MemoryStore(dict(self.objects)), self.snapshot)

    @property
    def keys(self) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(READ))

    def touched(self, key: str, position: int) -> list[Row]:
        """The rows whose record has this byte of a pack."""
        return [
            row
            for row in self.rows
            if pack_key(row.pack or b"") == key and 0 <= position - (row.pack_offset or 0) < (row.stored_bytes or 0)
        ]

    def ran(self, objects: dict[str, bytes], command: str, *options: str) -> Ran:
        self.stores["test://archive"] = MemoryStore(dict(objects))
        return Ran(self.capsys, command, "test://archive", *options, "--snapshot", "source")

    def restored(self, objects: dict[str, bytes]) -> tuple[Ran, dict[str, bytes]]:
        """Restore what can be restored; nothing of it has other bytes than the source."""
        target = self.stores["test://out"] = Target()
        ran = self.ran(objects, "restore", "test://out", "--keep-going")
        assert target.objects.items() <= SOURCE.items()
        if ran.code in (0, 3):
            failed = {failure["key"] for failure in ran.json["failures"]}
            assert target.objects.keys() == SOURCE.keys() - failed
        else:
            assert not target.objects
        return ran, target.objects


@pytest.fixture
def vault(monkeypatch: Patch, capsys: Capture) -> Vault:
    store = MemoryStore()
    stores: dict[str, Any] = {"test://source": MemoryStore(dict(SOURCE)), "test://archive": store}
    reach(monkeypatch, stores)
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    assert Ran(capsys, "archive", "test://source", "test://archive", *options).code == 0
    found = Vault(dict(store.objects), stores, capsys)
    assert len([key for key in found.keys if key.startswith("packs/")]) > 2
    assert len({(row.pack, row.pack_offset) for row in found.rows}) < len(found.rows)  # two files share a record
    assert found.ran(found.objects, "verify").code == 0
    assert found.restored(found.objects)[1] == SOURCE
    return found


def messages(ran: Ran) -> str:
    """All that a command says of what failed."""
    return str(ran.json.get("error", "")) + str(ran.json.get("failures", ""))


# -- one bit ------------------------------------------------------------------------------------


def check_flip(vault: Vault, key: str, position: int, bit: int) -> None:
    """One changed bit is noticed; the message names the segments of its record, or the object where it is no record."""
    data = bytearray(vault.objects[key])
    data[position] ^= 1 << bit
    damaged = {**vault.objects, key: bytes(data)}
    found = vault.ran(damaged, "verify", "--level", "bytes")
    where = (key, position, bit)
    assert found.code == (1 if "unsupported" in messages(found) else 4), where
    rows = vault.touched(key, position)
    if rows:
        assert [failure["key"] for failure in found.json["failures"]] == sorted(row.where for row in rows), where
        assert all(row.tensor is None or row.tensor in messages(found) for row in rows)
    else:
        assert key in messages(found) or "source/1" in messages(found), where
    ran, _ = vault.restored(damaged)
    if rows:
        assert {failure["key"] for failure in ran.json["failures"]} == {row.file for row in rows}, where
        assert all(row.tensor is None or row.tensor in messages(ran) for row in rows), where
    elif key.startswith("packs/"):
        assert ran.code == 0, where  # header, index and footer of a pack serve only those who lost the manifest
    else:
        assert ran.code in (1, 4), where


def positions(vault: Vault, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield random bits of all objects that readers need: one in four anywhere, the rest one object after another."""
    draw = random.Random(count)
    everywhere = [(key, position) for key in vault.keys for position in range(len(vault.objects[key]))]
    for turn in range(count):
        if turn % 4:
            key = vault.keys[turn % len(vault.keys)]
            yield key, draw.randrange(len(vault.objects[key])), draw.randrange(8)
        else:
            yield *draw.choice(everywhere), draw.randrange(8)


def test_a_flipped_bit_is_noticed_and_named(vault: Vault) -> None:
    for where in positions(vault, 200):
        check_flip(vault, *where)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_flipped_bit_is_noticed_and_named(vault: Vault) -> None:
    for where in positions(vault, 3000):
        check_flip(vault, *where)


def test_a_reader_that_does_not_compare_is_found_out(vault: Vault, monkeypatch: Patch) -> None:
    row = next(row for row in vault.rows if row.file == "noise.bin")
    where = pack_key(row.pack or b""), (row.pack_offset or 0) + (row.stored_bytes or 0) // 2, 0
    check_flip(vault, *where)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.verify.digest_of", lambda _: row.stored_digest)
        with pytest.raises(AssertionError):
            check_flip(vault, *where)

    def careless(record: memoryview, *rest: Any, **wanted: Any) -> None:
        with contextlib.suppress(DamageError):
            execute(record, *rest, **wanted)

    monkeypatch.setattr(sys.modules[Decoder.__module__], "execute", careless)
    with pytest.raises(AssertionError):
        check_flip(vault, *where)


# -- lost, cut, swapped, replayed ---------------------------------------------------------------


def check_noticed(vault: Vault, damaged: dict[str, bytes]) -> tuple[Ran, dict[str, bytes]]:
    assert vault.ran(damaged, "verify", "--level", "bytes").code in (1, 4, 10)
    return vault.restored(damaged)


def test_losing_a_pack_loses_its_files_alone(vault: Vault) -> None:
    """T23."""
    for key in [key for key in vault.keys if key.startswith("packs/")]:
        damaged = {name: data for name, data in vault.objects.items() if name != key}
        lost = {row.file for row in vault.rows if pack_key(row.pack or b"") == key}
        found = vault.ran(damaged, "verify", "--level", "manifest")
        assert found.code == 4
        assert [failure["key"] for failure in found.json["failures"]] == [key]
        assert all(name in found.json["failures"][0]["message"] for name in lost)
        ran, files = vault.restored(damaged)
        assert ran.code == 3
        assert {failure["key"] for failure in ran.json["failures"]} == lost
        assert all(key in failure["message"] for failure in ran.json["failures"])
        assert files.keys() == SOURCE.keys() - lost


def test_an_object_that_is_cut_or_gone_is_noticed(vault: Vault) -> None:
    """T4, G15."""
    draw = random.Random(1)
    for key in vault.keys:
        n_bytes = len(vault.objects[key])
        for cut in sorted({0, 1, n_bytes // 2, n_bytes - 1, *(draw.randrange(n_bytes) for _ in range(8))}):
            check_noticed(vault, {**vault.objects, key: vault.objects[key][:cut]})
        check_noticed(vault, {name: data for name, data in vault.objects.items() if name != key})
        check_noticed(vault, {**vault.objects, key: vault.objects[key] + b"\0"})


def test_objects_that_were_swapped_are_noticed(vault: Vault) -> None:
    """T4: packs for packs, and any object for any other."""
    for first in vault.keys:
        for second in vault.keys:
            if first < second:
                swapped = {first: vault.objects[second], second: vault.objects[first]}
                check_noticed(vault, vault.objects | swapped)


def test_records_that_were_swapped_are_noticed(vault: Vault) -> None:
    """T4: two records of one size change places; the digest of each file in the manifest says which is which."""
    sized: dict[int | None, Row] = {}
    twins = [(sized[row.stored_bytes], row) for row in vault.rows if sized.setdefault(row.stored_bytes, row) is not row]
    pairs = [(one, other) for one, other in twins if one.digest != other.digest]
    assert pairs
    for one, other in pairs:
        damaged = dict(vault.objects)
        for row, record in ((one, _record(vault, other)), (other, _record(vault, one))):
            data = bytearray(damaged[pack_key(row.pack or b"")])
            data[row.pack_offset or 0 : (row.pack_offset or 0) + len(record)] = record
            damaged[pack_key(row.pack or b"")] = bytes(data)
        ran, _ = check_noticed(vault, damaged)
        assert {failure["key"] for failure in ran.json["failures"]} == {one.file, other.file}


def _record(vault: Vault, row: Row) -> bytes:
    start = row.pack_offset or 0
    record = vault.objects[pack_key(row.pack or b"")][start : start + (row.stored_bytes or 0)]
    assert digest_of(record) == row.stored_digest
    return record


@pytest.mark.parametrize(("copied", "place"), [("other/1", 1), ("other/1", 2), ("source/1", 2)])
def test_a_commit_of_another_place_is_refused(vault: Vault, copied: str, place: int) -> None:
    """T4: another checkpoint's snapshot, whole and with all it needs, does not pass for ours; nor ours for a later."""
    store = vault.stores["test://archive"] = MemoryStore(dict(vault.objects))
    vault.stores["test://other"] = MemoryStore({"other.bin": cases.noise(9, 100)})
    assert Ran(vault.capsys, "archive", "test://other", "test://archive").code == 0
    checkpoint, _, seq = copied.partition("/")
    replayed = {snapshot_key("source", place): store.objects[snapshot_key(checkpoint, int(seq))]}
    ran, _ = check_noticed(vault, store.objects | replayed)
    assert "copied from elsewhere" in messages(ran)


def test_a_manifest_of_another_checkpoint_is_refused(vault: Vault) -> None:
    store = vault.stores["test://archive"] = MemoryStore(dict(vault.objects))
    vault.stores["test://other"] = MemoryStore({"other.bin": cases.noise(9, 100)})
    assert Ran(vault.capsys, "archive", "test://other", "test://archive").code == 0
    theirs = manifest_key(find_snapshot(store, "other").manifest)
    check_noticed(vault, store.objects | {manifest_key(vault.snapshot.manifest): store.objects[theirs]})


def test_two_manifests_by_two_runs_stand_side_by_side(vault: Vault) -> None:
    """G15: a manifest that no snapshot names does nothing; each snapshot has its own."""
    damaged = dict(vault.objects)
    damaged[manifest_key("0" * 64)] = b"an orphan"
    assert vault.ran(damaged, "verify").code == 0
    assert vault.restored(damaged)[1] == SOURCE

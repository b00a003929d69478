"""The whole flow through the command line: every verdict, every exit code, every promise that one machine shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeline
from operators.errors import DamageError, StoreError
from operators.limits import SEGMENT_BYTES
from pipeline import commit as commit_module
from pipeline import planning, reading, segments, tasks
from pipeline.archive import find_snapshot, load_manifest
from pipeline.cli import main
from pipeline.locations import open_store
from pipeline.reading import archived_files, range_bytes
from pipeline.report import Report
from tests.cases import CASES, bf16, noise, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, objects_of, write

ROOT = Path(__file__).parents[2]

SMALL = {
    "model.safetensors": safetensors(
        [
            ("a", "BF16", [100, 64], bf16(1, 6400)),
            ("b", "F32", [10], bytes(40)),
            ("twin", "BF16", [100, 64], bf16(1, 6400)),
            ("noise", "U8", [9000], noise(1, 9000)),
        ],
        {"format": "pt"},
    ),
    "sub/config.json": b'{"hidden": 64}',
    "empty.txt": b"",
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A source that refuses writes during the test (P6)."""
    folder = write(tmp_path / "source", SMALL)
    before = files_of(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    assert files_of(folder) == before
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


# -- every field case, in one archive (acceptance 6) ---------------------------------------------


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    for case in CASES:
        write(folder / case.id, case.files)
    return folder


def test_every_field_case_in_one_archive(cases: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    ran = Ran(capsys, "archive", cases, archive, *QUICK)
    assert ran.code == 0
    assert ran.json["failures"] == []
    warned = {(item["key"].split("/")[0], item["reason"]) for item in ran.json["warnings"]}
    assert {(case.id, case.reason) for case in CASES if case.reason} <= warned
    oddities = {"index_missing_shards", "index_missing_tensors"}
    assert {reason for _, reason in warned} <= {case.reason for case in CASES} | oddities
    assert Ran(capsys, "verify", archive, "--workers", "1").code == 0
    assert Ran(capsys, "restore", archive, tmp_path / "out", "--workers", "1").code == 0
    assert files_of(tmp_path / "out") == files_of(cases)
    strict = Ran(capsys, "archive", cases, tmp_path / "strict", *QUICK, "--strict-format", "--include", "B0*")
    assert strict.code == 3
    assert {item["reason"] for item in strict.json["failures"]} >= {"truncated", "overlap"}


def test_stored_once(tmp_path: Path, capsys: Capture) -> None:
    """D06, E13: equal segments share a record; one changed bit makes them two."""
    words = bf16(6, 20_000)
    flipped = bytearray(words)
    flipped[777] ^= 1
    tied = safetensors([("head", "BF16", [200, 100], words), ("embed", "BF16", [200, 100], words)])
    untied = safetensors([("head", "BF16", [200, 100], words), ("embed", "BF16", [200, 100], bytes(flipped))])
    sizes = {}
    for name, data in (("tied", tied), ("untied", untied)):
        write(tmp_path / name, {"m.safetensors": data})
        ran = Ran(capsys, "archive", tmp_path / name, tmp_path / f"{name}-archive", *QUICK)
        sizes[name] = ran.json["stored_bytes"]
        assert ran.json["deduplicated_bytes"] == (40_000 if name == "tied" else 0)
    assert sizes["untied"] > sizes["tied"] + 20_000


# -- the flow -----------------------------------------------------------------------------------


def test_archive_restore_and_look(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    ran = Ran(capsys, "archive", source, archive, *QUICK)
    assert ran.code == 0
    assert (ran.json["files"], ran.json["tensors"], ran.json["snapshot"]) == (3, 4, "source/1")
    assert ran.json["source_bytes"] == sum(map(len, SMALL.values()))
    objects = objects_of(archive, "packs", "manifests", "snapshots")
    assert ran.json["stored_bytes"] == sum(path.stat().st_size for path in objects)
    listed = Ran(capsys, "list", archive).json["snapshots"]
    assert [item["snapshot"] for item in listed] == ["source/1"]
    info = Ran(capsys, "info", archive, "--include", "*.safetensors").json
    assert [item["key"] for item in info["files"]] == ["model.safetensors"]
    assert {segment["tensor"] for segment in info["files"][0]["segments"]} >= {"a", "noise", "twin"}
    assert main(["restore", str(archive), str(tmp_path / "out"), "-q", "--workers", "2"]) == 0
    assert files_of(tmp_path / "out") == SMALL
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_second_run_has_nothing_to_do(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    first = Ran(capsys, "archive", source, archive, *QUICK)
    before = {path: path.stat().st_mtime_ns for path in archive.rglob("*")}
    again = Ran(capsys, "archive", source, archive, *QUICK)
    assert again.code == 0
    assert again.json["unchanged"]
    assert again.json["content"] == first.json["content"]
    assert {path: path.stat().st_mtime_ns for path in archive.rglob("*")} == before


def test_same_bytes_for_any_workers(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "source"
    for i in range(3):
        tensors = [(f"w{j}", "BF16", [300, 128], bf16(10 * i + j, 38_400)) for j in range(3)]
        write(folder, {f"shard-{i}.safetensors": safetensors(tensors)})
    names = []
    contents = set()
    for workers, at_once in (("1", "1"), ("1", "3"), ("2", "2")):
        archive = tmp_path / f"archive-{workers}-{at_once}"
        options = ["--workers", workers, "--set", f"tasks_in_flight={at_once}"]
        options += ["--set", "task_bytes=128KiB", "--set", "synth.budget=16"]
        contents.add(Ran(capsys, "archive", folder, archive, *options).json["content"])
        names.append(
            sorted(path.name for path in [*(archive / "packs").rglob("*"), *(archive / "manifests").rglob("*")])
        )
    assert names[0] == names[1] == names[2]
    assert len(contents) == 1


def test_snapshots_stand_side_by_side(tmp_path: Path, capsys: Capture) -> None:
    folder = write(tmp_path / "step", {"w.bin": noise(1, 5000), "same.bin": noise(2, 5000)})
    archive = tmp_path / "archive"
    Ran(capsys, "archive", folder, archive, *QUICK)
    (folder / "w.bin").write_bytes(noise(3, 6000))
    assert Ran(capsys, "archive", folder, archive, *QUICK).json["snapshot"] == "step/2"
    assert Ran(capsys, "archive", folder, archive, *QUICK, "--name", "other name").json["snapshot"] == "other name/1"
    for snapshot, data in (("step/1", noise(1, 5000)), ("step/2", noise(3, 6000)), ("step", noise(3, 6000))):
        target = tmp_path / f"out-{snapshot.replace('/', '-')}"
        assert Ran(capsys, "restore", archive, target, "--snapshot", snapshot).code == 0
        assert (target / "w.bin").read_bytes() == data
    assert Ran(capsys, "restore", archive, tmp_path / "x").code == 2
    assert Ran(capsys, "restore", archive, tmp_path / "x", "--snapshot", "step/9").code == 10
    assert Ran(capsys, "verify", archive).json["files"] == 4


def test_one_tensor(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    Ran(capsys, "archive", source, archive, *QUICK)
    for name, dtype, shape, data in (("a", "BF16", [100, 64], bf16(1, 6400)), ("b", "F32", [10], bytes(40))):
        target = tmp_path / f"{name}.safetensors"
        assert Ran(capsys, "restore", archive, target, "--tensor", name).code == 0
        header_bytes = int.from_bytes(target.read_bytes()[:8], "little")
        header = json.loads(target.read_bytes()[8 : 8 + header_bytes])
        assert header == {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
        assert target.read_bytes()[8 + header_bytes :] == data
    assert Ran(capsys, "restore", archive, tmp_path, "--tensor", "model.safetensors:noise").code == 0
    assert (tmp_path / "noise.safetensors").exists()
    assert Ran(capsys, "restore", archive, tmp_path, "--tensor", "nobody").code == 2


def test_a_tensor_replaces_no_other_file(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive, target = tmp_path / "archive", tmp_path / "out" / "a.safetensors"
    Ran(capsys, "archive", source, archive, *QUICK)
    restored: Any = lambda *words: Ran(capsys, "restore", archive, target, "--tensor", "a", *words)  # noqa: E731
    assert restored().code == 0
    data, status = target.read_bytes(), target.stat()
    assert restored().code == 0
    assert target.stat().st_mtime_ns == status.st_mtime_ns
    for other in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), bytes([data[0] ^ 1]) + data[1:]):
        target.write_bytes(other)
        ran = restored()
        assert (ran.code, ran.json["error"]["next_step"]) == (1, "use --overwrite")
        assert target.read_bytes() == other
        assert restored("--overwrite").code == 0
        assert target.read_bytes() == data


def test_explain_names_the_winner(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    Ran(capsys, "archive", source, archive, *QUICK)
    told = Ran(capsys, "explain", archive, "--tensor", "a", *QUICK[2:])
    assert told.code == 0
    info = Ran(capsys, "info", archive).json
    stored = {segment["tensor"]: segment["program"] for item in info["files"] for segment in item["segments"]}
    assert told.json["stored_program"] == stored["a"]
    assert told.json["expansions"] > 0
    assert told.json["leaves"]


def test_cat_writes_raw_bytes(source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    assert main(["archive", str(source), str(archive), *QUICK, "-q"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "cat", str(archive), "--file", "model.safetensors"],
        cwd=ROOT, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    assert done.stdout == SMALL["model.safetensors"]


def test_a_range_is_read_with_the_segments_that_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range in the middle of a tensor of three segments takes the bytes of one record."""
    data = safetensors([("w", "U8", [3 * SEGMENT_BYTES], noise(3, 1 << 20) * (3 * SEGMENT_BYTES >> 20))])
    write(tmp_path / "source", {"large.safetensors": data})
    archive = tmp_path / "archive"
    assert main(["archive", str(tmp_path / "source"), str(archive), *QUICK, "-q"]) == 0
    store = open_store(str(archive), {})
    snapshot = find_snapshot(store)
    item = archived_files(snapshot, load_manifest(store, snapshot))[0]
    taken: list[int] = []
    plain = type(store).get_ranges

    def counted(self: Any, info: Any, ranges: Any, room: Any = None) -> Any:
        taken.extend(stop - start for start, stop in ranges)
        return plain(self, info, ranges, room)

    monkeypatch.setattr(type(store), "get_ranges", counted)
    middle = len(data) // 2
    assert (
        b"".join(map(bytes, range_bytes(store, item, middle, middle + (1 << 20))))
        == (data[middle : middle + (1 << 20)])
    )
    assert taken == [row.stored_bytes for row in item.rows if 0 <= middle - row.offset_bytes < row.n_bytes]


def test_cat_gives_a_range(source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    assert main(["archive", str(source), str(archive), *QUICK, "-q"]) == 0
    cat = [sys.executable, "-m", "pipeline", "cat", str(archive), "--file", "model.safetensors", "--range"]
    done = subprocess.run([*cat, "5:40"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    assert done.stdout == SMALL["model.safetensors"][5:40]
    assert subprocess.run([*cat, "40:5"], check=False, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 2


def test_reading_needs_neither_search_nor_runs(source: Path, tmp_path: Path) -> None:
    """T21: `synth` cannot be imported, `runs/` is gone, and everything that reads still works."""
    archive = tmp_path / "archive"
    assert main(["archive", str(source), str(archive), *QUICK, "-q"]) == 0
    shutil.rmtree(archive / "runs")
    code = (
        "import sys; sys.modules['synth'] = None; sys.modules['ray'] = None\n"
        "from pipeline.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (
        ["restore", archive, tmp_path / "out", "--workers", "2"],
        ["verify", archive, "--workers", "1"],
        ["cat", archive, "--file", "sub/config.json"],
        ["restore", archive, tmp_path / "one", "--tensor", "a"],
        ["list", archive],
        ["info", archive],
    ):
        subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, check=True, capture_output=True)
    assert files_of(tmp_path / "out") == SMALL


def test_runs_from_a_read_only_install_without_home(source: Path, tmp_path: Path) -> None:
    """H06."""
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "NUMBA_CACHE_DIR")}
    archive = tmp_path / "archive"
    command = [sys.executable, "-m", "pipeline", "archive", source, archive, "-q", *QUICK, "--include", "sub"]
    subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=True)


# -- refusals and exit codes --------------------------------------------------------------------


def test_exit_codes(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    assert Ran(capsys, "restore", archive, tmp_path / "out").code == 10
    assert Ran(capsys, "archive", source, archive, "--set", "nonsense=1").code == 2
    refused = Ran(capsys, "archive", source, archive, "--memory", "100MiB")
    assert refused.code == 2
    assert "--memory" in refused.json["error"]["next_step"]
    assert Ran(capsys, "archive", source, archive, "--include", "*.gguf").code == 5
    assert Ran(capsys, "archive", tmp_path / "nowhere", archive).code in (1, 5)
    assert not archive.exists()
    with pytest.raises(SystemExit) as stopped:
        main(["archive"])
    assert stopped.value.code == 2


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: Capture) -> None:
    ran = Ran(capsys, "archive", source, tmp_path / "archive", "--dry-run", "--exclude", "sub")
    assert [item["key"] for item in ran.json["files"]] == ["empty.txt", "model.safetensors"]
    assert not (tmp_path / "archive").exists()


def test_restore_overwrites_only_when_told(source: Path, tmp_path: Path, capsys: Capture) -> None:
    """T13."""
    archive, out = tmp_path / "archive", tmp_path / "out"
    Ran(capsys, "archive", source, archive, *QUICK)
    write(out, {"sub/config.json": b"mine", "empty.txt": b""})
    assert Ran(capsys, "restore", archive, out).code == 1
    assert (out / "sub/config.json").read_bytes() == b"mine"
    assert Ran(capsys, "restore", archive, out, "--keep-going").code == 3
    assert (out / "model.safetensors").read_bytes() == SMALL["model.safetensors"]
    assert Ran(capsys, "restore", archive, out, "--overwrite").code == 0
    assert files_of(out) == SMALL


def test_an_archive_inside_its_source_is_not_archived(tmp_path: Path, capsys: Capture) -> None:
    """K10."""
    folder = write(tmp_path / "source", {"a.bin": noise(1, 100)})
    for _ in range(2):
        assert Ran(capsys, "archive", folder, folder / "archive", *QUICK).json["files"] == 1
    assert Ran(capsys, "archive", folder, folder, *QUICK).code == 2


@pytest.mark.parametrize("leads_to", ["vault", "vault/packs", "."])
def test_an_archive_that_a_link_leads_to_is_not_archived(tmp_path: Path, capsys: Capture, leads_to: str) -> None:
    folder = write(tmp_path / "source", {"a.bin": noise(1, 100)})
    write(tmp_path, {"other/b.bin": b"b"})
    (tmp_path / "vault/packs").mkdir(parents=True)
    (folder / "other").symlink_to(tmp_path / "other")
    (folder / "link").symlink_to(tmp_path / leads_to)
    files = {"a.bin", "other/b.bin"} | ({"link/other/b.bin"} if leads_to == "." else set())
    for _ in range(2):
        assert Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK, "--exclude", "link/source").code == 0
        assert {one["key"] for one in Ran(capsys, "info", tmp_path / "vault").json["files"]} == files


def test_a_source_in_the_folder_of_its_archive_is_archived(tmp_path: Path, capsys: Capture) -> None:
    folder = write(tmp_path / "vault/source", {"sub/a.bin": noise(1, 100)})
    (folder / "link").symlink_to(tmp_path / "vault/packs")
    (tmp_path / "vault/packs").mkdir()
    for _ in range(2):
        assert Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK).json["files"] == 1


def test_a_file_that_cannot_be_read_fails_alone(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "source", {"a.bin": noise(1, 100), "gone.bin": noise(2, 100), "z.bin": noise(3, 100)})
    read = tasks.read_segments

    def remove_first(source: Any, part: Any, room: Any) -> Any:
        if part.info.key == "gone.bin":
            (folder / "gone.bin").unlink()
        return read(source, part, room)

    monkeypatch.setattr(tasks, "read_segments", remove_first)
    ran = Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK)
    assert ran.code == 3
    assert [(item["key"], item["reason"]) for item in ran.json["failures"]] == [("gone.bin", "not_found")]
    monkeypatch.undo()
    assert Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out").code == 0
    assert sorted(files_of(tmp_path / "out")) == ["a.bin", "z.bin"]
    (folder / "gone.bin").write_bytes(noise(2, 100))
    assert Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK).code == 0


def test_a_sabotaged_decoder_is_noticed_before_the_put(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """T14: words that decode wrongly are stored as plain bytes, with an alarm."""
    from operators.kernels.steps import decode_steps
    from operators.ops.merge import Merge

    source_of = Merge.source

    class Wrong:
        whole = False

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def read(self, out: Any) -> None:
            self.inner.read(out)
            out[:1] ^= 1

    def wrong(*args: Any) -> Any:
        good = decode_steps(*args)
        sizes, out = args[2], args[-1]
        if len(sizes) > 1:
            out[:1] ^= 1
        return good

    monkeypatch.setattr(Merge, "source", lambda self, children, stream: Wrong(source_of(self, children, stream)))
    monkeypatch.setattr("operators.kernels.steps.decode_steps", wrong)
    ran = Ran(capsys, "archive", source, tmp_path / "archive", *QUICK)
    assert ran.code == 0
    assert "decode_mismatch" in {item["reason"] for item in ran.json["warnings"]}
    strict = Ran(capsys, "archive", source, tmp_path / "strict", *QUICK, "--strict-format")
    assert (strict.code, {item["reason"] for item in strict.json["failures"]}) == (3, {"decode_mismatch"})
    assert strict.json["content"] == ran.json["content"]
    monkeypatch.undo()
    assert Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == SMALL


# -- resuming -----------------------------------------------------------------------------------


def test_a_failed_run_resumes(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "source", {f"{i}.bin": noise(i, 50_000) for i in range(6)})
    options = [*QUICK, "--set", "task_bytes=60000", "--set", "retries=0"]
    whole = Ran(capsys, "archive", folder, tmp_path / "whole", *options)
    put = commit_module.adopt_receipt
    puts = 0

    def fail_later(*arguments: Any) -> Any:
        nonlocal puts
        puts += 1
        if puts > 3:
            raise KeyboardInterrupt
        return put(*arguments)

    monkeypatch.setattr(tasks, "adopt_receipt", fail_later)
    assert main(["archive", str(folder), str(tmp_path / "archive"), *options, "-q"]) == 130
    monkeypatch.undo()
    assert Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out").code == 10
    resumed = Ran(capsys, "archive", folder, tmp_path / "archive", *options)
    assert resumed.code == 0
    assert resumed.json["resumed_tasks"] == 3
    assert resumed.json["content"] == whole.json["content"]


def test_transient_faults_are_retried(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "source", {"a.bin": noise(1, 100)})
    put = commit_module.adopt_receipt
    faults = [StoreError("a reply", "none", "k")] * 2

    def fail_twice(*arguments: Any) -> Any:
        if faults:
            raise faults.pop()
        return put(*arguments)

    monkeypatch.setattr(tasks, "adopt_receipt", fail_twice)
    assert Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK).code == 0
    assert not faults


# -- damage -------------------------------------------------------------------------------------


def test_damage_is_found_and_named(source: Path, tmp_path: Path, capsys: Capture) -> None:
    """T22: flips at many positions of every object are found at the level that promises it."""
    archive = tmp_path / "archive"
    Ran(capsys, "archive", source, archive, *QUICK)
    objects = objects_of(archive, "packs", "manifests", "snapshots")
    for path in objects:
        data = path.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 40)):
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            found = Ran(capsys, "verify", archive, "--level", "bytes", "--workers", "1")
            assert found.code == 4, (path, position)
            assert found.json["failures"], (path, position)
        path.write_bytes(data)
    pack = next(path for path in objects if "packs" in path.parts)
    data = pack.read_bytes()
    info = Ran(capsys, "info", archive).json
    noise_row = next(s for item in info["files"] for s in item["segments"] if s["tensor"] == "noise")
    position = data.index(noise(1, 9000)[100:200])
    pack.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    for level in ("bytes", "decode"):
        failures = Ran(capsys, "verify", archive, "--level", level).json["failures"]
        assert [item["key"] for item in failures] == [f"model.safetensors@{noise_row['offset_bytes']}/noise"]
    restored = Ran(capsys, "restore", archive, tmp_path / "out", "--keep-going", "--workers", "1")
    assert restored.code == 3
    assert [item["key"] for item in restored.json["failures"]] == ["model.safetensors"]
    assert sorted(files_of(tmp_path / "out")) == ["empty.txt", "sub/config.json"]
    pack.unlink()
    for level in ("manifest", "bytes", "decode"):
        assert Ran(capsys, "verify", archive, "--level", level).code == 4


@pytest.mark.parametrize(
    ("lost", "step"), [("manifests", "brevis rebuild"), ("packs", "another copy, or archive again")]
)
def test_what_is_lost_is_damage(lost: str, step: str, source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    Ran(capsys, "archive", source, archive, *QUICK)
    shutil.rmtree(archive / lost)
    for words in (("restore", archive, tmp_path / "out"), ("restore", archive, tmp_path / "a", "--tensor", "a")):
        ran = Ran(capsys, *words)
        assert ran.code == 4, words
        assert step in ran.json["error"]["next_step"]
    assert main(["cat", str(archive), "--file", "sub/config.json"]) == 4
    assert step in capsys.readouterr().err
    with pytest.raises(DamageError, match=step), pipeline.open(str(archive)).open("sub/config.json") as file:
        file.read()
    for level in ("manifest", "bytes", "decode"):
        assert Ran(capsys, "verify", archive, "--level", level).code == 4


def test_parts_cover_everything(source: Path, tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "archive"
    Ran(capsys, "archive", source, archive, *QUICK)
    segments = Ran(capsys, "verify", archive).json["verified"]
    parts = [Ran(capsys, "verify", archive, "--part", f"{n}/3").json["verified"] for n in (1, 2, 3)]
    assert sum(parts) == segments
    assert Ran(capsys, "verify", archive, "--part", "4/3").code == 2
    assert Ran(capsys, "verify", archive, "--sample", "50%").code == 0


def test_prior_of_another_checkpoint(source: Path, tmp_path: Path, capsys: Capture) -> None:
    first = Ran(capsys, "archive", source, tmp_path / "archive", "--workers", "1")
    prior = tmp_path / "archive/runs" / first.json["run"] / "prior"
    again = Ran(capsys, "archive", source, tmp_path / "other", "--workers", "1", "--prior", prior)
    assert again.code == 0
    stored = tmp_path / "other/runs" / again.json["run"] / "prior"
    assert stored.read_bytes() == prior.read_bytes()
    (tmp_path / "bad.json").write_bytes(b"{}")
    assert Ran(capsys, "archive", source, tmp_path / "bad", "--prior", tmp_path / "bad.json").code == 2


# -- told to stop -------------------------------------------------------------------------------


def test_sigterm_stops_the_run_without_a_commit(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """H05: the file in work has not failed; the run ends with 143 once that is stored, and the next one goes on."""
    folder = write(tmp_path / "source", {f"{i}.bin": noise(i, 50_000) for i in range(9)})
    options = [*QUICK, "--set", "task_bytes=60000"]
    read = tasks.read_segments

    def stop(source: Any, part: Any, room: Any) -> Any:
        if part.info.key == "2.bin":
            os.kill(os.getpid(), signal.SIGTERM)
        return read(source, part, room)

    monkeypatch.setattr(tasks, "read_segments", stop)
    stopped = Ran(capsys, "archive", folder, tmp_path / "archive", *options)
    assert (stopped.code, stopped.json["error"]["kind"]) == (143, "stopped")
    assert not (tmp_path / "archive/snapshots").exists()
    monkeypatch.undo()
    resumed = Ran(capsys, "archive", folder, tmp_path / "archive", *options)
    assert resumed.code == 0
    assert 2 <= resumed.json["resumed_tasks"] < 9


def test_sigterm_is_no_damage(source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    Ran(capsys, "archive", source, tmp_path / "archive", *QUICK)
    told = Report.error

    def told_again(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        told(*arguments)

    monkeypatch.setattr(Report, "error", told_again)
    monkeypatch.setattr(reading.Decoder, "decode", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert Ran(capsys, "verify", tmp_path / "archive").code == 143


# -- what is asked for in other words -----------------------------------------------------------


def test_an_archive_never_lands_in_its_source(tmp_path: Path, capsys: Capture) -> None:
    """K10, however the places are spelt."""
    folder = write(tmp_path / "llama", {"a.bin": noise(1, 100)})
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, tmp_path / "x/../llama", tmp_path / "link", f"{folder}/"):
        assert Ran(capsys, "archive", folder, same, *QUICK).code == 2
    assert files_of(folder) == {"a.bin": noise(1, 100)}
    for _ in range(2):
        ran = Ran(capsys, "archive", f"{tmp_path}/llama*", tmp_path / "llama-vault", *QUICK, "--name", "llama")
        assert (ran.code, ran.json["files"]) == (0, 1)
    assert ran.json["unchanged"]


def test_strict_formats_stay_strict(tmp_path: Path, capsys: Capture) -> None:
    folder = write(tmp_path / "source", {"cut.safetensors": SMALL["model.safetensors"][:-1]})
    for _ in range(2):
        ran = Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK, "--strict-format")
        assert (ran.code, ran.json["failures"][0]["reason"]) == (3, "truncated")
    assert Ran(capsys, "archive", folder, tmp_path / "archive", *QUICK).code == 0


def test_filters_that_match_nothing(source: Path, tmp_path: Path, capsys: Capture) -> None:
    Ran(capsys, "archive", source, tmp_path / "archive", *QUICK)
    for command in (["verify"], ["info"]):
        assert Ran(capsys, *command, tmp_path / "archive", "--include", "nothing").code == 5
    assert Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out", "--include", "nothing").code == 5


def test_wrong_settings_are_usage(source: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bad.json").write_bytes(b"{}")
    assert Ran(capsys, "archive", source, tmp_path / "a", "--prior", tmp_path / "bad.json").code == 2
    for setting in ("synth.sample_words=0", "synth.depth=40", "synth.budget=-1", "synth.finalists=0"):
        assert Ran(capsys, "archive", source, tmp_path / "a", "--set", setting).code == 2


def test_an_attempt_that_could_not_plan_binds_no_other(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """P5: what a faulty night learned from fewer files is not what the next one uses."""
    layout = segments.layout_of

    def refuse(read: Any, key: str, n_bytes: int, **named: Any) -> Any:
        if key.endswith(".safetensors"):
            raise StoreError("an answer", "503", key)
        return layout(read, key, n_bytes, **named)

    monkeypatch.setattr(planning, "layout_of", refuse)
    options = ["--set", "synth.budget=8"]
    assert Ran(capsys, "archive", source, tmp_path / "archive", *options).code == 3
    monkeypatch.undo()
    again = Ran(capsys, "archive", source, tmp_path / "archive", *options)
    clean = Ran(capsys, "archive", source, tmp_path / "clean", *options)
    assert again.json["content"] == clean.json["content"]


def test_restoring_tells_what_it_read(source: Path, tmp_path: Path, capsys: Capture) -> None:
    Ran(capsys, "archive", source, tmp_path / "archive", *QUICK)
    ran = Ran(capsys, "restore", tmp_path / "archive", tmp_path / "out", "-v")
    assert 0 < ran.json["stored_bytes"] < ran.json["source_bytes"]
    assert "model.safetensors: restored" in ran.err

"""P17, T26: what an operator reads who mistook a place, lacks a right or meets odd files; and the exit code.

Each message says what was expected, what was found, where, and what to do next, and says it once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.locations import open_source
from tests.cases import bf16, noise, safetensors
from tests.pipeline.commands import QUICK, Capture, Patch, Ran, files_of, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "llama", {"a.bin": noise(1, 300), "b.bin": noise(2, 300)})


@pytest.fixture
def archive(source: Path, tmp_path: Path, capsys: Capture) -> Path:
    assert Ran(capsys, "archive", source, tmp_path / "vault", *QUICK).code == 0
    return tmp_path / "vault"


def check_refused(ran: Ran, code: int, *parts: object) -> None:
    """One line that names all of `parts`, with an expectation and a next step that are told once."""
    assert ran.code == code, ran.err
    lines = [line for line in ran.err.splitlines() if line.startswith("brevis: ")]
    assert len(lines) == 1, ran.err
    message, step = ran.json["error"]["message"], ran.json["error"]["next_step"]
    for part in ("expected ", ", found ", *map(str, parts)):
        assert part in message
    assert step
    assert message.endswith(f"; {step}")
    assert message.count(step) == 1


# -- places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", ".", "packs", "packs/00/x", "runs", "snapshots/llama"])
@pytest.mark.parametrize("options", [(), ("--overwrite", "--tensor", "w")], ids=["files", "tensor"])
def test_nothing_is_restored_into_its_archive(
    archive: Path, capsys: Capture, inside: str, options: tuple[str, ...]
) -> None:
    before = files_of(archive)
    (archive.parent / "link").symlink_to(archive)
    for place in (archive / inside, archive.parent / "link" / inside):
        check_refused(Ran(capsys, "restore", archive, place, *options), 2, "apart from the archive", place)
    assert files_of(archive) == before


@pytest.mark.parametrize("inside", ["packs", "runs", "manifests/x*"])
def test_no_part_of_an_archive_is_its_source(archive: Path, capsys: Capture, inside: str) -> None:
    """P6: what is written to the archive would be written to the source."""
    before = files_of(archive)
    ran = Ran(capsys, "archive", archive / inside, archive, *QUICK, "--name", "own")
    check_refused(ran, 2, "apart from the archive", archive / inside)
    ran = Ran(capsys, "archive", archive / inside, archive, *QUICK, "--checkpoint-glob", "*")
    check_refused(ran, 2, "apart from the archive", archive / inside)
    assert files_of(archive) == before


def test_places_that_are_none(source: Path, archive: Path, tmp_path: Path, capsys: Capture) -> None:
    file = source / "a.bin"
    check_refused(Ran(capsys, "archive", source, file / "vault", *QUICK), 1, file / "vault", "a folder to write to")
    check_refused(Ran(capsys, "archive", source, file, *QUICK), 1, file, "a folder")
    check_refused(Ran(capsys, "archive", tmp_path / "nowhere", archive, *QUICK), 1, tmp_path / "nowhere", "nothing")
    check_refused(Ran(capsys, "restore", archive, file), 1, file, "a folder")
    for command in (("verify",), ("restore", tmp_path / "out"), ("list",), ("cat", "--file", "x"), ("gc",)):
        check_refused(Ran(capsys, command[0], source, *command[1:]), 10, source, "an archive")
    check_refused(Ran(capsys, "archive", source, "nosuch://x", *QUICK), 2, "nosuch")


def test_a_loop_of_links_is_told(source: Path, archive: Path, tmp_path: Path, capsys: Capture) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    check_refused(Ran(capsys, "restore", archive, loop / "x"), 1, "loop/x", "links")
    check_refused(Ran(capsys, "archive", loop, archive, *QUICK), 1, "loop", "nothing")
    check_refused(Ran(capsys, "archive", source, loop, *QUICK), 1, "loop")


@pytest.mark.parametrize(
    ("url", "code", "found"),
    [("zip://x", 1, "Is a directory"), ("ftp://127.0.0.1:9/x", 1, "refused"), ("github://x", 2, "'org' and 'repo'")],
)
def test_a_store_that_cannot_be_made(
    source: Path, tmp_path: Path, capsys: Capture, url: str, code: int, found: str
) -> None:
    check_refused(Ran(capsys, "list", url), code, url, found, "check the URL")
    check_refused(Ran(capsys, "archive", url, tmp_path / "vault", *QUICK), code, url, found, "check the URL")
    check_refused(Ran(capsys, "archive", source, url, *QUICK), code, url, found, "check the URL")


@pytest.mark.parametrize("name", ["nobody", "llama/9", "llama/x", "llama/1/1", "/"])
def test_snapshots_that_are_none_are_told_with_those_that_are(
    archive: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    for command in (("verify",), ("restore", tmp_path / "out"), ("info",)):
        ran = Ran(capsys, command[0], archive, *command[1:], "--snapshot", name)
        check_refused(ran, 10, archive, name, "known: llama")


# -- rights and room ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", [(), ("--storage-option", "profile=nobody")], ids=["none", "profile"])
def test_credentials_that_are_not_there(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch, option: tuple[str, ...]
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    stores = ("--storage-option", "endpoint_url=http://127.0.0.1:9", *option)
    ran = Ran(capsys, "archive", source, "s3://bucket/vault", *QUICK, *stores)
    check_refused(ran, 1, "s3://bucket/vault", "access", "check credentials")
    assert ran.json["error"]["kind"] == "denied"


def test_a_disk_without_room(tmp_path: Path, capsys: Capture) -> None:
    """No pack, no snapshot, no leftover; with room again the run goes on. A restore leaves no half of a file."""
    source, vault = write(tmp_path / "llama", {"a.bin": noise(1, 1 << 21)}), tmp_path / "vault"
    with files_of_at_most(1 << 20):
        ran = Ran(capsys, "archive", source, vault, *QUICK)
    check_refused(ran, 1, source, "none: ", "File too large")
    assert not [name for name in files_of(vault) if name.startswith(("packs", "snapshots", "."))]
    assert Ran(capsys, "archive", source, vault, *QUICK).code == 0
    with files_of_at_most(1 << 20):
        check_refused(Ran(capsys, "restore", vault, tmp_path / "out"), 1, "a.bin", "File too large")
    assert files_of(tmp_path / "out") == {}
    assert Ran(capsys, "restore", vault, tmp_path / "out").code == 0
    assert files_of(tmp_path / "out") == files_of(source)


@contextlib.contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let the system refuse to make a file longer, as a full disk does, midway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("info",), ("cat", "--file", "a.bin")], ids=" ".join)
def test_an_output_without_room(archive: Path, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        told = standing(words[0], archive, *words[1:], stdout=full)
    assert told.returncode == 1
    assert told.stderr.splitlines() == [told.stderr.strip()]
    assert told.stderr.startswith("brevis: stdout: expected an output that takes the result, found No space left")


def test_messages_without_room_are_no_failure(source: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        told = standing("archive", source, tmp_path / "vault", *QUICK, "--no-progress", stdout=full, stderr=full)
        assert told.returncode == 1
        told = standing("archive", source, tmp_path / "vault", *QUICK, "--json", stdout=subprocess.PIPE, stderr=full)
    assert (told.returncode, json.loads(told.stdout)["snapshot"]) == (0, "llama/1")  # which the first has committed


def test_a_reader_of_messages_that_goes_ends_nothing(source: Path, tmp_path: Path) -> None:
    """`brevis archive -v 2>&1 >/dev/null | head`: the run goes on, and its exit code is that of the run."""
    read, write_end = os.pipe()
    os.close(read)
    with os.fdopen(write_end, "w") as gone:
        told = standing(
            "archive", source, tmp_path / "vault", *QUICK, "-v", "--json", stdout=subprocess.PIPE, stderr=gone
        )
        assert (told.returncode, json.loads(told.stdout)["snapshot"]) == (0, "llama/1")
        told = standing("archive", tmp_path / "none", tmp_path / "vault", "-v", stdout=gone, stderr=gone)
        assert told.returncode == 1


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_closed_streams_lead_nowhere(source: Path, tmp_path: Path, closed: tuple[int, ...]) -> None:
    words = ["archive", str(source), str(tmp_path / "vault"), *QUICK, "--no-progress", "--json"]
    code = (
        f"import os, sys; [os.close(n) for n in {closed}]; os.execv(sys.executable, sys.orig_argv[:1] + sys.argv[1:])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, "-m", "pipeline", *words], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert bool(told.stdout) == (1 not in closed)
    assert (tmp_path / "vault/snapshots").exists()


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "src", {"gewicht-ä.bin": b"1"})
    assert Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK).code == 0
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    told = standing("info", tmp_path / "vault", stdout=subprocess.PIPE)
    assert (told.returncode, told.stderr) == (0, "")
    assert "gewicht-\\xe4.bin" in told.stdout


def test_an_interrupt_is_told_as_json(archive: Path, capsys: Capture, monkeypatch: Patch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.commands.open_archive", interrupted)
    check_refused(Ran(capsys, "list", archive), 130, "an interrupt", "run again to resume")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("gc", "x", "--min-age", "-1"), ("--min-age", "whole number from 0 on", "'-1'")),
        (("prune", "x", "--keep-last", "two"), ("--keep-last", "whole number from 0 on", "'two'")),
        (("list", "x", "--storage-option", "abc"), ("--storage-option", "K=V", "'abc'")),
    ],
)
def test_an_option_says_what_it_takes(capsys: Capture, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert all(part in told for part in parts)


def test_a_tensor_goes_to_the_bucket_that_a_url_names(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    folder = write(tmp_path / "src", {"m.safetensors": safetensors([("w", "BF16", [100], bf16(1, 100))])})
    assert Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK).code == 0
    monkeypatch.chdir(tmp_path)
    url = "memory://told.safetensors"
    assert Ran(capsys, "restore", tmp_path / "vault", url, "--tensor", "w").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src", "vault"]
    assert [info.key for info in open_source(url).list()] == ["w.safetensors"]


def standing(*words: object, stdout: Any, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *map(str, words)]
    return subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False)


# -- odd files ----------------------------------------------------------------------------------


def test_a_name_writes_no_line_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    """P12: neither a line of a log nor a command of a terminal, whichever message the name is in."""
    odd = "a\nbrevis: all is well\x1b[2J\r.safetensors"
    folder = write(tmp_path / "src", {odd: b"no header", "b.bin": b"1"})
    os.mkfifo(folder / "pipe\n\x1b")
    ran = Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK, "--strict-format", "-v")
    assert ran.code == 3
    told = ran.err
    for command in (["verify"], ["restore", str(tmp_path / "out"), "-v"], ["info"]):
        told += Ran(capsys, command[0], tmp_path / "vault", *command[1:]).err
    pack = next((tmp_path / "vault/packs").rglob("*/*"))
    pack.write_bytes(bytes(pack.stat().st_size))
    for command in (
        ["verify"],
        ["restore", str(tmp_path / "again"), "--keep-going", "-v"],
        ["restore", str(tmp_path / "one")],
    ):
        told += Ran(capsys, command[0], tmp_path / "vault", *command[1:]).err
    assert "\x1b" not in told
    assert "\r" not in told
    assert not any(line.startswith("brevis: all is well") for line in told.splitlines())
    assert told.count("\\nbrevis: all is well\\x1b[2J\\r") > 5


def test_a_key_is_told_once(tmp_path: Path, capsys: Capture) -> None:
    folder = write(tmp_path / "src", {"b.bin": b"1"})
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    ran = Ran(capsys, "archive", folder, tmp_path / "vault", *QUICK)
    assert ran.code == 3
    lines = [line for line in ran.err.splitlines() if line.startswith("failed: ")]
    assert [line.split(":")[1] for line in lines] == [" broken", " pipe"]
    assert all(line.count("broken") + line.count("pipe") <= 2 for line in lines)
    assert all(line.endswith("; repair or remove it, or leave it out with --exclude") for line in lines)

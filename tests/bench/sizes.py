"""Bytes of whole archives beside what other compressors make of the same file, and the bars on them."""

from __future__ import annotations

import filecmp
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from tests.bench.peers import ALL, ZIPNN, record_sizes, recorded_sizes
from tests.bench.report import Table
from tests.checkpoints import CI_SET, path
from tests.processes import Finished, brevis

SMALL_BYTES = 16_000_000
"""Below this much source the packs alone are compared: manifest and snapshot are then most of the rest."""
ABOVE_ZIPNN = {"minilm-f32": 0.003, "fracast-f32": 0.02, "silero-f32": 0.02}
"""Files on which ZipNN may be smaller by this part, as long as no leaf is conditioned; on others it may not."""


@dataclass(frozen=True)
class Archived:
    """A checkpoint archived, verified, restored and compared; `finished` holds what each command took."""

    name: str
    source_bytes: int
    stored_bytes: int
    pack_bytes: int
    finished: Mapping[str, Finished] = field(default_factory=dict)

    @property
    def compared_bytes(self) -> int:
        """What is set beside the output of other compressors."""
        return self.pack_bytes if self.source_bytes < SMALL_BYTES else self.stored_bytes


def dtype_of(name: str) -> str:
    """Return the dtype that a checkpoint's name ends in."""
    dtype = name.rsplit("-", 1)[1].upper()
    return "F8_E4M3" if dtype == "F8" else dtype


def archive(name: str, *options: str, verify: bool = True, before: Callable[[], object] | None = None) -> Archived:
    """Archive one checkpoint alone, through the command line; verify it, restore it and compare the bytes.

    `before` is called before each command that writes.
    """
    return archive_file(name, path(name), *options, verify=verify, before=before)


def archive_file(
    name: str, file: Path, *options: str, verify: bool = True, before: Callable[[], object] | None = None
) -> Archived:
    """Do as `archive` does with any file, under a name for the tables."""
    before = before or (lambda: None)
    with tempfile.TemporaryDirectory() as scratch:
        place, target = Path(scratch, "archive"), Path(scratch, "target")
        before()
        finished = {"archive": brevis("archive", file, place, "--json", *options)}
        summary = json.loads(finished["archive"].stdout)
        if verify:
            finished["verify"] = brevis("verify", place, *options)
        before()
        finished["restore"] = brevis("restore", place, target, *options)
        assert filecmp.cmp(file, target / file.name, shallow=False), f"{name} was not restored bit for bit"
        pack_bytes = sum(pack.stat().st_size for pack in (place / "packs").rglob("*") if pack.is_file())
        return Archived(name, file.stat().st_size, summary["stored_bytes"], pack_bytes, finished)


def bars(archived: Archived, peers: dict[str, int]) -> dict[str, bool]:
    """Return each bar on the size of one archive, and whether it holds."""
    margin = ABOVE_ZIPNN.get(archived.name, 0.0)
    against_zipnn = f"{archived.name}: smaller than ZipNN" + (f", or at most {margin:.1%} above" if margin else "")
    return {
        against_zipnn: archived.compared_bytes < peers[ZIPNN.name] * (1 + margin),
        **{
            f"{archived.name}: smaller than {peer}": archived.compared_bytes < peers[peer]
            for peer in ("zstd -19", "xz -6")
        },
    }


def measure_peers(names: Sequence[str] = CI_SET) -> Table:
    """Compress every checkpoint with every peer, check that it comes back, and record the sizes."""
    sizes: dict[str, dict[str, int]] = {}
    table = Table("Bytes of other compressors", ["checkpoint", *(peer.name for peer in ALL)])
    for name in names:
        data = path(name).read_bytes()
        sizes[name] = {}
        for peer in ALL:
            compressed = peer.compress(peer.prepare(data), dtype_of(name))
            assert peer.content(peer.decompress(compressed, dtype_of(name))) == data, (
                f"{peer.name} lost bytes of {name}"
            )
            sizes[name][peer.name] = len(compressed)
        table.rows.append([name, *sizes[name].values()])
    record_sizes(sizes)
    return table


def table(names: Sequence[str] = CI_SET) -> Table:
    """Set the archives of `names` beside the recorded sizes of the peers."""
    recorded = recorded_sizes()
    peers = [peer.name for peer in ALL]
    result = Table("Size of the archive, % of the file", ["checkpoint", "bytes", "brevis", *peers])
    source_bytes = 0
    totals = dict.fromkeys(["brevis", *peers], 0)
    savings: dict[str, list[float]] = {name: [] for name in totals}
    for name in names:
        archived = archive(name)
        print(f"{name}: {archived.compared_bytes:,} bytes", file=sys.stderr, flush=True)
        sizes = {"brevis": archived.compared_bytes, **recorded[name]}
        source_bytes += archived.source_bytes
        for compressor in totals:
            totals[compressor] += sizes[compressor]
            savings[compressor].append(1 - sizes[compressor] / archived.source_bytes)
        percents = [round(100 * sizes[compressor] / archived.source_bytes, 2) for compressor in totals]
        result.rows.append([name, archived.source_bytes, *percents])
        result.passed |= bars(archived, recorded[name])
    result.rows.append(["total", source_bytes, *(round(100 * total / source_bytes, 2) for total in totals.values())])
    result.rows.append(["mean saving, %", len(names), *(round(100 * fmean(part), 2) for part in savings.values())])
    result.notes = [
        "brevis: packs, manifest and snapshot of an archive of that file alone; below 16 MB of source its packs",
        "each archive was verified, restored and compared; the peers' bytes were decompressed and compared",
        "`python -m tests.bench peers` measures the peers anew",
    ]
    return result

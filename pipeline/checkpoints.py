"""Which checkpoints lie below a source, and which of them somebody still writes.

A checkpoint is a folder, or a single object, whose key below the source matches a pattern part by part: ``*/step-*``
finds ``llama/step-100``. It is left for another night while it grows: an object changed a moment ago, or it lacks, or
still has, what the framework that writes it leaves until the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from operators.errors import StoreError, UsageError

TRACKER_BYTES_MAX = 1 << 10
"""A tracker file holds the name of one step."""
PARTIAL_NAMES = re.compile(
    r"tmp-.*"  # Hugging Face Trainer stages tmp-checkpoint-500 and renames it
    r"|.*\.orbax-checkpoint-tmp.*"  # Orbax, of a checkpoint and of each of its items
    r"|.*-unfinished"  # NeMo
    r"|.*\.(tmp|temp|part|partial|incomplete|crdownload|aria2)"  # downloads and copies
)
"""Names of files and folders that are renamed or removed when they are whole."""
TRACKERS: Mapping[str, re.Pattern[str]] = {
    "latest": re.compile(r"global_step(\d+)"),  # DeepSpeed: the name of the newest folder
    "latest_checkpointed_iteration.txt": re.compile(r"(?:iter_)?(\d+)"),  # Megatron: the number of iter_0000100
}
"""Files beside the folders of steps, written once a step is whole, and how they and the folders give its number."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint below a source.

    Attributes
    ----------
    name : str
        Its key below the source, without a slash at the end.
    keys : tuple of str
        Its objects, below the source.
    """

    name: str
    keys: tuple[str, ...]


def find_checkpoints(keys: Iterable[str], pattern: str) -> list[Found]:
    """Return the checkpoints whose names match `pattern`, in the order in which `keys` name them.

    Parameters
    ----------
    keys : iterable of str
        Of every object, below the source.
    pattern : str
        Parts with ``*``, ``?`` and ``[]`` as in a shell, between slashes; each part matches one part of a key.

    Raises
    ------
    UsageError
        The pattern has an empty part.
    """
    parts = pattern.strip("/").split("/")
    if not all(parts):
        raise UsageError("parts between slashes, such as */step-*", repr(pattern), "--checkpoint-glob")
    found: dict[str, list[str]] = {}
    for key in keys:
        named = key.split("/")
        if len(named) >= len(parts) and all(map(fnmatchcase, named, parts)):
            found.setdefault("/".join(named[: len(parts)]), []).append(key)
    return [Found(name, tuple(of_it)) for name, of_it in found.items() if name]


def why_unfinished(
    checkpoint: Found, keys: frozenset[str], read: Callable[[str], bytes], youngest_seconds: int, settle_seconds: int
) -> str | None:
    """Return what shows that somebody still writes `checkpoint`, or None where nothing does.

    Parameters
    ----------
    checkpoint : Found
    keys : frozenset of str
        Of every object below the source.
    read : callable
        Returns the content of a small object.
    youngest_seconds : int
        Age of the object that changed last.
    settle_seconds : int
        How long all of it must have been at rest.
    """
    if youngest_seconds < settle_seconds:
        return f"an object changed {youngest_seconds} s ago, and {settle_seconds} s of rest are asked for"
    return next(_markers(checkpoint, keys, read), None)


def _markers(checkpoint: Found, keys: frozenset[str], read: Callable[[str], bytes]) -> Iterator[str]:
    folder, slash, own = checkpoint.name.rpartition("/")
    for key in (checkpoint.name, *checkpoint.keys):
        inside = key[len(folder) + len(slash) :]
        partial = next((part for part in inside.split("/") if PARTIAL_NAMES.fullmatch(part)), None)
        if partial is not None:
            yield f"{partial} is a name that a writer gives to what is not whole yet"
    if f"{checkpoint.name}-unfinished" in keys:  # NeMo puts it beside the checkpoint
        yield f"{own}-unfinished lies beside it"
    yield from _missing_metadata(checkpoint.keys)
    for name, pattern in TRACKERS.items():
        step = pattern.fullmatch(own)
        tracker = f"{folder}{slash}{name}"
        if step is None or tracker not in keys:
            continue
        last = pattern.fullmatch(_text(read, tracker))
        if last is not None and int(last[1]) < int(step[1]):
            yield f"{name} names step {int(last[1])}, which is older"


def _missing_metadata(keys: Sequence[str]) -> Iterator[str]:
    """``torch.distributed.checkpoint`` writes ``.metadata`` after all shards."""
    folders = {key.rpartition("/")[0] for key in keys if key.endswith(".distcp")}
    for folder in sorted(folders):
        if f"{folder}/.metadata" not in keys:
            yield f"{folder} has shards and no .metadata yet"


def _text(read: Callable[[str], bytes], key: str) -> str:
    try:
        return read(key).decode("utf-8", "replace").strip()
    except StoreError:
        return ""

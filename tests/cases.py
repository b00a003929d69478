"""Files that people really meet: odd, broken and plain ones, each with the verdict that it must get.

A case is one or several files. Its id is that of a public report's kind: A odd but valid safetensors,
B broken ones, C dtypes, D contents, E other files, R rebuilds of files with known public properties.
Everything is deterministic and small; what only shows at full size has parameters.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from operators.words import DTYPES
from tests.strategies import make_words

Entry: TypeAlias = tuple[str, str, Sequence[int], bytes]
"""Name, dtype, shape and bytes of a tensor."""
Build: TypeAlias = Callable[[], dict[str, bytes]]


@dataclass(frozen=True)
class Case:
    """Files by key, and what must be said of each."""

    id: str
    build: Build
    format: str
    reason: str | None

    @property
    def files(self) -> dict[str, bytes]:
        return self.build()


CASES: list[Case] = []


def case(ids: str, reason: str | None = None, kind: str = "safetensors") -> Callable[[Callable[[], Any]], Build]:
    """Register the case that a function builds: the bytes of one file, or files by key.

    `ids` is an id and a word; the word names the file of a function that returns bytes.
    """

    def register(function: Callable[[], Any]) -> Build:
        def build() -> dict[str, bytes]:
            made = function()
            return made if isinstance(made, dict) else {f"{ids}.safetensors": made}

        CASES.append(Case(ids, build, kind, reason))
        return build

    return register


def safetensors(
    tensors: Iterable[Entry], metadata: dict[str, str] | None = None, pad_to: int = 0, padding: bytes = b" "
) -> bytes:
    """Return a file with its tensors in order, its header padded to at least `pad_to` bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    blobs, offset = [], 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        blobs.append(data)
        offset += len(data)
    return raw(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(pad_to, padding), *blobs)


def raw(text: bytes | str, *data: bytes) -> bytes:
    """Return a file with this header text, sound or not."""
    encoded = text.encode() if isinstance(text, str) else text
    return b"".join((struct.pack("<Q", len(encoded)), encoded, *data))


def entry(dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]") -> str:
    """Return the text of an entry of a header."""
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def noise(seed: int, n_bytes: int) -> bytes:
    """Return bytes that nothing compresses."""
    return hashlib.shake_256(str(seed).encode()).digest(n_bytes)


def weights(seed: int, n_elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return normal values of standard deviation 0.02."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return (rng.standard_normal(n_elements) * 0.02).astype("<f4")


def bf16(seed: int, n_elements: int) -> bytes:
    """Return weights truncated to BF16."""
    return (weights(seed, n_elements).view("<u4") >> 16).astype("<u2").tobytes()


# -- A: odd, but valid --------------------------------------------------------------------------


@case("A01-no-tensors")
def _() -> bytes:
    return raw("{}")


@case("A01-no-tensors-padded")
def _() -> bytes:
    return raw("{}      ")


@case("A02-metadata-alone")
def _() -> bytes:
    return raw('{"__metadata__":{"crc":"12"}}')


@case("A03-metadata-empty")
def _() -> bytes:
    return raw('{"__metadata__":{}}')


@case("A06-metadata-of-any-text")
def _() -> bytes:
    metadata = {
        "config": json.dumps({f"key {i}": ["\\", '"', i] for i in range(9000)}),
        "thumbnail": "data:image/jpeg;base64," + "/9j/4AAQ" * 500,
        "😀 “quotes”": '"\\\u0000\t ',
        "": "{[}],:",
    }
    return safetensors([("w", "F32", [2], bytes(8))], metadata)


@case("A08-zero-size")
def _() -> bytes:
    return safetensors(
        [
            ("first", "F32", [0], b""),
            ("also", "I64", [0, 5], b""),
            ("w", "U8", [3], b"abc"),
            ("mid", "F16", [3, 0], b""),
            ("x", "U8", [2], b"de"),
            ("last", "BF16", [0], b""),
            ("end", "F64", [0, 0], b""),
        ]
    )


@case("A08-zero-size-alone")
def _() -> bytes:
    return safetensors([("huge", "F32", [0, 10**12], b""), ("b", "U8", [0], b"")])


@case("A09-scalars")
def _() -> bytes:
    return safetensors(
        [("bn.num_batches_tracked", "I64", [], struct.pack("<q", 7)), ("scale", "F32", [], struct.pack("<f", 0.5))]
    )


@case("A10-any-order")
def _() -> bytes:
    text = (
        f'{{"z":{entry(shape="[4]", offsets="[6,10]")},"a":{{"shape":[3],"data_offsets":[0,6],"dtype":"BF16"}},\n\t'
        f'"m" : {{ "data_offsets" : [ 10 , 12 ], "dtype" : "U8" , "shape" : [ 2 , 1 ] }} }}'
    )
    return raw(text, b"0123456789ab")


@case("A11-padded-by-one")
def _() -> bytes:
    return safetensors([("w", "U8", [2], b"ab")], pad_to=58)


@case("A11-padded-by-a-page")
def _() -> bytes:
    return safetensors([("w", "F32", [2], bytes(8))], {"format": "pt"}, pad_to=4173)


@case("A11-not-a-multiple-of-eight")
def _() -> bytes:
    return safetensors([("w", "F32", [2], bytes(8))], pad_to=101)


@case("A14-names")
def _() -> bytes:
    names = ["", "n" * (1 << 20), "../../x", "a\0b\nc", "caf\u00e9", "cafe\u0301", "模型😀\u200f", "dtype", "a/b\\c"]
    return safetensors([(name, "U8", [1], bytes([place])) for place, name in enumerate(names)])


@case("A14-escaped-name")
def _() -> bytes:
    return raw(f'{{"a\\/b\\u0041\\ud83d\\ude00":{entry()}}}', b"ab")


@case("A17-unaligned")
def _() -> bytes:
    return safetensors([("u", "U8", [3], b"abc"), ("f", "F32", [2000], weights(1, 2000).tobytes())])


def many_tensors(count: int, pad_to: int) -> bytes:
    """One byte each, as in the report of a file with 1,290,000 of them behind a header of 132,095,296 bytes."""
    entries = (
        b'"%08d.sample.features.and.long.key":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1)
        for i in range(count)
    )
    return raw((b"{" + b",".join(entries) + b"}").ljust(pad_to), bytes(i & 255 for i in range(count)))


@case("A18-many-tensors")
def _() -> bytes:
    return many_tensors(12_900, 1_320_953)


def small_tensors(count: int) -> bytes:
    """Tensors of 2 to 64 bytes in two dtypes."""
    entries, offset = [], 0
    for i in range(count):
        n_bytes = 2 + 2 * (i * 7 % 32)
        name = b"BF16" if i % 3 else b"F16"
        entries.append(
            b'"t.%07d":{"dtype":"%s","shape":[%d],"data_offsets":[%d,%d]}'
            % (i, name, n_bytes // 2, offset, offset + n_bytes)
        )
        offset += n_bytes
    return raw(b"{" + b",".join(entries) + b"}", bytes(offset))


@case("A19-small-tensors")
def _() -> bytes:
    return small_tensors(10_000)


# -- B: invalid or broken -----------------------------------------------------------------------


def broken(ids: str, reason: str, data: Callable[[], bytes]) -> None:
    """Register a file that is stored as bytes, under `reason`."""
    case(ids, reason, "opaque")(data)


_TWO = [("a", "U8", [100], noise(1, 100)), ("b", "F32", [2000], weights(2, 2000).tobytes())]
broken("B01-nothing", "empty_file", lambda: b"")
broken("B01-seven-bytes", "too_short", lambda: b"\x02\0\0\0\0\0\0")
broken("B01-eight-zeros", "empty_header", lambda: bytes(8))
broken("B01-zeros", "empty_header", lambda: bytes(5000))
broken("B02-header-beyond", "header_beyond_file", lambda: struct.pack("<Q", 400) + b'{"a":{"dtype"')
broken("B02-200-MB-in-10-bytes", "header_beyond_file", lambda: struct.pack("<Q", 200_000_000) + b"{}")
broken("B02-all-ones", "header_beyond_file", lambda: b"\xff" * 8 + b"{}")
broken("B02-one-byte-short", "header_beyond_file", lambda: raw("{}")[:-1])
broken("B03-one-byte-short", "truncated", lambda: safetensors(_TWO)[:-1])
broken("B03-half", "truncated", lambda: safetensors(_TWO)[: len(safetensors(_TWO)) // 2])
broken("B03-no-data", "truncated", lambda: raw(f'{{"a":{entry()}}}'))
broken("B03-empty-tensor-beyond", "truncated", lambda: raw(f'{{"a":{entry(shape="[0]", offsets="[9,9]")}}}', b"ab"))
broken("B06-same-range", "overlap", lambda: raw(f'{{"a":{entry()},"b":{entry()}}}', b"ab"))
broken("B06-partial", "overlap", lambda: raw(f'{{"a":{entry()},"b":{entry(offsets="[1,3]")}}}', b"abc"))
broken("B06-within", "overlap", lambda: raw(f'{{"a":{entry(shape="[9]", offsets="[0,9]")},"b":{entry()}}}', bytes(9)))
broken("B07-reversed", "invalid_offsets", lambda: raw(f'{{"a":{entry(offsets="[2,0]")}}}', b"ab"))
broken("B09-size", "size_mismatch", lambda: raw(f'{{"a":{entry(shape="[3]")}}}', b"ab"))
broken("B09-scalar", "size_mismatch", lambda: raw(f'{{"a":{entry(shape="[]")}}}', b"ab"))
broken("B09-half-a-byte", "size_mismatch", lambda: raw(f'{{"a":{entry(chr(34) + "F4" + chr(34), "[3]")}}}', b"ab"))
broken("B10-overflow", "size_mismatch", lambda: raw(f'{{"a":{entry(shape="[4294967296,4294967296,2]")}}}', b"ab"))
broken("B10-rank", "header_over_limit", lambda: raw(f'{{"a":{entry(shape=str([1] * 32 + [2]))}}}', b"ab"))
for _word, _text in {
    "float-shape": entry(shape="[2.0]"),
    "exponent": entry(offsets="[0,2e0]"),
    "minus-zero": entry(offsets="[-0,2]"),
    "negative": entry(shape="[-2]"),
    "negative-offset": entry(offsets="[-2,0]"),
    "string-offsets": entry(offsets='["0","2"]'),
    "string-shape": entry(shape='"2"'),
    "true": entry(shape="[true,2]"),
    "null-dtype": entry(dtype="null"),
    "three-offsets": entry(offsets="[0,2,2]"),
    "no-shape": '{"dtype":"U8","data_offsets":[0,2]}',
    "number": "2",
    "list": "[0,2]",
    "empty-entry": "{}",
    "infinity": entry(offsets="[0,Infinity]"),
    "many-digits": entry(offsets=f"[0,{'9' * 5000}]"),
    "nested": entry(shape="[{}]"),
}.items():
    broken(f"B11-{_word}", "header_type", lambda text=_text: raw(f'{{"a":{text}}}', b"ab"))  # type: ignore[misc]
broken("B11-metadata-number", "header_type", lambda: raw('{"__metadata__":{"a":1}}'))
broken("B11-metadata-list", "header_type", lambda: raw('{"__metadata__":[]}'))
broken("B12-leading-zero", "header_syntax", lambda: raw(f'{{"a":{entry(offsets="[00,2]")}}}', b"ab"))
broken("B12-cut-header", "header_syntax", lambda: raw('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', b"ab"))
broken("B12-trailing-comma", "header_syntax", lambda: raw(f'{{"a":{entry()},}}', b"ab"))
broken("B12-no-comma", "header_syntax", lambda: raw(f'{{"a":{entry()}"b":{entry()}}}', b"ab"))
broken("B12-two-objects", "header_syntax", lambda: raw(f'{{"a":{entry()}}}{{}}', b"ab"))
broken("B12-nul-padding", "header_syntax", lambda: raw(f'{{"a":{entry()}}}\0\0\0', b"ab"))
broken("B12-not-utf8", "header_syntax", lambda: raw(b'{"\xff":' + entry().encode() + b"}", b"ab"))
broken("B12-half-surrogate", "header_syntax", lambda: raw(f'{{"\\ud800":{entry()}}}', b"ab"))
broken("B12-raw-newline", "header_syntax", lambda: raw(f'{{"a\nb":{entry()}}}', b"ab"))
broken("B12-bad-escape", "header_syntax", lambda: raw(f'{{"a\\x":{entry()}}}', b"ab"))
broken("B12-deep", "header_syntax", lambda: raw(f'{{"a":{entry(shape="[" * 20_000 + "]" * 20_000)}}}', b"ab"))
broken("B13-duplicate", "duplicate_key", lambda: raw(f'{{"a":{entry()},"a":{entry()}}}', b"ab"))
broken("B13-other-range", "duplicate_key", lambda: raw(f'{{"a":{entry()},"a":{entry(offsets="[2,4]")}}}', b"abcd"))
broken("B13-escaped", "duplicate_key", lambda: raw(f'{{"a":{entry()},"\\u0061":{entry(offsets="[2,4]")}}}', b"abcd"))
broken("B13-metadata", "duplicate_key", lambda: raw('{"__metadata__":{},"__metadata__":{}}'))
broken("B13-within-metadata", "duplicate_key", lambda: raw('{"__metadata__":{"a":"1","a":"2"}}'))
broken("B13-within-entry", "duplicate_key", lambda: raw('{"a":{"dtype":"U8","dtype":"U8","shape":[2]}}', b"ab"))


@case("B04-trailing", "trailing_bytes")
def _() -> bytes:
    return safetensors(_TWO) + b"tail"


@case("B04-trailing-alone", "trailing_bytes")
def _() -> bytes:
    return raw("{}", b"tail")


@case("B05-hole", "hole")
def _() -> bytes:
    second = entry('"F32"', "[2000]", "[107,8107]")
    return raw(f'{{"a":{entry()},"b":{second}}}', b"ab", noise(3, 105), weights(3, 2000).tobytes())


@case("B05-hole-at-start", "hole")
def _() -> bytes:
    return raw(f'{{"a":{entry(offsets="[5,7]")}}}', b"holesab")


@case("B08-unknown-dtype", "unknown_dtype")
def _() -> bytes:
    return safetensors([("w", "X9", [2, 3], noise(4, 9000)), ("e", "", [], b"abc"), ("c", "C128", [1], bytes(16))])


def lfs_pointer() -> bytes:
    """Return the text that stands where weights should be."""
    oid = hashlib.sha256(b"x").hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 4976698672\n".encode()


def archive_of(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file without clocks."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name), data, method)
    return sink.getvalue()


PICKLE = b"\x80\x02}q\x00X\x06\x00\x00\x00weightq\x01K\x01s."
_HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"
broken("B14-pointer", "lfs_pointer", lfs_pointer)
broken("B14-html", "not_safetensors", lambda: _HTML)
broken("B14-json", "not_safetensors", lambda: b'{"error":"Repository not found"}')
broken("B14-zip", "not_safetensors", lambda: archive_of({"archive/data.pkl": PICKLE}))
broken("B14-pickle", "not_safetensors", lambda: PICKLE + bytes(500))
broken("B14-no-header", "not_safetensors", lambda: struct.pack("<Q", 4) + b"abcdefgh")


# -- C: dtypes ----------------------------------------------------------------------------------


@case("C01-every-dtype")
def _() -> bytes:
    tensors: list[Entry] = []
    for place, dtype in enumerate(DTYPES.values()):
        for kind in ("random", "ramp"):
            words = make_words(kind, dtype.word_bits, 3072, place)
            n_elements = words.nbytes * 8 // dtype.element_bits
            tensors.append((f"{dtype.name}.{kind}", dtype.name, [n_elements // 8, 8], words.tobytes()))
    return safetensors(tensors)


@case("C02-bytes-and-pairs")
def _() -> bytes:
    tensors: list[Entry] = [("pairs", "C64", [1600], noise(2, 12_800))]
    tensors += [(name, name, [16, 512], noise(place, 8192)) for place, name in enumerate(("F8_E4M3", "F8_E5M2"))]
    return safetensors([*tensors, ("scales", "F8_E8M0", [4096], bytes(118 + i % 7 for i in range(4096)))])


@case("C04-sub-byte")
def _() -> bytes:
    return safetensors(
        [
            ("f4", "F4", [4], b"ab"),
            ("f6a", "F6_E2M3", [4], b"abc"),
            ("f6b", "F6_E3M2", [4], b"def"),
            ("odd", "F4", [3, 6000, 1], noise(5, 9000)),
        ]
    )


@case("C05-bool")
def _() -> bytes:
    return safetensors([("b", "BOOL", [4], bytes([0, 1, 2, 255]))])


# -- D: contents --------------------------------------------------------------------------------


@case("D01-constants")
def _() -> bytes:
    n_elements = 20_000
    nan = struct.pack("<f", float("nan"))
    return safetensors(
        [
            ("zero", "F32", [n_elements], bytes(4 * n_elements)),
            ("one", "BF16", [n_elements], b"\x80\x3f" * n_elements),
            ("nan", "F32", [100, 200], nan * n_elements),
            ("two", "I32", [n_elements], b"\1\0\0\0\2\0\0\0" * (n_elements // 2)),
        ]
    )


@case("D02-every-pattern")
def _() -> bytes:
    every = np.arange(1 << 16, dtype="<u2").tobytes()
    special = np.array([0x7F81, 0x7FC1, 0xFF91, 0xFFFF, 0x8000, 0, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC0], "<u2").tobytes()
    byte = bytes(range(256))
    return safetensors(
        [("bf16", "BF16", [256, 256], every), ("f16", "F16", [1 << 16], every), ("special", "BF16", [11], special)]
        + [(name, name, [256], byte) for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL")]
    )


@case("D03-upcast")
def _() -> bytes:
    from_bf16 = (weights(1, 8192).view("<u4") & 0xFFFF0000).astype("<u4")
    from_f16 = weights(2, 8192).astype("<f2").astype("<f4").view("<u4")
    mixed = np.where((np.arange(64) % 2 == 0)[:, None], from_bf16.reshape(64, 128), from_f16.reshape(64, 128))
    return safetensors(
        [
            ("from_bf16", "F32", [64, 128], from_bf16.tobytes()),
            ("from_f16", "F32", [64, 128], from_f16.tobytes()),
            ("mixed", "F32", [64, 128], mixed.astype("<u4").tobytes()),
        ]
    )


@case("D05-optimizer")
def _() -> bytes:
    gradient = weights(5, 8192) * np.float32(1e-3)
    return safetensors(
        [
            ("exp_avg", "F32", [64, 128], gradient.tobytes()),
            ("exp_avg_sq", "F32", [64, 128], (gradient * gradient * np.float32(1e-30)).tobytes()),
            ("step", "F32", [], struct.pack("<f", 1000.0)),
            ("step64", "I64", [], struct.pack("<q", 1000)),
        ]
    )


@case("D06-tied")
def _() -> bytes:
    table = bf16(6, 200 * 76)
    changed = bytes([table[0] ^ 1]) + table[1:]
    return safetensors(
        [
            ("lm_head.weight", "BF16", [200, 76], table),
            ("wte.weight", "BF16", [200, 76], table),
            ("other.weight", "BF16", [200, 76], changed),
        ],
        {"format": "pt"},
    )


@case("D07-padding-rows")
def _() -> bytes:
    repeated, zeroed = bf16(9, 257 * 64), bf16(8, 257 * 64)
    return safetensors(
        [
            ("embed", "BF16", [320, 64], repeated + repeated[-128:] * 63),
            ("alt", "BF16", [320, 64], zeroed + bytes(8064)),
        ]
    )


@case("D08-buffers")
def _() -> bytes:
    steps = np.arange(2048)
    return safetensors(
        [
            ("inv_freq", "F32", [1024], (10000.0 ** (-steps[:1024] / 1024)).astype("<f4").tobytes()),
            ("sin", "F32", [2048], np.sin(steps / 10).astype("<f4").tobytes()),
            ("position_ids", "I64", [1, 2048], steps.astype("<i8").tobytes()),
            ("reversed", "I64", [2048], steps[::-1].astype("<i8").tobytes()),
            ("by_64", "I32", [2048], (64 * steps).astype("<i4").tobytes()),
        ]
    )


@case("D09-masks")
def _() -> bytes:
    lower = np.tril(np.ones((100, 100), np.uint8))
    fill = np.where(lower == 1, np.float16(0), np.float16(-65504)).astype("<f2")
    return safetensors(
        [
            ("attn.bias", "U8", [1, 1, 100, 100], lower.tobytes()),
            ("attn.bool", "BOOL", [1, 1, 100, 100], lower.tobytes()),
            ("attn.mask", "F16", [100, 100], fill.tobytes()),
            ("masked_bias", "F32", [], struct.pack("<f", -1e4)),
        ]
    )


@case("D10-lora")
def _() -> bytes:
    tensors: list[Entry] = []
    for rank in (4, 8, 16):
        tensors += [
            (f"r{rank}.lora_A.weight", "F32", [rank, 512], weights(rank, rank * 512).tobytes()),
            (f"r{rank}.lora_B.weight", "F32", [512, rank], bytes(4 * rank * 512)),
            (f"r{rank}.alpha", "F32", [], struct.pack("<f", float(rank))),
        ]
    return safetensors(tensors)


@case("D11-gptq")
def _() -> bytes:
    return safetensors(
        [
            ("qweight", "I32", [64, 128], noise(11, 64 * 128 * 4)),
            ("qzeros", "I32", [8, 256], b"\x77" * 8192),
            ("qzeros8", "I32", [8, 256], b"\x88" * 8192),
            ("g_idx", "I32", [4096], (np.arange(4096) // 128).astype("<i4").tobytes()),
            ("scales", "F16", [8, 256], weights(11, 2048).astype("<f2").tobytes()),
        ]
    )


@case("D13-sparse")
def _() -> bytes:
    rng = np.random.Generator(np.random.PCG64(13))
    values = weights(13, 8192).reshape(-1, 4)
    half = np.where(np.argsort(np.abs(values), axis=1) < 2, np.float32(0), values)
    tenth = np.where(rng.random(8192) < 0.9, np.float32(0), values.ravel())
    blocks = np.where(rng.random((8, 1024)) < 0.5, np.float32(-0.0), np.float32(0))
    blocks[::3] = values.reshape(8, 1024)[::3]
    return safetensors(
        [
            (name, "F32", [64, 128], array.astype("<f4").tobytes())
            for name, array in (("two_of_four", half), ("tenth", tenth), ("blocks", blocks))
        ]
    )


@case("D14-codebook")
def _() -> bytes:
    rng = np.random.Generator(np.random.PCG64(14))
    many = np.frombuffer(bf16(14, 256), "<u2")[rng.integers(0, 256, 20_000)]
    few = weights(15, 16)[rng.integers(0, 16, 20_000)]
    return safetensors([("bf16", "BF16", [100, 200], many.tobytes()), ("f32", "F32", [100, 200], few.tobytes())])


@case("D15-mx-scales")
def _() -> bytes:
    rng = np.random.Generator(np.random.PCG64(15))
    scales = rng.integers(118, 125, 8192, np.uint8)
    return safetensors(
        [("scales", "F8_E8M0", [64, 128], scales.tobytes()), ("blocks", "U8", [64, 64], noise(15, 4096))]
    )


@case("D16-noise")
def _() -> bytes:
    return safetensors(
        [(dtype.name, dtype.name, [96_000 * 8 // dtype.element_bits], noise(16, 96_000)) for dtype in DTYPES.values()]
    )


# -- E: other files -----------------------------------------------------------------------------


@case("E01-repository", kind="opaque")
def _() -> dict[str, bytes]:
    vocabulary = {f"token {i} é": i for i in range(8000)}
    return {
        "repo/config.json": json.dumps({"hidden_size": 768, "architectures": ["Model"]}, indent=2).encode(),
        "repo/tokenizer.json": json.dumps({"model": {"vocab": vocabulary}}, ensure_ascii=False).encode(),
        "repo/tokenizer.model": noise(1, 3000),
        "repo/README.md": "# Modèle\n".encode() * 50,
        "repo/.gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
        "repo/merges.txt": b"#version: 0.2\n" + b"t h\n" * 500,
        "repo/a b#c%20+[x]{y}&='~.txt": b"odd name",
        "repo/empty.txt": b"",
    }


def index_of(names: dict[str, str]) -> bytes:
    """Return the index of a sharded checkpoint: tensors and their files."""
    return json.dumps({"metadata": {"total_size": 4}, "weight_map": names}).encode()


@case("E02-index", kind="opaque")
def _() -> dict[str, bytes]:
    names = {
        "w": "a-00001-of-00003.safetensors",
        "v": "a-00002-of-00003.safetensors",
        "u": "a-00003-of-00003.safetensors",
    }
    return {"sharded/model.safetensors.index.json": index_of(names)}


@case("E03-torch", kind="opaque")
def _() -> dict[str, bytes]:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.USTAR_FORMAT) as file:
        file.addfile(tarfile.TarInfo("storages"))
    members = {"archive/data.pkl": PICKLE, "archive/data/0": bf16(3, 40_000)}
    return {
        "torch/pytorch_model.bin": PICKLE,
        "torch/stored.pt": archive_of(members),
        "torch/deflated.pt": archive_of(members, zipfile.ZIP_DEFLATED),
        "torch/legacy.pt": sink.getvalue(),
    }


@case("E05-gguf", kind="opaque")
def _() -> dict[str, bytes]:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 64, 1, 0)
    return {
        "g/aligned.gguf": head.ljust(96, b"\0") + noise(5, 128),
        "g/padded.gguf": head + noise(6, 96 - len(head)) + noise(5, 128),
    }


@case("E06-numpy", kind="opaque")
def _() -> dict[str, bytes]:
    plain, fortran, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(plain, np.arange(6000))
    np.save(fortran, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    objects.write(b"\x93NUMPY\x01\x00F\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(80) + PICKLE)
    members = {"a.npy": plain.getvalue(), "b.npy": fortran.getvalue()}
    return {
        "n/plain.npy": plain.getvalue(),
        "n/fortran.npy": fortran.getvalue(),
        "n/objects.npy": objects.getvalue(),
        "n/stored.npz": archive_of(members),
        "n/deflated.npz": archive_of(members, zipfile.ZIP_DEFLATED),
    }


@case("E07-others", kind="opaque")
def _() -> dict[str, bytes]:
    return {
        "o/model.onnx": b"\x08\x07\x12\x07pytorch" + noise(7, 500),
        "o/model.onnx.data": bf16(7, 50_000),
        "o/model.h5": b"\x89HDF\r\n\x1a\n" + noise(8, 900),
        "o/flax_model.msgpack": b"\x81\xa6params" + noise(9, 900),
        "o/model.tflite": b"\x1c\0\0\0TFL3" + noise(10, 900),
    }


@case("E08-empty-weights", "empty_weights_file", "opaque")
def _() -> dict[str, bytes]:
    return {"step10/mp_rank_00_model_states.pt": b""}


@case("E08-deepspeed", kind="opaque")
def _() -> dict[str, bytes]:
    return {
        "step11/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": archive_of({"archive/data/0": bf16(8, 9000)}),
        "step11/latest": b"global_step11",
        "step11/zero_to_fp32.py": b"print('not run')\n" * 90,
    }


@case("E11-megatron", kind="opaque")
def _() -> dict[str, bytes]:
    return {
        "mega/latest_checkpointed_iteration.txt": b"100",
        "mega/iter_0000100/mp_rank_00/model_optim_rng.pt": archive_of({"archive/data/0": bf16(11, 9000)}),
    }


@case("E12-deep-path", kind="opaque")
def _() -> dict[str, bytes]:
    return {"/".join(f"d{i}" for i in range(40)) + "/file.txt": b"deep", "many/0.txt": b"0", "many/1.txt": b"1"}


@case("E13-equal-files")
def _() -> dict[str, bytes]:
    data = safetensors([("w", "BF16", [100, 100], bf16(13, 10_000))])
    return {"twice/model.safetensors": data, "twice/original/model.safetensors": data}


# -- R: rebuilds of public files ----------------------------------------------------------------


@case("R2-unaligned-upcast")
def _() -> bytes:
    keys = ("key", "receptance", "value", "output")
    tensors = [
        (f"blocks.{layer}.att.{key}.weight", "F32", [16, 16], (np.frombuffer(bf16(i, 256), "<u2").astype("<u4") << 16))
        for layer in range(24)
        for i, key in enumerate(keys)
    ]
    return safetensors([(*rest, words.tobytes()) for *rest, words in tensors], pad_to=0xA766)  # type: ignore[misc]


@case("R3-scaled-fp8")
def _() -> bytes:
    tensors: list[Entry] = [("scaled_fp8", "F8_E4M3", [0], b"")]
    for layer in range(40):
        tensors += [
            (f"blocks.{layer}.w.weight", "F8_E4M3", [32, 32], noise(layer, 1024)),
            (f"blocks.{layer}.w.scale_weight", "F32", [], struct.pack("<f", 2.0 ** -(layer % 9))),
            (f"blocks.{layer}.norm.weight", "F16", [32], noise(layer + 99, 64)),
        ]
    return safetensors(tensors, pad_to=181_592)


@case("R5-misaligned")
def _() -> bytes:
    dtypes = ("F16", "BF16", "U32", "F32", "U8")
    tensors = []
    for i in range(111):
        dtype = dtypes[i % 5]
        n_elements = 3 if dtype == "U8" else 8
        data = noise(i, n_elements * DTYPES[dtype].element_bits // 8)
        tensors.append((f"language_model.layers.{i:03d}.p{i % 5}.weight", dtype, [n_elements], data))
    short = 14_055 - (len(safetensors(tensors)) - 8 - sum(len(data) for *_, data in tensors))
    name, *rest = tensors[0]
    return safetensors([(name + "_" * short, *rest), *tensors[1:]])  # type: ignore[list-item]

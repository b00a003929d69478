"""What is sent as the body of a request is what was given, however the client takes it."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from aiobotocore.httpchecksum import AioAwsChunkedWrapper
from aiohttp import payload
from botocore.httpchecksum import Crc32Checksum
from hypothesis import given
from hypothesis import strategies as st

from pipeline import store_s3_body
from pipeline.store_s3_body import Body

PIECES = st.lists(st.binary(max_size=40), max_size=5)


@given(PIECES, st.lists(st.tuples(st.sampled_from(["read", "start", "here", "end"]), st.integers(-1, 60)), max_size=8))
def test_a_body_reads_and_seeks_as_a_file_does(pieces: list[bytes], steps: list[tuple[str, int]]) -> None:
    body, file = Body(pieces), io.BytesIO(b"".join(pieces))
    for step, n in steps:
        if step == "read":
            assert body.read(n) == file.read(n)
        else:
            whence = ["start", "here", "end"].index(step)
            offset = max(n, 0) if whence != io.SEEK_END else -min(max(n, 0), body.n_bytes)
            assert body.seek(offset, whence) == file.seek(offset, whence)
        assert body.tell() == file.tell()
    body.seek(0)
    assert body.read() == b"".join(pieces)


class _Writer:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def write(self, data: memoryview) -> None:
        self.pieces.append(bytes(data))


@given(PIECES)
def test_a_body_is_sent_whole_each_time(pieces: list[bytes]) -> None:
    """A request that is tried again sends it again; no piece is larger than is handed over at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_s3_body, "SENT_BYTES", 16)
        body = Body(pieces)
        body.read(3)
        sent = payload.PAYLOAD_REGISTRY.get(body, disposition=None)
        assert sent.size == len(b"".join(pieces))
        for _ in range(2):
            writer: Any = _Writer()
            asyncio.run(sent.write_with_length(writer, None))
            assert b"".join(writer.pieces) == b"".join(pieces)
            assert all(0 < len(piece) <= 16 for piece in writer.pieces)


@given(PIECES)
def test_a_body_is_sent_in_chunks_with_its_checksum_as_a_file_is(pieces: list[bytes]) -> None:
    """What goes to S3 itself, over TLS."""

    async def chunked(body: Any) -> bytes:
        whole: bytes = await AioAwsChunkedWrapper(body, checksum_cls=Crc32Checksum, checksum_name="x").read()
        return whole

    assert asyncio.run(chunked(Body(pieces))) == asyncio.run(chunked(io.BytesIO(b"".join(pieces))))

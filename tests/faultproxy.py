"""A loopback HTTP proxy that injects faults between an S3 client and its server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Fault:
    """What to do to which requests.

    Attributes
    ----------
    match : str
        Regular expression over ``METHOD /target``.
    action : str
        An S3 error code with its HTTP status, such as ``503 SlowDown``: answered without asking the server.
        ``drop-reply``: the server does the work, the client sees the connection close. ``cut-reply``: half of the body.
        ``strip HEADER``: the server never sees that request header, as if it did not know it.
        ``bare-etags``: answers in XML give ETags without quotes, as some servers do.
    first : int
        How many matching requests it applies to, after `skip` untouched ones.
    share : float
        Which part of those, drawn anew for each.
    header : str
        Regular expression that the head of a request must hold too.
    """

    match: str
    action: str
    first: int = 1
    skip: int = 0
    share: float = 1.0
    header: str = ""
    seen: int = field(default=0, init=False)
    met: int = field(default=0, init=False)
    _draw: random.Random = field(default_factory=lambda: random.Random(1), init=False)

    def applies(self, line: str, head: str = "") -> bool:
        if not re.search(self.match, line) or not re.search(self.header, head):
            return False
        self.seen += 1
        applies = self.skip < self.seen <= self.skip + self.first and self._draw.random() < self.share
        self.met += applies
        return applies


ALWAYS = 1 << 30
"""As many requests as there are."""


@dataclass
class Proxy:
    """A running proxy: its endpoint, and ``METHOD /target`` of every request in order."""

    endpoint: str
    requests: list[str]


@contextlib.contextmanager
def fault_proxy(upstream: str, faults: Sequence[Fault] = ()) -> Iterator[Proxy]:
    """Proxy `upstream` from a thread until the block ends."""
    port = urlsplit(upstream).port
    assert port is not None
    requests: list[str] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(
            lambda reader, writer: _serve((reader, writer), port, faults, requests), "127.0.0.1", 0, limit=1 << 20
        )

    async def stop(server: asyncio.Server) -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield Proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests)
    finally:
        asyncio.run_coroutine_threadsafe(stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(client: Pair, port: int, faults: Sequence[Fault], requests: list[str]) -> None:
    server: Pair | None = None
    try:
        while True:
            head = await client[0].readuntil(b"\r\n\r\n")
            line = head.split(b" HTTP/")[0].decode("latin-1")
            requests.append(line)
            action = next((fault.action for fault in faults if fault.applies(line, head.decode("latin-1"))), "")
            if re.search(rb"\r\nexpect: *100", head, re.IGNORECASE):
                head = re.sub(rb"\r\nexpect:[^\r]*", b"", head, flags=re.IGNORECASE)
                client[1].write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await _read_body(client[0], head)
            if action[:3].isdigit():
                client[1].write(_error(action, bodiless=line.startswith("HEAD")))
                continue
            if action.startswith("strip "):
                header = re.escape(action.removeprefix("strip ").encode())
                head = re.sub(rb"\r\n" + header + rb":[^\r]*", b"", head, flags=re.IGNORECASE)
            server = server or await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            server[1].write(head + body)
            answer = await server[0].readuntil(b"\r\n\r\n")
            has_body = not line.startswith("HEAD") and b" 204 " not in answer[:16] and b" 304 " not in answer[:16]
            content = await _read_body(server[0], answer) if has_body else b""
            if action == "drop-reply":
                return
            if action == "cut-reply":
                client[1].write(answer + content[: len(content) // 2])
                await client[1].drain()
                return
            if action == "bare-etags":  # white space after a document is part of it
                content = re.sub(rb"(<ETag>)(?:\"|&quot;)(\w+)(?:\"|&quot;)", rb"\1\2", content).ljust(len(content))
            client[1].write(answer + content)
            await client[1].drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        return
    finally:
        for _, writer in filter(None, (client, server)):
            writer.close()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """The body that `head` announces, as it travels (chunk sizes included)."""
    if re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
        body = b""
        while True:
            size = await reader.readline()
            body += size + await reader.readexactly(int(size.split(b";")[0], 16) + 2)
            if int(size.split(b";")[0], 16) == 0:
                return body
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return await reader.readexactly(int(length[1])) if length else b""


def _error(action: str, *, bodiless: bool) -> bytes:
    status, code = action.split(" ")
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    head = f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head if bodiless else head + body).encode()

"""A node's pages over HTTP: `GET /ei/v1/kv/snapshot`, as the worker sends and the others read it.

Rules that hold here
- A snapshot is of one moment, just after kv event `seq`; it travels in pieces of CHUNK_BYTES, and the worker goes
  on serving and publishing between them.
- The body is a msgpack head (4 bytes little-endian give its length), then the pages of L1 and of L2, 8 bytes each.
  Its length is told beforehand: what was cut off is an error, and so is what is longer than the node can hold.
- A reader waits READ_S for each piece and WHOLE_S in all.
"""

from __future__ import annotations

import aiohttp
import msgspec
from aiohttp import web

from shared.messages import KvSnapshot, NodeInfo

PATH = "/ei/v1/kv/snapshot"
CHUNK_BYTES = 2**18
READ_S = 5.0
WHOLE_S = 20.0
CONNECT_S = 3.0
SPARE_PAGES = 65_536  # beyond what the node registered, for a node that came back bigger
_MOST_HEAD = 4096


class SnapshotError(Exception):
    """No snapshot could be had; the text is one line."""


class _Head(msgspec.Struct, array_like=True):
    node: str
    incarnation: str
    seq: int
    l1_pages: int
    l2_pages: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


async def send_snapshot(request: web.Request, snapshot: KvSnapshot) -> web.StreamResponse:
    """Answer with the snapshot, in pieces."""
    head = _encoder.encode(
        _Head(
            snapshot.node, snapshot.incarnation, snapshot.seq,
            len(snapshot.l1) // 8, len(snapshot.l2) // 8,
        )
    )  # fmt: skip
    answer = web.StreamResponse()
    answer.content_type = "application/octet-stream"
    answer.content_length = 4 + len(head) + len(snapshot.l1) + len(snapshot.l2)
    await answer.prepare(request)
    await answer.write(len(head).to_bytes(4, "little") + head)
    for tier in (snapshot.l1, snapshot.l2):
        for at in range(0, len(tier), CHUNK_BYTES):
            await answer.write(tier[at : at + CHUNK_BYTES])
    await answer.write_eof()
    return answer


async def fetch_snapshot(http: aiohttp.ClientSession, info: NodeInfo) -> KvSnapshot:
    """The pages of the registered node in its present life. Raises SnapshotError."""
    most = (info.l1_tokens + info.l2_tokens) // max(1, info.page_size) + SPARE_PAGES
    timeout = aiohttp.ClientTimeout(total=WHOLE_S, sock_connect=CONNECT_S, sock_read=READ_S)
    try:
        async with http.get(info.url + PATH, timeout=timeout) as answer:
            answer.raise_for_status()
            size = int.from_bytes(await answer.content.readexactly(4), "little")
            if size > _MOST_HEAD:
                raise SnapshotError(f"{info.url} does not answer with a snapshot")
            head = _decoder.decode(await answer.content.readexactly(size))
            pages = head.l1_pages, head.l2_pages
            if min(pages) < 0 or sum(pages) > most:
                raise SnapshotError(f"{info.url}: a snapshot of {pages} pages, where {most} fit")
            if (head.node, head.incarnation) != (info.node, info.incarnation) or not 0 <= head.seq < 2**63:
                raise SnapshotError(
                    f"{info.url}: a snapshot of {head.node} {head.incarnation}, event {head.seq}"
                )
            l1, l2 = [await _read(answer.content, 8 * n) for n in pages]
    # ValueError: a host name that cannot be one.
    except (aiohttp.ClientError, TimeoutError, OSError, EOFError, msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"{info.url}: {error or type(error).__name__}") from None
    return KvSnapshot(head.node, head.incarnation, head.seq, l1, l2)


async def _read(content: aiohttp.StreamReader, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        found += await content.readexactly(min(CHUNK_BYTES, size - len(found)))
    return bytes(found)

"""HTTP/1.1 messages as both sides of the router read them: heads, and the chunked framing of bodies.

A head goes through llhttp (httptools) once it is whole; bodies never do. So one head is one call of the parser, whatever the
fragments were, and where a message ends is decided in one place.

Rules that hold here
- What two readers of a message could understand differently is refused (RFC 9112, 11.2): two framings or lengths,
  transfer codings other than `chunked`, bare CR or LF, folded headers, spaces before a colon, missing or double Host.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

import httptools

Headers = Sequence[tuple[bytes, bytes]]
MAX_CHUNK_LINE = 1024
MAX_TRAILER_BYTES = 8192
MOST_KEPT_HEADS, MOST_KEPT_HEAD = 512, 4096  # heads that are kept read, and bytes of one
_ONE_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,15})\r\n", re.IGNORECASE)
_names: dict[bytes, str] = {}


class BadRequest(Exception):
    """A request that is answered by `status` before any handler; the connection ends with it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class BadFraming(ValueError):
    """Chunked framing that is not to be trusted."""


class HeadSink:
    """What llhttp says of one head."""

    __slots__ = ("complete", "raw", "target")

    def __init__(self) -> None:
        self.target = b""
        self.raw: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.raw.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True

    def headers(self, head: bytes) -> list[tuple[bytes, bytes]]:
        """In order, without the blanks after a value, which llhttp leaves there."""
        if b" \r\n" in head or b"\t\r\n" in head:
            return [(name, value.rstrip(b" \t")) for name, value in self.raw]
        return self.raw


def folded(raw: Headers) -> dict[str, str]:
    """Headers by lower-case name, equal names joined by ", "."""
    found: dict[str, str] = {}
    for name, value in raw:
        key = _names.get(name)
        if key is None:
            key = name.decode("latin-1").lower()
            if len(_names) < 512:
                _names[name] = key
        text = value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def tokens_of(value: str) -> list[str]:
    return [token.strip().lower() for token in value.split(",")]


def safe_path(path: bytes) -> str:
    """Percent-decoded as UTF-8, except for `%2F`: a slash in a segment does not become a separator."""
    text = path.decode("latin-1")
    if "%" not in text:
        return text
    return "%2F".join(urllib.parse.unquote(part) for part in re.split("%2[fF]", text))


class HeaderLines(NamedTuple):
    """Header lines as they are sent, and how many these are: a line break in a value does not become a line."""

    text: bytes = b""
    lines: int = 0


def header_lines(headers: Headers) -> HeaderLines:
    return HeaderLines(b"".join([b"%b: %b\r\n" % pair for pair in headers]), len(headers))


class Head:
    """A request's head that passed every check. `length` is None for a chunked body.

    `derived`: what others made of the headers, by a name of theirs; heads that differ in their length only share it.
    """

    __slots__ = ("derived", "expects", "fields", "http11", "keep_alive", "length", "method", "raw", "target")

    def __init__(self, data: bytes, max_headers: int) -> None:
        """`data` ends with its empty line. Raises BadRequest."""
        self.derived: dict[str, HeaderLines] = {}
        sink = HeadSink()
        parser = httptools.HttpRequestParser(sink)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer, which nobody has to take; CONNECT is refused below
        except httptools.HttpParserError as error:
            raise BadRequest(400, f"The request is not valid HTTP/1.1: {error}.") from None
        line_end = data.index(b"\r\n")
        self.method = parser.get_method().decode("ascii")
        version = data[line_end - 9 : line_end]
        self.http11 = version == b" HTTP/1.1"
        if not self.http11 and version != b" HTTP/1.0":
            raise BadRequest(505, "Only HTTP 1.0 and 1.1 are spoken here.")
        self.target = target = sink.target
        if not sink.complete or line_end != len(self.method) + len(target) + 10:
            raise BadRequest(400, "The request line is not valid HTTP/1.1.")
        if self.method == "CONNECT":
            raise BadRequest(405, "CONNECT is not supported.")
        if b"#" in target:
            raise BadRequest(400, "A request target has no fragment.")
        self.raw = sink.headers(data)
        if len(self.raw) > max_headers:
            raise BadRequest(431, f"The request has more than {max_headers} headers.")
        self.fields = fields = folded(self.raw)
        connection = fields.get("connection")
        if connection is None:
            self.keep_alive = self.http11
        elif self.http11:
            self.keep_alive = "close" not in tokens_of(connection)
        else:
            options = tokens_of(connection)
            self.keep_alive = "keep-alive" in options and "close" not in options
        if self.http11:
            host = fields.get("host")
            if host is None or "," in host:
                raise BadRequest(400, "A request has one Host header.")
        self._read_framing(fields)
        expect = fields.get("expect")
        self.expects = False
        if expect is not None and self.http11:
            if expect.lower() != "100-continue":
                raise BadRequest(417, f"Expect: {expect} is not supported.")
            self.expects = True

    def _read_framing(self, fields: dict[str, str]) -> None:
        self.length: int | None = 0
        length = fields.get("content-length")
        coding = fields.get("transfer-encoding")
        if coding is not None:
            if length is not None or not self.http11:
                raise BadRequest(400, "Transfer-Encoding goes neither with Content-Length nor with HTTP/1.0.")
            if coding.lower() != "chunked":
                raise BadRequest(501, f"Transfer-Encoding: {coding} is not supported; chunked is.")
            self.length = None
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 19):
                raise BadRequest(400, "Content-Length is one number.")
            self.length = int(length)

    def with_length(self, digits: bytes) -> Head:
        """The same head with another Content-Length, of which it has one."""
        head = Head.__new__(Head)
        head.derived, head.expects, head.http11, head.keep_alive = (
            self.derived, self.expects, self.http11, self.keep_alive,
        )  # fmt: skip
        head.method, head.target = self.method, self.target
        head.length = int(digits)
        head.fields = self.fields | {"content-length": digits.decode("ascii")}
        head.raw = [
            (name, digits if name.lower() == b"content-length" else value) for name, value in self.raw
        ]
        return head


class Heads:
    """Reads requests' heads. Those of one client differ in little but the length: what was read is kept."""

    def __init__(self, max_headers: int) -> None:
        self._max_headers = max_headers
        self._kept: dict[bytes, Head] = {}

    def read(self, data: bytes) -> Head:
        """`data` ends with its empty line. Raises BadRequest."""
        found = _ONE_LENGTH.search(data)
        if found is None or len(data) > MOST_KEPT_HEAD:
            return Head(data, self._max_headers)
        begin, end = found.span(1)
        key = data[:begin] + data[end:]
        kept = self._kept.get(key)
        if kept is not None:
            return kept.with_length(data[begin:end])
        head = Head(data, self._max_headers)
        if len(self._kept) >= MOST_KEPT_HEADS:
            self._kept.clear()
        self._kept[key] = head
        return head.with_length(data[begin:end])  # a handler may change what it gets


_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_TRAILER_LINE = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")


class Dechunk:
    """Takes chunked framing off a body. Extensions and trailers are checked for their form and dropped.

    What comes out does not depend on where the input was cut. After the end, `done` is set and `rest` is what
    followed it.
    """

    __slots__ = ("_held", "_left", "_state", "_trailer", "done", "rest")
    _LINE, _DATA, _DATA_END, _TRAILERS = range(4)

    def __init__(self) -> None:
        self._state = self._LINE
        self._left = 0
        self._trailer = 0
        self._held = b""
        self.done = False
        self.rest = b""

    @property
    def announced(self) -> int:
        """Bytes of the present chunk that have not come yet."""
        return self._left

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in `data`. Raises BadFraming."""
        if self._held:
            data = self._held + data
            self._held = b""
        size = len(data)
        pos = 0
        found: bytes | None = None
        more: list[bytes] | None = None
        while pos < size:
            if self._state == 0:
                line = _CHUNK_LINE.match(data, pos)
                if line is None:
                    self._hold_line(data, pos, MAX_CHUNK_LINE)
                    break
                end = line.end()
                if end - pos > MAX_CHUNK_LINE:
                    raise BadFraming("a chunk's size line is too long")
                pos = end
                self._left = int(line[1], 16)
                self._state = 1 if self._left else 3
            elif self._state == 1:
                end = pos + self._left
                part = data[pos:end]
                if found is None:
                    found = part
                elif more is None:
                    more = [found, part]
                else:
                    more.append(part)
                if end > size:
                    self._left = end - size
                    break
                pos = end
                self._left = 0
                self._state = 2
            elif self._state == 2:
                if size - pos < 2:
                    if data[pos] != 13:
                        raise BadFraming("a chunk is longer than its size")
                    self._held = data[pos:]
                    break
                if data[pos : pos + 2] != b"\r\n":
                    raise BadFraming("a chunk is longer than its size")
                pos += 2
                self._state = 0
            else:
                line = _TRAILER_LINE.match(data, pos)
                left = MAX_TRAILER_BYTES - self._trailer
                if line is None:
                    self._hold_line(data, pos, left)
                    break
                length = line.end() - pos
                if length > left:
                    raise BadFraming("the trailers are too long")
                self._trailer += length
                pos += length
                if length == 2:
                    self.done = True
                    self.rest = data[pos:]
                    break
        if more is not None:
            return b"".join(more)
        return found or b""

    def _hold_line(self, data: bytes, pos: int, limit: int) -> None:
        """Keep the beginning of a line that has not ended."""
        if len(data) - pos > limit or data.find(b"\n", pos) >= 0:
            raise BadFraming("a line of the chunked framing is malformed")
        self._held = data[pos:]


def check_head(head: bytes, lines: int) -> None:
    """Raises ValueError if `head` has other than `lines` lines: a header's value would begin another."""
    if head.count(b"\n") != lines or head.count(b"\r") != lines:
        raise ValueError("a line break in a header")

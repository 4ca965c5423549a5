"""What goes into the simulated engine's scheduler and what comes out of it.

A `Request` is made by the driver, changed by the scheduler only, and named by itself in every event. Times are
cluster seconds.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from shared.messages import Phase
from worker.engines.simulated.phase import Ack, Kind
from worker.kv.cache import Lease
from worker.kv.path import EMPTY, Path, Slots


class Stage(Enum):
    """Where a request is. A PREFILL goes WAITING (while its pages are fetched, too) -> COMPUTING -> ENDED; a
    GENERATE goes WAITING -> PULLING and COMPUTING as needed -> DECODING -> ENDED."""

    WAITING = "waiting"
    PULLING = "pulling"
    COMPUTING = "computing"
    DECODING = "decoding"
    ENDED = "ended"


class Source(NamedTuple):
    """A peer that should hold pages of the request's path: those before page `last`."""

    url: str
    last: int


class Request:
    """One call on the node.

    `path` holds the prompt's full pages and, for GENERATE, the full pages of prompt and output together; `tail`
    the page that the prompt ends in when it is not full. `output` is the number of tokens that it will produce,
    `room_tokens` the most that it may need KV for beyond the prompt. `routed` calls come from a router and may be
    handed back to it.
    """

    __slots__ = (
        "cached",
        "computed",
        "decoded",
        "exposed_s",
        "fetched",
        "host_pins",
        "iterations",
        "keep",
        "kept",
        "kind",
        "late_t",
        "lease",
        "local_pages",
        "lost",
        "output",
        "path",
        "produced",
        "prompt",
        "pull_t",
        "ready",
        "ready_t",
        "refused_at",
        "restored",
        "rid",
        "room_tokens",
        "routed",
        "seq",
        "source",
        "stage",
        "started",
        "tail",
    )

    def __init__(
        self,
        rid: str,
        kind: Kind,
        prompt: int,
        path: Path,
        *,
        tail: Path = EMPTY,
        output: int = 0,
        room_tokens: int = 0,
        routed: bool = False,
        source: Source | None = None,
        keep: bool = False,
    ) -> None:
        self.rid = rid
        self.kind = kind
        self.prompt = prompt  # tokens
        self.path = path
        self.tail = tail
        self.output = output
        self.room_tokens = max(output, room_tokens)
        self.routed = routed
        self.source = source
        self.keep = keep  # pin the pages of a PREFILL that has ended, until `Scheduler.let_go`
        self.kept: Slots | None = None
        self.seq = 0  # arrival order
        self.stage = Stage.WAITING
        self.ready = True  # False while its pages are fetched
        self.ready_t = 0.0  # when that should end
        self.pull_t = 0.0  # when it began
        self.late_t: float | None = None  # when it would have been launched but for its fetch
        self.exposed_s = 0.0  # from then to the end of the fetch
        self.local_pages = 0  # leading pages that the node held itself then
        self.host_pins: Slots | None = (
            None  # fetched pages, pinned in host memory until they are in GPU memory
        )
        self.lost = ""  # why a fetch brought less than it should
        self.lease: Lease | None = None
        self.refused_at: int | None = None  # pages that could be had when there was no room for it
        self.started = False  # its first chunk was launched
        self.computed = 0  # prompt tokens with KV here
        self.cached = 0  # t_c
        self.fetched = 0  # of these, pulled from a peer
        self.restored = 0  # of these, restored from host memory
        self.decoded = 0  # output tokens when it entered the decode batch: 1 after a prefill here
        self.iterations = 0  # decode iterations since
        self.produced = 0  # output tokens


class FetchWanted(NamedTuple):
    """Fetch what is missing of `path` from the peer at `url`; answer with `Scheduler.fetched`.

    With `tail` its last page is the request's tail.
    """

    request: Request
    url: str
    path: Path
    tail: bool


class Started(NamedTuple):
    """The first chunk of the request's prefill was launched; its t_c is known."""

    request: Request
    t: float


class Prefilled(NamedTuple):
    """The KV of a PREFILL is complete: the request has ended."""

    request: Request
    t: float


class Progress(NamedTuple):
    """A GENERATE has `produced` tokens now, the last of them at `t`; with `done` it has ended."""

    request: Request
    t: float
    produced: int
    done: bool


class Moved(NamedTuple):
    """The request was handed back before the node did anything for it: another node must serve it."""

    request: Request
    t: float


class Launched(NamedTuple):
    """An iteration began."""

    phase: Phase  # PREFILL or DECODE
    t: float


Event = FetchWanted | Started | Prefilled | Progress | Moved | Launched | Ack


class NeverFits(ValueError):
    """The request needs more KV than the node's GPU memory has; the text says how much."""

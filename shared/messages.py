"""Every message of the Redis streams, and how it is put on the wire.

Rules that hold here
- A message is a tagged `msgspec.Struct`, encoded as a msgpack array: fields are added at the end, with a
  default, and never removed or reordered.
- `SCHEMA` grows when an old reader could misread a message. `decode` returns None for a newer schema or an
  unknown tag: the reader logs it and goes on.
- Times are *cluster seconds* (see `shared/clock.py`): wall seconds times the speed-up, the same on every host.
- Page lists are bytes: little-endian int64, the first 64 bits of each page's chained hash (`shared/pages.py`),
  in path order where the list is a path.
- Sequence number and producer (the incarnation that numbered it) travel beside the message, not in it: see
  `shared/bus.py`.

| stream | from -> to | messages |
|---|---|---|
| `kv:<node>` | worker -> directory, routers | PagesStored, PagesRemoved, PagesCleared |
| `branch` | router -> directory, other routers | BranchRequest, BranchPlaced, BranchEnded |
| `counts:<node>` | directory -> worker | CountsChanged, CountsFull |
| `resync` | directory, workers -> routers, directory | PathWanted, CountsWanted |
| `state:<node>` | worker -> routers, telemetry | NodeState |
| `iterations` | worker -> telemetry, planner | Iterations |
| `requests` | router -> telemetry | RequestDone |
| `windows` | telemetry -> planner | Slice |
| `roles` | planner -> all; workers, CLI -> planner | RolePlan, Models, RoleAck, SplitWanted |
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

SCHEMA = 1

PageArray = npt.NDArray[np.int64]


class Phase(StrEnum):
    """What a node serves. BOTH is the collocated mode of the warm-up (section 5.1)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Phase.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Phase.PREFILL


class Tier(IntEnum):
    """Where a page lies on its node: L1 is GPU memory, L2 host memory."""

    L1 = 1
    L2 = 2


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all stream messages."""


# --------------------------------------------------------------------------------- kv:<node>


class PagesStored(Message, frozen=True, array_like=True, tag="stored"):
    """Pages now readable in one tier of the node."""

    tier: Tier
    pages: bytes


class PagesRemoved(Message, frozen=True, array_like=True, tag="removed"):
    """Pages that left one tier of the node; the other tier may still hold them."""

    tier: Tier
    pages: bytes


class Began(msgspec.Struct, frozen=True, array_like=True):
    """A node begins a life: nothing of an earlier one is left."""

    phase: Phase
    epoch: int = 0
    t: float = 0.0


class PagesCleared(Message, frozen=True, array_like=True, tag="cleared"):
    """All pages of one tier left, or of both when `tier` is None; an incarnation's first message says `began`."""

    tier: Tier | None = None
    began: Began | None = None


# --------------------------------------------------------------------------------- branch


class BranchRequest(Message, frozen=True, array_like=True, tag="request"):
    """A request of a branch with its new path (Algorithm E.1).

    The path is the branch's last path cut to `base` pages, followed by `pages`. Hashes are chained, so
    `base_page` (the hash of page base - 1; 0 when base is 0) proves that both sides mean the same prefix.
    """

    branch: str
    base: int
    base_page: int
    pages: bytes
    parent: str | None = None
    t: float = 0.0


class BranchPlaced(Message, frozen=True, array_like=True, tag="placed"):
    """The branch's current path is served on `node` in `phase` (prefill routing or decode binding).

    The rest is for other routers: which request, and its work: tokens to compute after `cached` ones (prefill),
    or tokens of KV that it needs room for (decode).
    """

    branch: str
    node: str
    phase: Phase
    t: float = 0.0
    rid: str = ""
    tokens: int = 0
    cached: int = 0


class BranchEnded(Message, frozen=True, array_like=True, tag="ended"):
    branch: str
    t: float = 0.0


# --------------------------------------------------------------------------------- counts:<node>, resync


class CountsChanged(Message, frozen=True, array_like=True, tag="counts"):
    """Pages of the node whose count went from zero to positive, and back to zero."""

    positive: bytes
    zero: bytes


class CountsFull(Message, frozen=True, array_like=True, tag="counts_full"):
    """All pages of the node with a positive count; every other page has count zero."""

    positive: bytes


class PathWanted(Message, frozen=True, array_like=True, tag="path_wanted"):
    """The directory does not know the branch's last path: the router sends it whole with the next request."""

    branch: str


class CountsWanted(Message, frozen=True, array_like=True, tag="counts_wanted"):
    """A worker wants its CountsFull (it started, or saw a gap in its counts)."""

    node: str


# --------------------------------------------------------------------------------- state:<node>


class QueuedPrefill(msgspec.Struct, frozen=True, array_like=True):
    """A prefill request that waits on a node, or is partly computed: `t_uc` tokens are still to compute."""

    rid: str
    t_uc: int
    t_c: int
    ready_t: float = 0.0  # its fetch ends then; 0 when it has nothing to fetch


class NodeState(Message, frozen=True, array_like=True, tag="state"):
    """What a node is doing, sent at iteration launches and at least once a second when idle.

    `busy_until` ends the running iteration; `queue` holds what the node has still to prefill after it, in
    service order. Decode load counts requests bound to the node that it knows of, running or waiting.
    """

    node: str
    t: float
    phase: Phase
    epoch: int
    draining: bool
    busy_until: float
    running_prefills: list[str]  # rids in the running prefill iteration that will then be done
    queue: list[QueuedPrefill]
    decodes: list[str]  # rids in decode, running or waiting for KV
    decode_tokens: int  # context tokens of these
    l1_free_tokens: int  # GPU memory tokens not pinned by requests
    l1_pages: int = 0
    l2_pages: int = 0
    l2_counted_pages: int = 0  # L2 pages with a positive count


# --------------------------------------------------------------------------------- iterations


class Iteration(msgspec.Struct, frozen=True, array_like=True):
    """`count` equal iterations that took `seconds` together. Sums run over the batch (Equation 1)."""

    phase: Phase  # PREFILL or DECODE: what the iteration computed
    count: int
    batch: int  # B
    t_uc: int  # uncached tokens computed (prefill)
    pairs: float  # sum of A, query-key pairs (prefill)
    t_rst: int  # tokens restored from host memory (prefill)
    tokens: int  # tokens produced (decode: accepted output tokens)
    seconds: float
    t_c: int = 0  # cached tokens of requests that begin in this iteration (prefill)
    begun: int = 0  # requests that begin in this iteration (prefill)


class Iterations(Message, frozen=True, array_like=True, tag="iterations"):
    node: str
    t: float  # end of the last one
    phase: Phase  # the node's phase
    records: list[Iteration]


# --------------------------------------------------------------------------------- requests


class Outcome(StrEnum):
    OK = "ok"
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"
    FAILED = "failed"


class RequestDone(Message, frozen=True, array_like=True, tag="request_done"):
    """One finished request. Times in cluster seconds; 0.0 for what did not happen."""

    rid: str
    branch: str
    outcome: Outcome
    t_arrive: float
    t_prefill_start: float
    t_prefill_end: float
    t_first_token: float
    t_end: float
    prompt_tokens: int
    cached_tokens: int  # t_c
    fetched_tokens: int  # of these, pulled from a peer for the prefill
    restored_tokens: int  # of these, restored from the node's host memory
    output_tokens: int  # t_out
    decode_iterations: int  # t_out / decode_iterations = t_acc
    prefill_node: str
    decode_node: str
    error: str = ""
    predicted_ttft_s: float = 0.0  # when the prefill node was chosen; 0.0 when it never was
    key: str = ""  # name of the client's API key
    kind: str = ""  # turn, compaction, ... (services/router/identity.py)


# --------------------------------------------------------------------------------- windows


class NodeSlice(msgspec.Struct, frozen=True, array_like=True):
    """t-bar and f of one node over a slice (Equation 3); weight 0 when it ran no prefill."""

    node: str
    phase: Phase
    t_bar: float  # mean new tokens of a prefill iteration
    f: float  # fraction of cached tokens restored from host memory
    iterations: int = 0


class Slice(Message, frozen=True, array_like=True, tag="slice"):
    """Means over [t0, t1): the work of a request and the requests in decode (section 5.2)."""

    t0: float
    t1: float
    requests: int
    t_uc: float
    t_c: float
    pairs: float
    t_out: float
    t_acc: float
    in_decode: float  # q-bar, time average over the cluster
    nodes: list[NodeSlice]
    context: float = 0.0  # mean context of a request in decode, tokens


# --------------------------------------------------------------------------------- roles


class RolePlan(Message, frozen=True, array_like=True, tag="plan"):
    """The phase of every node, in force from `epoch` on. A higher epoch replaces a lower one."""

    epoch: int
    phases: dict[str, Phase]
    reason: str
    t: float = 0.0


class NodeModel(msgspec.Struct, frozen=True, array_like=True):
    """Fitted prefill coefficients of one node, seconds (Equation 1)."""

    node: str
    c0: float
    c1: float
    c2: float
    c3: float


class Models(Message, frozen=True, array_like=True, tag="models"):
    """The nodes' fitted prefill models, for the routers' predictions; sent when they are frozen or change."""

    models: list[NodeModel]
    t: float = 0.0


class RoleStage(StrEnum):
    DRAINED = "drained"
    SWITCHED = "switched"


class RoleAck(Message, frozen=True, array_like=True, tag="ack"):
    """A worker's progress through a role change. `drain_s` and `switch_s` are cluster seconds."""

    node: str
    epoch: int
    phase: Phase
    stage: RoleStage
    t: float
    drain_s: float = 0.0
    switch_s: float = 0.0


class SplitWanted(Message, frozen=True, array_like=True, tag="split_wanted"):
    """An operator asks for a split; the planner picks the nodes. `hold` stops automatic changes after it."""

    prefill: int
    decode: int
    hold: bool = False
    release: bool = False  # end a hold; prefill and decode are then ignored


StreamMessage = (
    PagesStored
    | PagesRemoved
    | PagesCleared
    | BranchRequest
    | BranchPlaced
    | BranchEnded
    | CountsChanged
    | CountsFull
    | PathWanted
    | CountsWanted
    | NodeState
    | Iterations
    | RequestDone
    | Slice
    | RolePlan
    | Models
    | RoleAck
    | SplitWanted
)


# --------------------------------------------------------------------------------- records kept in Redis


class NodeInfo(msgspec.Struct, frozen=True):
    """A worker's entry in the node registry, kept alive by its lease."""

    node: str
    url: str  # http://host:port, the engine API and the page service
    incarnation: str  # new at every start
    model: str
    profile: str
    page_size: int  # tokens
    max_context: int  # tokens
    l1_tokens: int
    l2_tokens: int
    chunk_tokens: int
    phase: Phase
    epoch: int = 0
    engine: str = "simulated"
    started_t: float = 0.0


class ServiceInfo(msgspec.Struct, frozen=True):
    """A control-plane service's entry in the service registry."""

    service: str  # router, directory, planner, telemetry
    instance: str
    url: str
    started_t: float = 0.0


# --------------------------------------------------------------------------------- router -> worker (HTTP)


class FetchPlan(msgspec.Struct, frozen=True, array_like=True):
    """Pages [first, last) of the request's path that the node should read from the peer at `url`."""

    url: str
    first: int
    last: int


class PrefillCall(msgspec.Struct, frozen=True, array_like=True):
    """Body (msgpack) of `POST /ei/v1/prefill`. `tokens`: little-endian int32 token ids of the whole prompt.

    With `keep` the node holds on to the prompt's pages after `done`, until `POST /ei/v1/release` (a msgpack list of
    request ids) names the request, or a minute has passed: the decode node has pulled them then.
    """

    rid: str
    branch: str
    tokens: bytes
    salt: str = ""
    fetch: FetchPlan | None = None
    epoch: int = 0
    keep: bool = False


class PrefillEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line (JSON) of the answer to a PrefillCall.

    `started` when the first chunk is launched; then exactly one of `done`, `moved` (the node changes phase
    or stops: send it elsewhere) or `failed`.
    """

    event: str
    t: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    restored_tokens: int = 0
    error: str = ""
    fetch_s: float = 0.0  # cluster seconds from the call to the last fetched page; 0 when nothing was fetched


class KvSnapshot(msgspec.Struct, frozen=True):
    """Pages of both tiers just after kv event `seq`; `shared/kvsnapshot.py` carries it."""

    node: str
    incarnation: str
    seq: int
    l1: bytes
    l2: bytes


# --------------------------------------------------------------------------------- codec

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[StreamMessage] = msgspec.msgpack.Decoder(StreamMessage)


def encode(message: StreamMessage) -> bytes:
    return _encoder.encode(message)


def decode(schema: int, payload: bytes) -> StreamMessage | None:
    """The message, or None when this version cannot read it (newer schema, unknown tag, wrong shape)."""
    if schema > SCHEMA:
        return None
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError:
        return None


def pack_pages(pages: PageArray | list[int]) -> bytes:
    return np.asarray(pages, dtype="<i8").tobytes()


class PageListError(ValueError):
    """Bytes that are no page list."""


def unpack_pages(data: bytes) -> PageArray:
    """int64[n], read-only view. Raises PageListError when the length is no multiple of 8."""
    if len(data) % 8:
        raise PageListError(f"a page list has 8 bytes a page, not {len(data)} in all")
    return np.frombuffer(data, dtype="<i8")

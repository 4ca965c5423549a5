"""Drives the scheduler with the cluster's clock and tells the calls on the node what became of them.

Rules that hold here
- All state changes happen in plain calls on one event loop; the only wait is for the next event's time.
- A call is told of its first token and its end at once, of tokens in between at most every STREAM_S (wall): a
  stream's chunk then carries the tokens of several iterations.
- A call keeps a count of tokens, never tokens: a reader that is slow costs no memory.
- Every fetch that the scheduler asks for is answered, by the peer or by its time limit, unless its request ends
  before: then it is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import msgspec

from shared.clock import Clock
from shared.log import get_logger
from shared.messages import Iteration, NodeState, Phase
from worker.engines.simulated.phase import Ack
from worker.engines.simulated.requests import (
    FetchWanted,
    Launched,
    Moved,
    Prefilled,
    Progress,
    Request,
    Stage,
    Started,
)
from worker.engines.simulated.scheduler import Scheduler
from worker.kv.cache import KvChange
from worker.transport.fetch import Fetcher

TICK_S = 0.002  # shortest wait between two looks at the clock, wall
STREAM_S = 0.02  # wall
KEEP_S = 60.0  # wall, for a decode to pull the pages of its prefill
MAX_RECORDS = 4096  # iteration records kept until they are taken

log = get_logger("worker")

Spawn = Callable[[Coroutine[None, None, None], str], object]


class Call:
    """A request on the node, as the handler that serves it sees it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started_t: float | None = None  # cluster seconds
        self.ended_t: float | None = None
        self.moved = False
        self.aborted = False
        self.produced = 0  # output tokens that may be sent
        self._told = 0.0
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.moved or self.aborted or self.ended_t is not None

    async def news(self) -> None:
        """Wait until something changed since the last call of this."""
        await self._news.wait()
        self._news.clear()

    def tell(self) -> None:
        self._told = time.monotonic()
        self._news.set()

    def progressed(self, produced: int) -> None:
        first = not self.produced
        self.produced = produced
        if first or time.monotonic() - self._told >= STREAM_S:
            self.tell()


class Engine:
    """One simulated node. `run` must be running."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        fetcher: Fetcher,
        spawn: Spawn,
        *,
        on_kv: Callable[[list[KvChange]], None],
        on_ack: Callable[[Ack], None],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._fetcher = fetcher
        self._spawn = spawn
        self._on_kv, self._on_ack = on_kv, on_ack
        self._calls: dict[Request, Call] = {}
        self._fetches: dict[Request, asyncio.Task[None]] = {}
        self._kept: dict[str, tuple[Call, asyncio.TimerHandle]] = {}  # by request id
        self._wake = asyncio.Event()
        self._records: list[Iteration] = []
        self._stopping = False
        self.changed = asyncio.Event()  # set when a router should hear of the node before long
        self.iterations = dict.fromkeys((Phase.PREFILL, Phase.DECODE), 0)
        self.iteration_s = dict.fromkeys((Phase.PREFILL, Phase.DECODE), 0.0)
        self.tokens = dict.fromkeys((Phase.PREFILL, Phase.DECODE), 0)  # computed, produced
        self.fetched_tokens = 0
        self.fetch_s = 0.0  # cluster seconds from the wish for pages to their arrival, for prefills
        self.exposed_s = 0.0  # of these, the ones for which a request was held up

    # ------------------------------------------------------------------------------ calls

    def submit(self, request: Request) -> Call:
        """Put a request on the node. Raises NeverFits."""
        call = Call(request)
        if self._stopping:
            call.moved = True
            call.tell()
            return call
        self._calls[request] = call
        try:
            self._scheduler.submit(request, self._clock.now())
        except ValueError:
            del self._calls[request]
            raise
        finally:
            self._dispatch()
        self._changed()
        return call

    def abort(self, call: Call) -> None:
        """Free all that the call has on the node; nothing happens when it has ended."""
        if self._calls.pop(call.request, None) is None:
            return
        self._scheduler.abort(call.request, self._clock.now())
        self._stop_fetch(call.request)
        call.aborted = True
        call.tell()
        self._dispatch()
        self._changed()

    def keep(self, call: Call) -> None:
        """Keep the pages of a finished prefill until `release`, for KEEP_S, or until the node stops."""
        rid = call.request.rid
        self.release([rid])
        if self._stopping:
            self.let_go(call)
            return
        timer = asyncio.get_running_loop().call_later(KEEP_S, self.release, [rid])
        self._kept[rid] = (call, timer)

    def release(self, rids: list[str]) -> int:
        """Let the kept pages of these requests go; of how many there were any."""
        found = [kept for rid in rids if (kept := self._kept.pop(rid, None)) is not None]
        for call, timer in found:
            timer.cancel()
            self.let_go(call)
        return len(found)

    def let_go(self, call: Call) -> None:
        self._scheduler.let_go(call.request)

    def abort_rid(self, rid: str) -> int:
        """Abort every call of that request id; how many there were."""
        calls = [call for request, call in self._calls.items() if request.rid == rid]
        for call in calls:
            self.abort(call)
        return len(calls)

    def set_role(self, epoch: int, phase: Phase) -> None:
        self._scheduler.set_role(epoch, phase, self._clock.now())
        self._dispatch()
        self._changed()

    async def stop(self, grace_s: float) -> None:
        """Hand back what has not begun, let the rest run for `grace_s` (wall), abort what is left then."""
        self._stopping = True
        self.release(list(self._kept))
        self._scheduler.hand_back(self._clock.now())
        self._dispatch()
        self._changed()
        deadline = time.monotonic() + grace_s
        while self._calls and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for call in list(self._calls.values()):
            self.abort(call)

    # ------------------------------------------------------------------------------ reports

    def flush(self) -> None:
        """Bring the node up to now and tell everybody what happened."""
        self._scheduler.advance(self._clock.now())
        self._dispatch()

    def now_state(self, node: str) -> NodeState:
        """The node's state as of now."""
        self.flush()
        return self._scheduler.state(node)

    def take_records(self) -> list[Iteration]:
        records, self._records = self._records, []
        return records

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    @property
    def busy(self) -> bool:
        """Whether the node has requests."""
        return self._scheduler.requests > 0

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        while True:
            self.flush()
            try:
                async with asyncio.timeout(self._pause_s(self._clock.now())):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _pause_s(self, now: float) -> float | None:
        """Wall seconds to the next look at the clock; None when only a call can change anything."""
        next_t = self._scheduler.next_t()
        if next_t is None:
            return None
        wait_s = max(TICK_S, self._clock.wall_s(next_t - now))
        return min(wait_s, STREAM_S) if self._scheduler.decoding else wait_s

    def _changed(self) -> None:
        self.changed.set()
        self._wake.set()

    def _dispatch(self) -> None:
        for event in self._scheduler.take_events():
            match event:
                case Progress(request, t, produced, done):
                    call = self._calls.get(request)
                    if call is not None:
                        call.progressed(produced)
                        if done:
                            self._end(call, t)
                case Launched(phase, _):
                    if phase is Phase.PREFILL:
                        self.changed.set()
                case Started(request, t):
                    call = self._calls.get(request)
                    self.fetched_tokens += request.fetched
                    if request.pull_t:
                        self.fetch_s += request.ready_t - request.pull_t
                        self.exposed_s += request.exposed_s
                    if call is not None:
                        call.started_t = t
                        call.tell()
                case Prefilled(request, t):
                    call = self._calls.get(request)
                    if call is not None:
                        self._end(call, t)
                case Moved(request, _):
                    self._stop_fetch(request)
                    call = self._calls.pop(request, None)
                    if call is not None:
                        call.moved = True
                        call.tell()
                    self.changed.set()
                case FetchWanted():
                    self._spawn(self._fetch(event), f"fetch for {event.request.rid}")
                case Ack():
                    self._on_ack(event)
                    self.changed.set()
        for record in self._scheduler.take_records():
            self._record(record)
        self.tell_pages()

    def _end(self, call: Call, t: float) -> None:
        del self._calls[call.request]
        call.ended_t = t
        call.tell()
        self.changed.set()

    def _record(self, record: Iteration) -> None:
        self.iterations[record.phase] += record.count
        self.iteration_s[record.phase] += record.seconds
        self.tokens[record.phase] += record.t_uc if record.phase is Phase.PREFILL else record.tokens
        last = self._records[-1] if self._records else None
        if last is not None and last.phase is record.phase is Phase.DECODE and last.batch == record.batch:
            self._records[-1] = msgspec.structs.replace(
                last,
                count=last.count + record.count,
                tokens=last.tokens + record.tokens,
                seconds=last.seconds + record.seconds,
            )
        else:
            self._records.append(record)
            del self._records[:-MAX_RECORDS]

    def tell_pages(self) -> None:
        """Tell of the pages that moved since the last call."""
        cache = self._scheduler.cache
        changes = cache.take_changes()
        if changes:
            self._on_kv(changes)
        for page in cache.take_corrupt():
            log.error("page_corrupt", page=f"{page & 2**64 - 1:016x}", where="restored")

    # ------------------------------------------------------------------------------ fetches

    async def _fetch(self, wanted: FetchWanted) -> None:
        request, task = wanted.request, asyncio.current_task()
        if request.stage is Stage.ENDED or task is None:
            return
        self._fetches[request] = task
        try:
            arrived = await self._fetcher.fetch(wanted.url, wanted.path, tail=wanted.tail)
        finally:
            del self._fetches[request]
        self._scheduler.fetched(request, arrived.pages, arrived.held, arrived.reason, self._clock.now())
        self._dispatch()
        self._wake.set()

    def _stop_fetch(self, request: Request) -> None:
        task = self._fetches.get(request)
        if task is not None:
            task.cancel()

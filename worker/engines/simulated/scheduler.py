"""One scheduling loop for both phases: the symmetric engine of section 4.1, with modelled iteration times.

Rules that hold here
- No clock and no I/O. Every call carries `now` (cluster seconds) and first brings the node up to it; what
  happened comes out of `take_events` and `take_records`.
- Iterations follow each other without a gap, as long as there is work, from the end of the one before: how
  late or how seldom the driver calls changes nothing but when it learns of it.
- Between two iterations, in this order: transfers that ended are booked, a phase change goes on, waiting
  requests are admitted, then a prefill iteration is launched if there is prefill work, else a decode iteration.
- A prefill iteration computes up to `chunk_tokens` uncached tokens of several requests in arrival order; one
  whose fetch has not ended lets later ones pass. It takes Equation 1, and `idle_gap_s` until the next launch.
- A decode iteration advances every running request; it takes Equation 2. After k of them a request has
  floor(k t_acc) tokens. Equal iterations are one `Run`, passed over at once.
- A request takes room in GPU memory for all that it may need when it is admitted, in arrival order, so what
  runs always finishes. The next prefills in the queue are given theirs ahead, and what they reuse is loaded there
  while they wait (section 4.2). GENERATE lacks nothing to run: pages that neither the node nor its source holds are
  recomputed by prefill iterations here, so a node without a router is a plain engine.
- A prompt's last token is always computed for a PREFILL and a GENERATE without source: its logits are needed.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterator

from shared.messages import Iteration, NodeState, Phase, QueuedPrefill
from shared.timing import Profile, query_key_pairs
from worker.engines.simulated.phase import Kind, PhaseChange
from worker.engines.simulated.requests import (
    Event,
    Launched,
    Moved,
    NeverFits,
    Prefilled,
    Progress,
    Request,
    Stage,
    Started,
)
from worker.engines.simulated.run import Run
from worker.engines.simulated.transfers import begin, came, usable_tokens
from worker.kv.cache import Lease, NodeCache
from worker.kv.path import Slots

_AHEAD = 4  # queued prefills whose pages are loaded before their turn
LOST = ("peer_failed", "peer_missing", "corrupt", "no_room", "evicted")
_MILLI = 1000  # t_acc is kept in thousandths, so that token counts are exact


def _seq(request: Request) -> int:
    return request.seq


class Scheduler:
    """The node: its queues, its running iteration, its phase."""

    def __init__(
        self,
        profile: Profile,
        cache: NodeCache,
        *,
        phase: Phase = Phase.BOTH,
        epoch: int = 0,
        now: float = 0.0,
        write_at_end: bool = False,
    ) -> None:
        """`write_at_end`: what a decode adds enters the cache when the request ends, all at once."""
        self._write_at_end = write_at_end
        self.profile = profile
        self.cache = cache
        self.role = PhaseChange(phase, epoch, profile.switch_s)
        self.recomputed = dict.fromkeys(LOST, 0)  # tokens, by why
        self._page = profile.page_size
        self._acc = max(1, round(profile.t_acc * _MILLI))
        self._now = now
        self._free_t = now  # earliest next launch
        self._run: Run | None = None
        self._requests: dict[int, Request] = {}
        self._arrivals = 0
        self._prefills: list[Request] = []  # PREFILL, not started, by arrival
        self._waiting: deque[Request] = deque()  # GENERATE without room, by arrival
        self._computing: list[Request] = []  # with room and tokens to compute, by arrival
        self._batch: list[Request] = []  # in decode
        self._timers: list[tuple[float, int]] = []  # (transfer end, arrival number)
        self._events: list[Event] = []
        self._records: list[Iteration] = []

    # ------------------------------------------------------------------------------ calls in

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. One that a router must send elsewhere comes back as `Moved`.

        Raises NeverFits.
        """
        self.advance(now)
        pages = self._pages_needed(request)
        if pages > self.cache.l1_pages:
            raise NeverFits(
                f"the request needs KV for {request.prompt + request.room_tokens} tokens; "
                f"this node has room for {self.cache.l1_pages * self._page}"
            )
        if request.routed and not self.role.takes(request.kind):
            request.stage = Stage.ENDED
            self._events.append(Moved(request, now))
            return
        self._arrivals += 1
        request.seq = self._arrivals
        self._requests[request.seq] = request
        if request.kind is Kind.PREFILL:
            self._prefills.append(request)
            request.local_pages = self.cache.held(request.path.pages)
            request.cached = self._usable(request, request.local_pages)
            self._fetch(request, now)
        else:
            self._waiting.append(request)
        self._interrupt(now)

    def fetched(self, request: Request, pages: int, held: Slots, reason: str, now: float) -> None:
        """Answer to `FetchWanted`: the first `pages` of its path lie in host memory, pinned there as `held`.

        `reason`: why the rest does not, one of LOST; empty when nothing is missing.
        """
        self.advance(now)
        if request.stage is Stage.ENDED or request.ready:
            self.cache.let_go(held)
            return
        request.host_pins = held
        came(request, pages, reason, self.profile, now)
        heapq.heappush(self._timers, (request.ready_t, request.seq))
        if self._run is not None:
            self._run.cut_at(request.ready_t)
        self.advance(now)

    def abort(self, request: Request, now: float) -> None:
        """Forget a request; its place, pins and room are free at once. One that has ended is left as it is."""
        self.advance(now)
        if request.stage is Stage.ENDED:
            return
        if request.stage is Stage.WAITING:
            queue = self._prefills if request.kind is Kind.PREFILL else self._waiting
            queue.remove(request)
        elif request.stage is Stage.COMPUTING:
            self._computing.remove(request)
        elif request.stage is Stage.DECODING:
            self._batch.remove(request)
        self._end(request)
        self._interrupt(now)

    def let_go(self, request: Request) -> None:
        """The pages of a PREFILL with `keep` are where they are needed, or nobody needs them any more."""
        request.keep = False
        if request.kept is not None:
            self.cache.let_go(request.kept)
            request.kept = None

    def set_role(self, epoch: int, phase: Phase, now: float) -> None:
        """A role plan names this node's phase (see `phase.py`)."""
        self.advance(now)
        self._events += self.role.plan(epoch, phase, now)
        self._hand_back(now)
        self._interrupt(now)

    def hand_back(self, now: float) -> None:
        """Give every routed request that has not begun back to its router: the node is about to stop."""
        self.advance(now)
        self._hand_back(now, all_kinds=True)

    # ------------------------------------------------------------------------------ what comes out

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take_records(self) -> list[Iteration]:
        """Iterations that have ended since the last call."""
        records, self._records = self._records, []
        return records

    def next_t(self) -> float | None:
        """When something happens next that a client or the router waits for; None when nothing will."""
        run = self._run
        if run is not None:
            # Whatever else falls due before waits for the end of an iteration, for which the run was cut.
            fresh = any(not request.produced for request in run.batch)
            return run.end_of(run.done + 1 if fresh else run.count)
        if self._free_t > self._now:
            return self._free_t
        times = [self._timers[0][0]] if self._timers else []
        if self.role.switch_end is not None:
            times.append(self.role.switch_end)
        return min(times, default=None)

    @property
    def decoding(self) -> bool:
        return bool(self._batch)

    @property
    def requests(self) -> int:
        """Requests on the node that have not ended."""
        return len(self._requests)

    @property
    def queued_prefills(self) -> int:
        return len(self._prefills)

    @property
    def queued_decodes(self) -> int:
        return len(self._waiting)

    def state(self, node: str) -> NodeState:
        """What the node is doing as of the last call."""
        run = self._run
        taken: dict[int, int] = {}
        busy_until = max(self._free_t, self.role.switch_end or 0.0)
        if run is not None:
            busy_until = run.end_of(run.done + 1)
            if run.phase is Phase.PREFILL:
                busy_until += self.profile.idle_gap_s
                taken = {r.seq: t for r, t in zip(run.batch, run.taken, strict=True)}
        finishing: list[str] = []
        queue: list[QueuedPrefill] = []
        for request in self._work():
            computed = request.computed if request.lease is not None else request.cached
            left = request.prompt - computed - taken.get(request.seq, 0)
            if left:
                ready_t = 0.0 if request.ready else request.ready_t
                queue.append(QueuedPrefill(request.rid, left, request.prompt - left, ready_t))
            else:
                finishing.append(request.rid)
        decodes = [r for r in self._requests.values() if r.kind is Kind.GENERATE]
        return NodeState(
            node=node,
            t=self._now,
            phase=self.role.phase,
            epoch=self.role.epoch,
            draining=self.role.draining,
            busy_until=busy_until,
            running_prefills=finishing,
            queue=queue,
            decodes=[request.rid for request in decodes],
            decode_tokens=sum(request.prompt + request.produced for request in decodes),
            l1_free_tokens=self.cache.l1_available * self._page,
            l1_pages=self.cache.l1_used,
            l2_pages=self.cache.l2_used,
            l2_counted_pages=self.cache.l2_counted,
        )

    # ------------------------------------------------------------------------------ the loop

    def advance(self, now: float) -> None:
        """Bring the node to `now`. A time before the last call's counts as that one."""
        now = self._now = max(now, self._now)
        while True:
            if self._run is not None:
                self._pass(self._run, now)
                if self._run is not None:
                    return
            t = self._free_t
            if t > now:
                return
            while self._timers and self._timers[0][0] <= t:
                self._arrived(heapq.heappop(self._timers)[1])
            if self.role.draining:
                self._events += self.role.step(t, self._busy_with_lost())
            if self.role.switch_end is None and self._launch(t):
                continue
            wake = min(
                self._timers[0][0] if self._timers else now,
                now if self.role.switch_end is None else self.role.switch_end,
            )
            # Idle: up to the next thing that is due, else up to now, where the next call finds the node free.
            if t >= now:
                return
            self._free_t = max(t, min(wake, now))

    def _launch(self, t: float) -> bool:
        self._admit(t)
        run = self._compose(t) or self._decode(t)
        if run is None:
            return False
        self._run = run
        self._events.append(Launched(run.phase, t))
        return True

    def _interrupt(self, now: float) -> None:
        """Something changed: the run in flight ends with its current iteration, an idle node starts at once."""
        if self._run is not None:
            self._run.cut_at(now)
        self.advance(now)

    def _admit(self, t: float) -> None:
        """Give room to waiting GENERATE requests, after the next PREFILL if that came before."""
        first = next((r for r in self._prefills if r.ready), None) if self._waiting else None
        while self._waiting:
            request = self._waiting[0]
            if first is not None and first.seq < request.seq:
                if not self._take_room(first):
                    return
                first = None
            # One that came with room of its own has it already.
            lease = request.lease or self._lease(request, request.prompt // self._page)
            if lease is None:
                return
            self._waiting.popleft()
            request.lease = lease
            request.local_pages = lease.cached_pages
            request.cached = self._usable(request, lease.cached_pages)
            request.stage = Stage.PULLING
            if not self._fetch(request, t):
                self._pulled(request, "evicted" if request.routed else "")

    def _fetch(self, request: Request, t: float) -> bool:
        """Have the pages fetched that a request lacks and its source should have; False when there are none."""
        wanted = begin(request, self.profile, t) if request.source is not None else None
        if wanted is not None:
            self._events.append(wanted)
        return wanted is not None

    def _pulled(self, request: Request, lost: str) -> None:
        """A GENERATE has all the pages that it will get: decode, or compute first what is missing."""
        assert request.lease is not None
        complete = request.routed and request.lease.pages == request.prompt // self._page
        if complete and (not len(request.tail) or self.cache.has_tail(request.tail)):
            request.computed = request.prompt
        else:
            request.computed = self._usable(request, request.lease.pages)
        if lost:
            self.recomputed[lost] += request.prompt - request.computed
        request.restored = request.lease.restored_pages * self._page
        self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """Decode, or compute first what is missing."""
        if request.computed < request.prompt:
            request.stage = Stage.COMPUTING
            insort(self._computing, request, key=_seq)
        else:
            request.stage = Stage.DECODING
            request.decoded = request.produced
            self._batch.append(request)

    def _compose(self, t: float) -> Run | None:
        """The next prefill iteration, or None when no request is ready for one."""
        budget = self.profile.chunk_tokens
        blocked_by = self._waiting[0].seq if self._waiting else None
        batch: list[Request] = []
        taken: list[int] = []
        pairs, begun, begun_cached, restored = 0.0, 0, 0, 0
        for request in list(self._work()) if self._prefills else self._computing:
            if not budget:
                break
            if not request.ready:
                if request.late_t is None:
                    request.late_t = t
                continue
            if request.stage is Stage.WAITING:
                # One that waits for room holds back all that came later, of either kind, but not those that have
                # theirs: it may be waiting for them.
                if request.lease is None and blocked_by is not None and blocked_by < request.seq:
                    continue
                if not self._take_room(request):
                    blocked_by = request.seq
                    continue
            take = min(budget, request.prompt - request.computed)
            budget -= take
            batch.append(request)
            taken.append(take)
            pairs += query_key_pairs(take, request.computed)
            if not request.started:
                request.started = True
                begun += 1
                begun_cached += request.computed
                restored += request.restored
                if request.late_t is not None:
                    request.exposed_s = max(0.0, min(t, request.ready_t) - request.late_t)
                self._events.append(Started(request, t))
        if not batch:
            return None
        self._load_ahead()
        t_uc = sum(taken)
        seconds = self.profile.prefill.iteration_s(t_uc, pairs, restored)
        record = Iteration(
            phase=Phase.PREFILL,
            count=1,
            batch=len(batch),
            t_uc=t_uc,
            pairs=pairs,
            t_rst=restored,
            tokens=0,
            seconds=seconds,
            t_c=begun_cached,
            begun=begun,
        )
        return Run(Phase.PREFILL, t, seconds, 1, batch, taken, record)

    def _take_room(self, request: Request) -> bool:
        """Let a PREFILL begin; False when there is no room for it now."""
        if request.lease is None:
            if not self._load(request):
                return False
        else:
            # What others have computed since it was loaded is shared.
            held = self.cache.held(request.path.pages)
            self.cache.load(request.lease, request.path.pages[request.lease.pages : held])
            request.cached = request.computed = self._usable(request, request.lease.pages)
            request.restored = request.lease.restored_pages * self._page
        request.stage = Stage.COMPUTING
        self._prefills.remove(request)
        insort(self._computing, request, key=_seq)
        return True

    def _load(self, request: Request) -> bool:
        """Room for a PREFILL, with what it reuses loaded there; False when there is none now."""
        expected, corrupt = request.cached, self.cache.corrupt_pages
        lease = self._lease(request, len(request.path))
        if lease is None:
            return False
        self._unpin(request)
        request.lease = lease
        request.cached = request.computed = self._usable(request, lease.cached_pages)
        lost = "evicted" if self.cache.corrupt_pages == corrupt else "corrupt"
        self.recomputed[lost] += max(0, expected - request.cached)
        request.fetched = min(request.fetched, request.cached)
        request.restored = lease.restored_pages * self._page
        return True

    def _load_ahead(self) -> None:
        """Load what the next prefills reuse while they wait, as long as nobody waits for that room."""
        if self._waiting:
            return
        for request in self._prefills[:_AHEAD]:
            if request.ready and request.lease is None and not self._load(request):
                return

    def _lease(self, request: Request, prompt_pages: int) -> Lease | None:
        """Pages and room for a request; None when there is no room now."""
        # Trying costs a walk over the path: not before the room is more than it was the last time.
        if request.refused_at is not None and self.cache.l1_available <= request.refused_at:
            return None
        lease = self.cache.lease(request.path.pages[:prompt_pages], self._pages_needed(request))
        if lease is None:
            request.refused_at = self.cache.l1_available
        return lease

    def _decode(self, t: float) -> Run | None:
        """The next decode iterations: up to the first that ends a request or meets a transfer's end."""
        if not self._batch:
            return None
        count = min(self._iterations_left(request) for request in self._batch)
        run = Run(
            Phase.DECODE, t, self.profile.decode.iteration_s(len(self._batch)), count, list(self._batch)
        )
        if self._timers:
            run.cut_at(self._timers[0][0])
        return run

    # ------------------------------------------------------------------------------ ends of iterations

    def _pass(self, run: Run, now: float) -> None:
        """Book the iterations of the run that are over at `now`."""
        over = run.over_at(now)
        fresh = over - run.done
        if not fresh:
            return
        run.done = over
        t = run.end_of(over)
        if run.phase is Phase.PREFILL:
            if run.record is not None:
                self._records.append(run.record)
            for request, take in zip(run.batch, run.taken, strict=True):
                if request.stage is not Stage.ENDED:
                    self._computed(request, take, t)
        else:
            tokens = 0
            for request in run.batch:
                if request.stage is not Stage.ENDED:
                    tokens += self._produced(request, fresh, t)
            self._records.append(
                Iteration(
                    phase=Phase.DECODE,
                    count=fresh,
                    batch=len(run.batch),
                    t_uc=0,
                    pairs=0.0,
                    t_rst=0,
                    tokens=tokens,
                    seconds=fresh * run.each_s,
                )
            )
        if over == run.count:
            self._run = None
            self._free_t = t + (self.profile.idle_gap_s if run.phase is Phase.PREFILL else 0.0)

    def _computed(self, request: Request, take: int, t: float) -> None:
        assert request.lease is not None
        request.computed += take
        self._write(request, request.computed)
        if request.computed < request.prompt:
            return
        self._computing.remove(request)
        if request.kind is Kind.PREFILL:
            if len(request.tail):
                self.cache.keep_tail(request.tail)
            if request.keep:
                self._keep(request)
            self._end(request)
            self._events.append(Prefilled(request, t))
            return
        request.produced = 1
        if request.output > 1:
            self._go_on(request)
        else:
            self._end(request)
        self._events.append(Progress(request, t, 1, request.output <= 1))

    def _produced(self, request: Request, iterations: int, t: float) -> int:
        """Output tokens that `iterations` more decode iterations give a request."""
        before = request.produced
        request.iterations += iterations
        request.produced = min(request.output, request.decoded + request.iterations * self._acc // _MILLI)
        done = request.produced == request.output
        if done or not self._write_at_end:
            # The newest token has no KV before the next iteration.
            self._write(request, request.prompt + request.produced - 1)
        if done:
            self._batch.remove(request)
            self._end(request)
        if request.produced > before:
            self._events.append(Progress(request, t, request.produced, done))
        return request.produced - before

    def _iterations_left(self, request: Request) -> int:
        tokens = request.output - request.decoded
        return max(1, -(-tokens * _MILLI // self._acc) - request.iterations)

    def _write(self, request: Request, tokens: int) -> None:
        assert request.lease is not None
        have, full = request.lease.pages, tokens // self._page
        if full > have:
            decoded = request.kind is Kind.GENERATE and have >= request.prompt // self._page
            self.cache.write(request.lease, request.path[have:full], follow=decoded)

    def _end(self, request: Request) -> None:
        request.stage = Stage.ENDED
        del self._requests[request.seq]
        if request.lease is not None:
            self.cache.release(request.lease)
        self._unpin(request)

    def _keep(self, request: Request) -> None:
        # Never so many that nothing could come in any more.
        if 2 * (self.cache.l2_pinned + len(request.path)) <= self.cache.l2_pages:
            request.kept = self.cache.hold(request.path.plus(request.tail).pages)

    def _unpin(self, request: Request) -> None:
        if request.host_pins is not None:
            self.cache.let_go(request.host_pins)
            request.host_pins = None

    # ------------------------------------------------------------------------------ transfers, phase, helpers

    def _arrived(self, seq: int) -> None:
        """A transfer has ended."""
        request = self._requests.get(seq)
        if request is None:
            return
        request.ready = True
        if request.kind is Kind.PREFILL:
            expected = request.cached
            request.cached = self._usable(request, self.cache.held(request.path.pages))
            if request.lost:
                self.recomputed[request.lost] += max(0, expected - request.cached)
            return
        assert request.lease is not None
        corrupt = self.cache.corrupt_pages
        self.cache.load(request.lease, request.path.pages[request.lease.pages : request.prompt // self._page])
        self._unpin(request)
        lost = request.lost or ("evicted" if self.cache.corrupt_pages == corrupt else "corrupt")
        self._pulled(request, lost)

    def _hand_back(self, now: float, *, all_kinds: bool = False) -> None:
        for request in [*self._prefills, *self._waiting]:
            if request.routed and (all_kinds or not self.role.takes(request.kind)):
                queue = self._prefills if request.kind is Kind.PREFILL else self._waiting
                queue.remove(request)
                self._end(request)
                self._events.append(Moved(request, now))

    def _busy_with_lost(self) -> bool:
        """Whether routed requests are on the node that it would no longer take."""
        return any(r.routed and not self.role.takes(r.kind) for r in self._requests.values())

    def _work(self) -> Iterator[Request]:
        """Requests with prefill work, in the order in which they will get it."""
        return heapq.merge(self._computing, self._prefills, key=_seq)

    def _usable(self, request: Request, pages: int) -> int:
        return usable_tokens(request, pages, self._page)

    def _pages_needed(self, request: Request) -> int:
        return -(-(request.prompt + request.room_tokens) // self._page)

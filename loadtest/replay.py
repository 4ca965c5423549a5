"""A closed-loop replay of a trace: N agents at once against an OpenAI-compatible server.

Rules that hold here
- A step is sent when every step that it waits for has ended and its pause has passed, never earlier. Pauses
  are capped by `max_pause_s`, then divided by the speed-up.
- An agent that finishes its session takes the trace's next one. Without a duration every session is played
  once; with one the trace repeats, each time as new instances, until the duration has passed: then no new step
  starts and running ones finish.
- A failed step is counted with its reason, and the session goes on without its output.
- Every branch that was begun is ended: by the header on its last request, or by a DELETE when it stops early
  or that request fails. So also when the replay is interrupted.
- Times inside are wall seconds; the report is in seconds of the trace.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping

import msgspec
import numpy as np

from loadtest.client import Client, RequestFailed, ServerError
from loadtest.content import Blocks, BranchPrompts
from loadtest.ideal import IdealBranch, IdealCache
from loadtest.kv_work import Counters, KvWork, kv_work, read_counters
from loadtest.report import Report, Setting, build_report
from loadtest.tally import Measured, Progress, Tally
from loadtest.traces import Session, StepRef, Trace

DEFAULT_PAGE_TOKENS = 64
POLL_S = 1.0
END_BRANCHES_AT_ONCE = 16
END_BRANCHES_TIMEOUT_S = 10.0
CONNECTIONS_PER_AGENT = 8  # sub-agents run beside their parents


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to play a trace. duration_s, max_pause_s: seconds of the trace."""

    url: str
    agents: int
    model: str = ""  # the server's first when empty
    speedup: float | None = None  # the cluster's, else 1
    duration_s: float | None = None
    max_pause_s: float | None = None
    timeout_s: float = 600.0  # wall seconds, of one request
    run_id: str = ""  # begins the instances' names; made up when empty
    api_key: str = ""
    untagged: bool = False  # no branch is named: the router has to find out


class Replay:
    """One run. `await run()` once; `interrupt()` ends it early. Raises ServerError when the server is none."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace = trace
        self.plan = plan
        self.speedup = plan.speedup or 1.0
        self.interrupted = False
        self.model = plan.model
        self.page_size = DEFAULT_PAGE_TOKENS
        self.tally = Tally()
        self.open_branches: set[str] = set()  # begun and not ended
        self.stopping = asyncio.Event()
        self.client = Client(
            plan.url,
            connections=plan.agents * CONNECTIONS_PER_AGENT + 8,
            timeout_s=plan.timeout_s,
            api_key=plan.api_key,
        )
        self._run_id = plan.run_id or secrets.token_hex(4)
        self._sessions = 0
        self._shared_caches: dict[int, IdealCache] = {}
        self._started = 0.0
        self._agents: asyncio.Task[None] | None = None
        self._kv_work: KvWork | None = None

    # ----------------------------------------------------------------------------- the run

    async def run(self) -> None:
        async with self.client:
            await self._greet()
            before = await self._kv_counters()
            self._started = self.tally.last_end = time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._watch_cluster(), name="watch-cluster")
                    timer = group.create_task(self._stop_in_time(), name="duration")
                    self._agents = group.create_task(self._play_all(), name="agents")
                    if self.interrupted:
                        self._agents.cancel()
                    await asyncio.wait([self._agents])
                    watch.cancel()
                    timer.cancel()
            finally:
                await self.end_branches(list(self.open_branches))
                self._kv_work = kv_work(before, await self._kv_counters())

    def interrupt(self) -> None:
        """End at once: running requests are given up and count neither as answered nor as failed."""
        self.interrupted = True
        self.stopping.set()
        if self._agents is not None:
            self._agents.cancel()

    async def _greet(self) -> None:
        models = await self.client.models()
        known = {model.id: model for model in models}
        if not self.model:
            self.model = models[0].id
        elif self.model not in known:
            raise ServerError(f"{self.plan.url}: serves no model {self.model!r}, only {', '.join(known)}")
        page_size = known[self.model].page_size
        cluster = await self.client.cluster()
        if self.client.cluster_refused and self.plan.speedup is None:
            raise ServerError(
                f"{self.plan.url}: this key may not see how fast the cluster's clock runs: give --speedup, or an"
                " administrator's key"
            )
        if cluster is not None:
            if self.plan.speedup is None:
                self.speedup = cluster.speedup
            page_size = page_size or cluster.page_size
            self.tally.saw_cluster(cluster, 0.0)
        self.page_size = page_size or DEFAULT_PAGE_TOKENS

    async def _kv_counters(self) -> dict[str, Counters]:
        """Of each worker that can be reached; none when the server is no Evolving Infra router."""
        cluster = await self.client.cluster()
        nodes = cluster.nodes if cluster is not None else []
        texts = await asyncio.gather(*(self.client.node_metrics(node.url) for node in nodes if node.url))
        found: dict[str, Counters] = {}
        for node, text in zip((node for node in nodes if node.url), texts, strict=True):
            try:
                counters = read_counters(text or "")
            except ValueError:
                continue
            if counters:
                found[node.node] = counters
        return found

    async def _watch_cluster(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            cluster = await self.client.cluster()
            if cluster is not None:
                self.tally.saw_cluster(cluster, self._trace_s(time.monotonic()))

    async def _stop_in_time(self) -> None:
        if self.plan.duration_s is not None:
            await asyncio.sleep(self.plan.duration_s / self.speedup)
            self.stopping.set()

    def _trace_s(self, at: float) -> float:
        return (at - self._started) * self.speedup

    # ----------------------------------------------------------------------------- agents

    async def _play_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.agents):
                group.create_task(self._agent(), name=f"agent-{number}")

    async def _agent(self) -> None:
        while not self.stopping.is_set():
            number = self._sessions
            if self.plan.duration_s is None and number >= len(self.trace.sessions):
                return
            self._sessions += 1
            played, place = divmod(number, len(self.trace.sessions))
            session = self.trace.sessions[place]
            if session.scope == "local":
                cache, content = IdealCache(), f"{self._run_id}-{number}"
            else:
                cache = self._shared_caches.setdefault(played, IdealCache())
                content = f"{self._run_id}-pass{played}"
            await _Playing(self, session, f"{self._run_id}-{number}", content, cache).run()

    async def end_branches(self, branches: list[str]) -> None:
        gate = asyncio.Semaphore(END_BRANCHES_AT_ONCE)

        async def end(branch: str) -> None:
            async with gate:
                await self.client.end_branch(branch)
            self.open_branches.discard(branch)

        try:
            async with asyncio.timeout(END_BRANCHES_TIMEOUT_S), asyncio.TaskGroup() as group:
                for branch in branches:
                    group.create_task(end(branch), name=f"end-{branch}")
        except TimeoutError:
            pass  # branches that nobody ends expire at the router

    # ----------------------------------------------------------------------------- results

    def progress(self) -> Progress:
        elapsed_s = self._trace_s(time.monotonic()) if self._started else 0.0
        total = self.trace.requests if self.plan.duration_s is None else None
        return self.tally.progress(total=total, elapsed_s=elapsed_s, duration_s=self.plan.duration_s)

    def report(self, settings: Mapping[str, Setting], version: str) -> Report:
        wall_s = self.tally.last_end - self._started
        return build_report(
            self.tally,
            duration_s=wall_s * self.speedup,
            wall_s=wall_s,
            trace=self.trace.path,
            trace_format=self.trace.format,
            trace_requests=self.trace.requests,
            sessions=self._sessions,
            retries=self.client.retries,
            interrupted=self.interrupted,
            settings={
                **settings,
                "speedup": self.speedup,
                "model": self.model,
                "page_size": self.page_size,
                "run_id": self._run_id,
            },
            version=version,
            kv=self._kv_work,
        )


class _Playing:
    """One instance of a session."""

    def __init__(
        self, replay: Replay, session: Session, instance: str, content: str, cache: IdealCache
    ) -> None:
        self._replay = replay
        self._session = session
        self._instance = instance
        self._cache = cache
        self._blocks = Blocks(content, session.block_size, session.scope)
        self._begun = time.monotonic()
        self._ended = [[asyncio.Event() for _ in branch.steps] for branch in session.branches]
        self._ended_at = [[0.0] * len(branch.steps) for branch in session.branches]

    async def run(self) -> None:
        replay = self._replay
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._session.branches)):
                group.create_task(self._branch(index), name=f"{self._instance}/{index}")
        names = [self._name(index) for index in range(len(self._session.branches))]
        await replay.end_branches([name for name in names if name in replay.open_branches])

    def _name(self, index: int) -> str:
        return f"{self._instance}/{self._session.branches[index].key}"

    async def _branch(self, index: int) -> None:
        branch = self._session.branches[index]
        prompts = BranchPrompts(self._blocks, branch)
        ideal = IdealBranch(self._cache, self._replay.page_size)
        for number, step in enumerate(branch.steps):
            ready = await self._ready(step.after)
            if not await self._paused(ready, step.pause_s):
                break
            await self._step(index, number, prompts, ideal)
            self._end(index, number)
        # Who waits for steps that never ran finds that the replay stops.
        for number in range(len(branch.steps)):
            if not self._ended[index][number].is_set():
                self._end(index, number)

    def _end(self, index: int, number: int) -> None:
        self._ended_at[index][number] = time.monotonic()
        self._ended[index][number].set()

    async def _ready(self, after: tuple[StepRef, ...]) -> float:
        """When the last of these steps ended; the session's start when there are none."""
        ready = self._begun
        for branch, step in after:
            await self._ended[branch][step].wait()
            ready = max(ready, self._ended_at[branch][step])
        return ready

    async def _paused(self, ready: float, pause_s: float) -> bool:
        """False when the replay stops instead."""
        plan, stopping = self._replay.plan, self._replay.stopping
        if plan.max_pause_s is not None:
            pause_s = min(pause_s, plan.max_pause_s)
        until = ready + pause_s / self._replay.speedup
        while not stopping.is_set() and (rest_s := until - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(stopping.wait(), rest_s)
            except TimeoutError:
                pass
        return not stopping.is_set()

    async def _step(self, index: int, number: int, prompts: BranchPrompts, ideal: IdealBranch) -> None:
        replay = self._replay
        branch = self._session.branches[index]
        step = branch.steps[number]
        name = self._name(index)
        prompt = prompts.next()
        ideal_tokens = ideal.send(prompt)
        last = number == len(branch.steps) - 1
        headers = {}
        if not replay.plan.untagged:
            headers["X-EI-Branch"] = name
            if branch.parent >= 0:
                headers["X-EI-Parent-Branch"] = self._name(branch.parent)
            if last:
                headers["X-EI-Branch-Final"] = "true"
            replay.open_branches.add(name)
        try:
            answer = await replay.client.complete(
                _body(replay.model, prompt.text, step.output_tokens), headers
            )
        except RequestFailed as failure:
            replay.tally.failed(str(failure), time.monotonic())
            return
        if last:
            replay.open_branches.discard(name)
        if answer.token_ids:
            prompts.output(number, answer.token_ids)
            ideal.output(np.array(answer.token_ids, dtype=np.int32))
        measured = Measured(
            ttft_s=answer.ttft_s * replay.speedup,
            e2e_s=answer.e2e_s * replay.speedup,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            ideal_tokens=ideal_tokens,
        )
        as_asked = (answer.prompt_tokens, answer.completion_tokens) == (
            step.prompt_tokens,
            step.output_tokens,
        )
        replay.tally.answered(measured, as_asked, time.monotonic())


def _body(model: str, prompt: bytes, max_tokens: int) -> bytes:
    """The prompt is JSON already: a request is put together, not encoded again."""
    return (
        b'{"model":%b,"max_tokens":%d,"ignore_eos":true,"temperature":0,"stream":true,'
        b'"stream_options":{"include_usage":true},"return_token_ids":true,"prompt":[%b]}'
        % (msgspec.json.encode(model), max_tokens, prompt)
    )

"""Agents: what each sends and when, who takes the place of one that has finished, and how fleets change their size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulate.agents import Agent, Fleet
from loadtest.simulate.loop import Loop
from loadtest.simulate.pages import PageNames
from loadtest.traces import Branch, Session, Step, StepRef
from tests.test_simulate_cluster import synthetic


def step(*after: tuple[int, int], pause_s: float = 0.0) -> Step:
    fresh = np.empty(0, dtype=np.int64)
    return Step(8, 1, 0, fresh, -1, -1, tuple(StepRef(*ref) for ref in after), pause_s)


def session(*branches: list[Step]) -> Session:
    return Session(
        "s", 8, "local", [Branch(f"b{n}", min(n, 1) - 1, steps) for n, steps in enumerate(branches)]
    )


class Server:
    """Answers each step `takes_s` after it was sent."""

    def __init__(self, takes_s: float = 1.0) -> None:
        self.loop, self.names, self.takes_s = Loop(), PageNames(8), takes_s
        self.sent: list[tuple[str, StepRef, float]] = []
        self.told: list[tuple[str, float]] = []
        self.ends: dict[StepRef, float] = {}
        self.fleet: Fleet | None = None

    def agent(self, session: Session, name: str = "a", max_pause_s: float | None = None) -> Agent:
        return Agent(name, session, self.names, self.loop, self, max_pause_s)

    def request(self, agent: Agent, ref: StepRef) -> None:
        agent.pages(ref)
        self.sent.append((agent.name, ref, self.loop.now))
        self.loop.after(self.takes_s, self._end, agent, ref)

    def _end(self, agent: Agent, ref: StepRef) -> None:
        self.ends[ref] = self.loop.now
        agent.ended(ref)

    def branch_ended(self, branch: str) -> None:
        self.told.append((branch, self.loop.now))

    def session_ended(self, agent: Agent) -> None:
        self.told.append((agent.name, self.loop.now))
        if self.fleet is not None:
            self.fleet.ended(agent)

    def times(self) -> dict[tuple[int, int], float]:
        return {(ref.branch, ref.step): t for _, ref, t in self.sent}


def test_a_step_waits_for_all_that_it_comes_after_and_then_for_its_pause() -> None:
    server = Server()
    main = [step(pause_s=0.5), step((0, 0)), step((0, 1), (1, 1), pause_s=0.25)]
    sub = [step((0, 0), pause_s=2.0), step((1, 0))]
    server.agent(session(main, sub)).start()
    server.loop.run(100.0)
    assert server.times() == {(0, 0): 0.5, (0, 1): 1.5, (1, 0): 3.5, (1, 1): 4.5, (0, 2): 5.75}
    assert server.told == [("a/1", 5.5), ("a/0", 6.75), ("a", 6.75)]


def test_pauses_are_capped() -> None:
    for cap, expected in ((None, 100.0), (3.0, 6.0), (0.0, 0.0)):
        server = Server(0.0)
        server.agent(session([step(pause_s=40.0), step((0, 0), pause_s=60.0)]), max_pause_s=cap).start()
        server.loop.run(1000.0)
        assert server.times()[0, 1] == expected


def test_a_stopped_agent_sends_nothing_more() -> None:
    server = Server()
    agent = server.agent(session([step(), step((0, 0), pause_s=1.0)]))
    agent.start()
    server.loop.run(1.5)
    agent.stop()
    server.loop.run(100.0)
    assert list(server.times()) == [(0, 0)] and not server.told


@given(st.integers(0, 500), st.floats(0.0, 2.0))
@settings(max_examples=60, deadline=None)
def test_any_session_sends_every_step_once_and_none_too_early(seed: int, takes_s: float) -> None:
    server, played = Server(takes_s), synthetic(seed)
    server.names = PageNames(16)
    server.agent(played, max_pause_s=0.1).start()
    server.loop.run(1e4)
    times = server.times()
    assert len(server.sent) == len(times) == played.requests
    for number, branch in enumerate(played.branches):
        for at, each in enumerate(branch.steps):
            ready = max((server.ends[ref] for ref in each.after), default=0.0)
            assert abs(times[number, at] - (ready + min(0.1, each.pause_s))) < 1e-9
    assert [name for name, _ in server.told if "/" not in name] == ["a"]
    assert sorted(name for name, _ in server.told if "/" in name) == [
        f"a/{n}" for n in range(len(played.branches))
    ]
    assert server.told[-1] == ("a", max(server.ends.values()))


def fleet(server: Server, steps: int = 2) -> Fleet:
    def endless() -> Iterator[Session]:
        for _ in itertools.count():
            yield session([step(), *(step((0, n)) for n in range(steps - 1))])

    server.fleet = Fleet(endless(), server.agent, "f-")
    return server.fleet


def test_one_that_has_finished_is_replaced_at_once() -> None:
    server = Server()
    agents = fleet(server)
    agents.resize(3)
    server.loop.run(9.5)
    assert (agents.begun, len(agents.running)) == (15, 3)
    starts = {name: t for name, ref, t in reversed(server.sent) if not ref.step}
    assert [starts[f"f-{n}"] for n in (1, 2, 3, 4, 6, 15)] == [0.0, 0.0, 0.0, 2.0, 2.0, 8.0]


def test_a_fleet_grows_at_once_and_shrinks_as_sessions_end() -> None:
    server = Server()
    agents = fleet(server)
    at = server.loop.at
    at(0.0, agents.resize, 2)
    at(3.0, agents.resize, 5)
    at(4.5, agents.resize, 1)
    at(20.5, agents.resize, 0)
    running = []
    for t in (1.0, 3.1, 4.6, 6.5, 10.0, 21.9, 23.0):
        server.loop.run(t)
        running.append(len(agents.running))
    assert running == [2, 5, 5, 1, 1, 1, 0]
    # All that were begun ended; none was cut off.
    assert len([name for name, _ in server.told if "/" not in name]) == agents.begun
    before = agents.begun
    server.loop.run(50.0)
    assert agents.begun == before


def test_in_an_open_loop_nobody_is_replaced() -> None:
    server = Server()
    agents = fleet(server)
    for t in (1.0, 1.5, 7.0):
        server.loop.at(t, agents.begin)
    server.loop.run(50.0)
    assert agents.begun == 3 and not agents.running
    assert [t for _, ref, t in server.sent if not ref.step] == [1.0, 1.5, 7.0]

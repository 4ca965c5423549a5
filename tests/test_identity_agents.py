"""Agents of all kinds at once, interleaved at will: nobody gets another one's branch."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.router.claims import Hints
from services.router.identity import Identifier
from tests.test_identity import chain

# ------------------------------------------------------------------------------- interleaved agents


class Agents(RuleBasedStateMachine):
    """Agents of all kinds, interleaved; each appends, retries and forks. The machine knows who is who."""

    @initialize(routers=st.integers(1, 2))
    def start(self, routers: int) -> None:
        self.who = [Identifier(f"auto-{i}-", limit=1000) for i in range(routers)]
        self.agents: list[dict] = []
        self.owners: dict[str, int] = {}  # branch -> agent
        self.made = itertools.count()
        self.now = 0.0

    def add(self, headers: dict[str, str], session: object, *parts: str, exact: bool = False) -> None:
        self.agents.append(
            {"headers": headers, "session": session, "parts": list(parts), "branch": None, "exact": exact}
        )  # fmt: skip
        self.ask(len(self.agents) - 1, 0)

    def ask(self, index: int, router: int, finish: bool = True) -> None:
        agent = self.agents[index]
        self.now += 20.0
        who = self.who[router % len(self.who)]
        pages = chain(*agent["parts"])
        found = who.identify(agent["headers"], Hints(), pages, self.now)
        for other in self.who:
            if other is not who:
                other.observe(found.branch, pages, self.now)
        if agent["branch"] is None:
            agent["branch"] = found.branch
            assert found.branch not in self.owners, "two agents were merged"
            self.owners[found.branch] = index
        assert found.branch == agent["branch"], "an agent lost its branch"
        who.done(found.branch, self.now)

    @rule(kind=st.sampled_from(["none", "session", "claude", "agent", "codex"]), system=st.integers(0, 1))
    def new_conversation(self, kind: str, system: int) -> None:
        n = next(self.made)
        headers = {
            "none": {},
            "session": {"x-session-id": f"s{n}"},
            "claude": {"x-claude-code-session-id": f"s{n}"},
            "agent": {"x-claude-code-session-id": f"s{n}", "x-claude-code-agent-id": "A"},
            "codex": {"thread-id": f"s{n}", "session-id": "root"},
        }[kind]
        self.add(headers, None if kind == "none" else n, f"sys{system}*40", f"task {n}*3")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), shares=st.booleans())
    def sub_agent(self, data: st.DataObject, shares: bool) -> None:
        """Under its parent's session id, or without any: siblings share a system prompt, some with the parent."""
        parent = data.draw(st.sampled_from(self.agents))
        claude = "x-claude-code-session-id" in parent["headers"]
        if (
            parent["exact"]
            or "thread-id" in parent["headers"]
            or "x-claude-code-agent-id" in parent["headers"]
        ):
            return
        system = parent["parts"][0] if shares and not claude else "sub sys*12"
        self.add(parent["headers"], parent["session"], system, f"sub task {next(self.made)}*2")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), pages=st.integers(1, 90), router=st.integers(0, 1))
    def step(self, data: st.DataObject, pages: int, router: int) -> None:
        index = data.draw(st.integers(0, len(self.agents) - 1))
        self.agents[index]["parts"].append(f"step {next(self.made)}*{pages}")
        self.ask(index, router)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), router=st.integers(0, 1))
    def retry(self, data: st.DataObject, router: int) -> None:
        self.ask(data.draw(st.integers(0, len(self.agents) - 1)), router)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), samples=st.integers(1, 3))
    def parallel_samples(self, data: st.DataObject, samples: int) -> None:
        """While a step is in flight, others of the same prompt come, and are never heard of again."""
        index = data.draw(st.integers(0, len(self.agents) - 1))
        agent = self.agents[index]
        if agent["headers"].keys() & {"x-claude-code-agent-id", "thread-id"}:
            return
        agent["parts"].append(f"step {next(self.made)}*3")
        pages, who = chain(*agent["parts"]), self.who[0]
        self.now += 20.0
        begun = [who.identify(agent["headers"], Hints(), pages, self.now).branch for _ in range(samples + 1)]
        assert begun[0] == agent["branch"] and len(set(begun)) == samples + 1
        assert not self.owners.keys() & set(begun[1:])
        for branch in begun:
            who.done(branch, self.now)
        for branch in begun[1:]:
            self.who[0].end(branch)
        for other in self.who[1:]:
            other.observe(begun[0], pages, self.now)

    @precondition(lambda self: any(len(agent["parts"]) > 3 for agent in self.agents))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """An untagged copy of a conversation goes another way, from before its last step's prompt."""
        parent = data.draw(st.sampled_from([a for a in self.agents if len(a["parts"]) > 3]))
        if parent["headers"]:
            return
        keep = data.draw(st.integers(2, len(parent["parts"]) - 2))
        self.add({}, None, *parent["parts"][:keep], f"fork {next(self.made)}*2")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), size=st.integers(60, 120))
    def compaction(self, data: st.DataObject, size: int) -> None:
        """Of a Claude Code session's main agent: the system prompt and a summary."""
        found = [
            i
            for i, a in enumerate(self.agents)
            if a["branch"].startswith("claude:") and "~" not in a["branch"]
        ]
        if not found:
            return
        index = data.draw(st.sampled_from(found))
        agent = self.agents[index]
        agent["parts"] = [agent["parts"][0], f"summary {next(self.made)}*{size}"]
        self.ask(index, 0)

    @invariant()
    def books_agree(self) -> None:
        for who in getattr(self, "who", ()):
            assert who._pages == sum(known.path.size for known in who._known.values())
            assert sum(len(found) for found in who._sessions.values()) == len(who._known)
            assert len(who._ends) <= 3 * len(who._known) and len(who._firsts) <= len(who._known)
            assert all(known.in_flight == 0 for known in who._known.values())
            for marks in (who._ends, who._firsts):
                assert all(marks._filter[key & marks._mask] for key in marks._by_key)
                for key, marked in marks._by_key.items():
                    for name, known in marked.items():
                        assert who._known.get(name) is known
                        ends, first = who._keys(known)
                        assert key in ends or key == first


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_agents_that_only_append_keep_their_branches_under_load(seed):
    """Many agents over few system prompts, some in one session, with requests in flight at the same time."""
    rng, who = random.Random(seed), Identifier("auto-", limit=2000)
    agents = [
        {"headers": {} if i % 3 else {"x-session-id": f"s{i % 4}"}, "parts": [f"sys{i % 2}*20", f"task {i}"]}
        for i in range(60)
    ]
    flying: dict[int, str] = {}
    for t in range(1500):
        index = rng.randrange(len(agents))
        if index in flying:
            who.done(flying.pop(index), float(t))
            continue
        agent = agents[index]
        if "branch" in agent:
            agent["parts"].append(f"step {t}*{rng.randint(1, 9)}")
        branch = who.identify(agent["headers"], Hints(), chain(*agent["parts"]), float(t)).branch
        assert agent.setdefault("branch", branch) == branch
        flying[index] = branch
    seen = [agent["branch"] for agent in agents if "branch" in agent]
    assert len(set(seen)) == len(seen)
    assert len(who._known) == len(seen)

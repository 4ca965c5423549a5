"""Algorithm E.2: random histories of a cluster against plain sets, crashes of the directory among them."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.messages import (
    Phase,
    Tier,
)
from tests.directory_cluster import Cluster
from tests.directory_oracle import (
    PURE,
    page_names,
    placed,
)

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH
NODES = {"P1": P, "P2": P, "D1": D, "D2": D, "B1": BOTH}
nodes = st.sampled_from(sorted(NODES))
branches = st.sampled_from(["a", "b", "c", "d"])
tiers = st.sampled_from(list(Tier))
contexts = st.text(alphabet="xy", max_size=7)


class Histories(RuleBasedStateMachine):
    """Anything that a cluster can do to its counts, in any order."""

    @initialize()
    def begin(self) -> None:
        self.c = Cluster(NODES)
        self.contexts: dict[str, str] = {}

    @rule(branch=branches, context=contexts)
    def request(self, branch: str, context: str) -> None:
        """New, forked or sub-agent branch, append, compaction, truncation: whatever it is to this branch."""
        self.contexts[branch] = context
        self.c.request(branch, page_names(context))

    @rule(branch=branches, more=st.text(alphabet="xy", min_size=1, max_size=3))
    def append(self, branch: str, more: str) -> None:
        before = self.contexts.get(branch, "") if branch in self.c.oracle.path else ""
        self.request(branch, before + more)

    @rule(branch=branches, node=nodes, phase=st.sampled_from(PURE), fill=st.booleans())
    def place(self, branch: str, node: str, phase: Phase, fill: bool) -> None:
        here = self.c.oracle.phase[node]
        self.c.place(branch, node, phase if here is BOTH else here)
        if fill:
            self.c.store_pages(node, self.c.oracle.path.get(branch, ()))

    @rule(branch=branches)
    def end(self, branch: str) -> None:
        self.c.end(branch)

    @rule(branch=branches, node=nodes, tier=tiers, first=st.integers(0, 5), count=st.integers(1, 8))
    def store(self, branch: str, node: str, tier: Tier, first: int, count: int) -> None:
        self.c.store_pages(node, self.c.oracle.path.get(branch, ())[first : first + count], tier)

    @rule(node=nodes, tier=tiers, seed=st.integers(0, 2**16), all_of_it=st.booleans())
    def evict(self, node: str, tier: Tier, seed: int, all_of_it: bool) -> None:
        held = sorted(self.c.oracle.tiers.get((node, tier), set()))
        rng = random.Random(seed)
        self.c.remove_pages(node, tuple(p for p in held if all_of_it or rng.random() < 0.4), tier)

    @rule(node=nodes, tier=st.sampled_from([*Tier, None]))
    def clear(self, node: str, tier: Tier | None) -> None:
        self.c.clear(node, tier)

    @rule(node=nodes, phase=st.sampled_from(list(Phase)))
    def switch(self, node: str, phase: Phase) -> None:
        self.c.switch(node, phase)

    @rule(node=nodes)
    def restart(self, node: str) -> None:
        self.c.restart(node)

    @rule(back=st.integers(1, 30))
    def see_again(self, back: int) -> None:
        """Redis delivers again what the directory had, with the same numbers."""
        for event in self.c.streams.log[-back:]:
            self.c.directory.apply(event, self.c.now)

    @precondition(lambda self: bool(self.c.streams.log))
    @rule(node=nodes, branch=branches, late=st.floats(0.1, 5.0))
    def late_placement(self, node: str, branch: str, late: float) -> None:
        """Another router's placement that is older than what is known."""
        known = self.c.directory.table.get(branch)
        if known is not None and known.request_t > late:
            self.c.apply("branch", "late", placed(branch, node, P, known.request_t - late))

    @rule()
    def write(self) -> None:
        self.c.check_stored()

    @rule()
    def crash(self) -> None:
        self.c.crash()

    @invariant()
    def same_as_the_pseudocode(self) -> None:
        self.c.check()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)

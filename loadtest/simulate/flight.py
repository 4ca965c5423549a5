"""One request on its way through the simulated cluster."""

from __future__ import annotations

from loadtest.baselines.policy import Arrival, Placement
from loadtest.simulate.agents import Agent
from loadtest.simulate.pages import StepPages
from loadtest.traces import Step, StepRef
from worker.engines.simulated.requests import Request


class Flight:
    """One request on its way. Times are seconds, 0 for what has not happened."""

    __slots__ = (
        "agent", "arrival", "attempts", "cached_tokens", "decode", "decode_node", "fetched_tokens", "held",
        "ideal_tokens", "output_tokens", "pages", "placement", "prefill", "prefill_node", "prompt_tokens", "ref",
        "restored_tokens", "t_arrive", "t_end", "t_first", "t_placed", "t_prefill_end", "t_prefill_start",
    )  # fmt: skip

    def __init__(self, rid: str, agent: Agent, ref: StepRef, step: Step, pages: StepPages, t: float) -> None:
        self.agent, self.ref, self.pages = agent, ref, pages
        self.prompt_tokens, self.output_tokens = step.prompt_tokens, step.output_tokens
        self.arrival = Arrival(
            rid, agent.name, agent.branch(ref), pages.prompt, step.prompt_tokens, step.output_tokens
        )
        self.t_arrive = t
        self.t_placed = self.t_prefill_start = self.t_prefill_end = self.t_first = self.t_end = 0.0
        self.placement: Placement | None = None
        self.prefill_node = self.decode_node = ""
        self.prefill: Request | None = None
        self.decode: Request | None = None
        self.held: Request | None = None  # memory on the decode node
        self.cached_tokens = self.fetched_tokens = self.restored_tokens = self.ideal_tokens = 0
        self.attempts = 0

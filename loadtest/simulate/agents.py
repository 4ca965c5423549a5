"""Agents that play sessions of a trace: what each sends, and when.

Rules that hold here
- A step is sent when every step that it waits for has ended and its pause has passed. Pauses are capped.
- A step whose request failed is over as well: the session goes on.
- Closed loop: an agent that finished its session is followed by another one at once. Open loop: agents come when
  their arrivals say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from loadtest.simulate.loop import Loop
from loadtest.simulate.pages import PageNames, StepPages
from loadtest.traces import Session, StepRef


class Ask(Protocol):
    """What an agent wants of the cluster."""

    def request(self, agent: Agent, ref: StepRef) -> None:
        """Serve a step; answered by `Agent.ended`."""

    def branch_ended(self, branch: str) -> None: ...

    def session_ended(self, agent: Agent) -> None: ...


class Agent:
    """One playing of a session."""

    def __init__(
        self, name: str, session: Session, names: PageNames, loop: Loop, ask: Ask, max_pause_s: float | None
    ) -> None:
        self.name, self.session = name, session
        self._loop, self._ask, self._max_pause_s = loop, ask, max_pause_s
        self._pages = names.play(session)
        self._waits: dict[StepRef, int] = {}  # step -> how many it still waits for
        self._next: dict[StepRef, list[StepRef]] = {}  # step -> those that wait for it
        self._left = [len(branch.steps) for branch in session.branches]
        self.stopped = False

    def branch(self, ref: StepRef) -> str:
        """The branch's name, unlike any other's."""
        return f"{self.name}/{ref.branch}"

    def pages(self, ref: StepRef) -> StepPages:
        return self._pages.step(ref.branch, ref.step)

    def start(self) -> None:
        for number, branch in enumerate(self.session.branches):
            for at, step in enumerate(branch.steps):
                ref = StepRef(number, at)
                self._waits[ref] = len(step.after)
                for before in step.after:
                    self._next.setdefault(before, []).append(ref)
        for ref in [ref for ref, waits in self._waits.items() if not waits]:
            self._schedule(ref)

    def stop(self) -> None:
        """Send nothing more."""
        self.stopped = True

    def _schedule(self, ref: StepRef) -> None:
        pause_s = self.session.branches[ref.branch].steps[ref.step].pause_s
        if self._max_pause_s is not None:
            pause_s = min(pause_s, self._max_pause_s)
        self._loop.after(pause_s, self._send, ref)

    def _send(self, ref: StepRef) -> None:
        if not self.stopped:
            self._ask.request(self, ref)

    def ended(self, ref: StepRef) -> None:
        """The step is over, now."""
        self._left[ref.branch] -= 1
        if not self._left[ref.branch]:
            self._pages.forget(ref.branch)
            self._ask.branch_ended(self.branch(ref))
        for later in self._next.get(ref, ()):
            self._waits[later] -= 1
            if not self._waits[later]:
                self._schedule(later)
        if not any(self._left):
            self._ask.session_ended(self)


class Fleet:
    """Keeps agents coming. `begin` makes and starts one of the next session."""

    def __init__(
        self, sessions: Iterator[Session], make: Callable[[Session, str], Agent], prefix: str = "a"
    ) -> None:
        self._sessions, self._make, self._prefix = sessions, make, prefix
        self._made = 0
        self.running: dict[str, Agent] = {}
        self.wanted = 0

    def resize(self, agents: int) -> None:
        """So many agents at once from now on; those that are too many finish their session."""
        self.wanted = agents
        self._fill()

    def begin(self) -> bool:
        """One agent more; False when there is no session left."""
        session = next(self._sessions, None)
        if session is None:
            return False
        self._made += 1
        agent = self._make(session, f"{self._prefix}{self._made}")
        self.running[agent.name] = agent
        agent.start()
        return True

    def _fill(self) -> None:
        while len(self.running) < self.wanted and self.begin():
            pass

    def ended(self, agent: Agent) -> None:
        """The agent's session is over: another one takes its place, if it has one."""
        del self.running[agent.name]
        self._fill()

    @property
    def begun(self) -> int:
        return self._made

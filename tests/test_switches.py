"""Phase switches in place while agents work: no request fails, and no node loses a page by it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp

from shared.bus import Bus
from shared.messages import RoleAck, RoleStage, SplitWanted
from tests.conftest import eventually
from tests.up import Up

SWITCHES = 100
AGENTS = 8


class Agent:
    """Talks on and on, each time with all that was said before; begins anew when that becomes long."""

    def __init__(self, number: int, url: str, http: aiohttp.ClientSession) -> None:
        self._rng = random.Random(number)
        self._url, self._http = url, http
        self._branch = 0
        self.number = number
        self.answers: list[tuple[dict[str, Any], str]] = []
        self.failures: list[str] = []

    async def run(self, stop: asyncio.Event) -> None:
        messages: list[dict[str, str]] = []
        while not stop.is_set():
            if len(messages) > 12:
                messages, self._branch = [], self._branch + 1
            said = " ".join(f"word{self._rng.randrange(10**6)}" for _ in range(60))
            messages = [*messages, {"role": "user", "content": said}]
            body = {
                "model": "m",
                "messages": messages,
                "max_tokens": self._rng.randrange(5, 40),
                "temperature": 0,
            }
            text = await self.ask(body)
            if text is None:
                continue
            self.answers.append((body, text))
            messages = [*messages, {"role": "assistant", "content": text}]

    async def ask(self, body: dict[str, Any]) -> str | None:
        headers = {"X-EI-Branch": f"agent-{self.number}-{self._branch}"}
        try:
            async with self._http.post(
                self._url + "/v1/chat/completions", json=body, headers=headers
            ) as answer:
                if answer.status != 200:
                    self.failures.append(f"{answer.status}: {await answer.text()}")
                    return None
                found: str = (await answer.json())["choices"][0]["message"]["content"]
                return found
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return None


async def test_a_hundred_switches_under_load_fail_no_request(tmp_path: Path) -> None:
    flags = (
        "--nodes", "4", "--profile", "tiny", "--model", "m", "--split", "2P2D", "--speedup", "4", "--warmup-s", "1",
        "--window-s", "36000",
    )  # fmt: skip
    with Up(tmp_path, *flags) as up:
        bus = await Bus.connect(up.redis, "main")
        publisher = bus.publisher("roles", "tester")
        sending = asyncio.create_task(publisher.run())
        reader = bus.reader({})
        await reader.follow("roles")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:

            async def split() -> tuple[int, int, bool]:
                async with http.get(up.url + "/ei/v1/cluster") as answer:
                    nodes = (await answer.json())["nodes"]
                phases = [node["phase"] for node in nodes]
                return phases.count("prefill"), phases.count("decode"), any(n["draining"] for n in nodes)

            async def reached(prefill: int) -> bool:
                return await split() == (prefill, 4 - prefill, False)

            await eventually(lambda: reached(2), 30.0)
            stop = asyncio.Event()
            agents = [Agent(number, up.url, http) for number in range(AGENTS)]
            working = [asyncio.create_task(agent.run(stop)) for agent in agents]
            switched, epochs, wanted = 0, set(), 2
            while switched < SWITCHES:
                wanted = 1 if wanted > 1 else 3
                publisher.publish(SplitWanted(wanted, 4 - wanted, hold=True))
                await eventually(lambda: reached(wanted), 30.0)  # noqa: B023
                for event in await reader.read(0.1):
                    message = event.message
                    if isinstance(message, RoleAck) and message.stage is RoleStage.SWITCHED:
                        switched += 1
                        epochs.add(message.epoch)
            stop.set()
            await asyncio.gather(*working)
            failures = [failure for agent in agents for failure in agent.failures]
            assert not failures, failures[:5]
            answers = [pair for agent in agents for pair in agent.answers]
            assert len(answers) > 2 * len(epochs), "the agents hardly got to say anything"
            # What was said while nodes switched is what is said when nothing happens.
            for body, text in random.Random(1).sample(answers, 20):
                assert await agents[0].ask(body) == text
        sending.cancel()
        await bus.close()

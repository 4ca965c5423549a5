"""Agents for a cluster in which something breaks all the time: the official clients, and what they make of an answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import anthropic
import openai

MODEL = "m"
RETRIES = 2  # the clients' default
DEADLINE_S = 20.0  # X-EI-Timeout
CLIENT_TIMEOUT_S = 25.0  # without a byte
FREEZE_S = 10.0
# A frozen router begins to count its deadline when it goes on. The rest is the client's wait before it tries again.
ATTEMPT_S = max(CLIENT_TIMEOUT_S, DEADLINE_S + FREEZE_S) + 5.0
SYSTEM = (
    "You are an agent that works on while everything around it breaks. Say what you see, word by word. " * 2
)


class Asked(NamedTuple):
    api: Literal["chat", "messages"]
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    stream: bool


class Said(NamedTuple):
    text: str
    finish: str | None
    tokens: int


class Broken(Exception):
    """A stream broke after it had begun."""

    def __init__(self, how: Literal["event", "cut"], text: str, why: str) -> None:
        super().__init__(f"{how}: {why}")
        self.how, self.text = how, text


class Happened(NamedTuple):
    at: float
    what: Literal["retry", "event", "cut"]
    why: str


class Clients:
    """Both official clients on one address; `attempts` are the times at which they sent the last call's requests."""

    def __init__(self, url: str, retries: int) -> None:
        self.attempts: list[float] = []
        self.statuses: list[int] = []

        async def sends(_: object) -> None:
            self.attempts.append(time.monotonic())

        async def answered(response: Any) -> None:
            self.statuses.append(response.status_code)

        hooks = {"request": [sends], "response": [answered]}
        settings: dict[str, Any] = {"api_key": "none", "timeout": CLIENT_TIMEOUT_S, "max_retries": retries}
        self._openai = openai.AsyncOpenAI(
            base_url=url + "/v1", http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks), **settings
        )
        self._anthropic = anthropic.AsyncAnthropic(
            base_url=url, http_client=anthropic.DefaultAsyncHttpxClient(event_hooks=hooks), **settings
        )

    async def close(self) -> None:
        await self._openai.close()
        await self._anthropic.close()

    async def ask(self, asked: Asked, headers: dict[str, str]) -> Said:
        """Raises Broken, or what the clients raise."""
        self.attempts.clear()
        self.statuses.clear()
        words: dict[str, Any] = {
            "model": MODEL, "messages": asked.messages, "max_tokens": asked.max_tokens, "stream": asked.stream,
            "extra_headers": headers,
        }  # fmt: skip
        if asked.api == "chat":
            if asked.stream:
                words["stream_options"] = {"include_usage": True}
            answer = await self._openai.chat.completions.create(**words)
            return await self._streamed(_chat_parts(answer)) if asked.stream else _chat_whole(answer)
        answer = await self._anthropic.messages.create(**words)
        return await self._streamed(_message_parts(answer)) if asked.stream else _message_whole(answer)

    @staticmethod
    async def _streamed(parts: AsyncIterator[tuple[str, str | None, int]]) -> Said:
        text, finish, tokens = "", None, 0
        try:
            async for more, finish_now, tokens_now in parts:
                text, finish, tokens = text + more, finish_now or finish, tokens_now or tokens
        except openai.APIConnectionError as error:
            raise Broken("cut", text, str(error)) from None
        except anthropic.APIConnectionError as error:
            raise Broken("cut", text, str(error)) from None
        except (openai.APIError, anthropic.APIError) as error:
            raise Broken("event", text, str(error)) from None
        except Exception as error:
            if not type(error).__module__.startswith(("httpx", "httpcore")):
                raise
            raise Broken("cut", text, f"{type(error).__name__}: {error}") from None
        assert finish is not None, f"the stream ended after {text!r} as if it were whole"
        return Said(text, finish, tokens)


async def _chat_parts(stream: Any) -> AsyncIterator[tuple[str, str | None, int]]:
    async for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage else 0
        if chunk.choices:
            yield chunk.choices[0].delta.content or "", chunk.choices[0].finish_reason, tokens
        else:
            yield "", None, tokens


def _chat_whole(answer: Any) -> Said:
    choice = answer.choices[0]
    return Said(choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens)


async def _message_parts(stream: Any) -> AsyncIterator[tuple[str, str | None, int]]:
    finish, tokens = None, 0
    async for event in stream:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            yield event.delta.text, None, 0
        elif event.type == "message_delta":
            finish, tokens = event.delta.stop_reason, event.usage.output_tokens
        elif event.type == "message_stop":
            yield "", finish, tokens


def _message_whole(answer: Any) -> Said:
    text = "".join(block.text for block in answer.content if block.type == "text")
    return Said(text, answer.stop_reason, answer.usage.output_tokens)


class Agent:
    """Conversations, one after the other, with everything that was said before. Even ones name their branch."""

    def __init__(self, number: int, url: str, retries: int) -> None:
        self._rng = random.Random(number)
        self._name, self._tagged = f"agent-{number}", number % 2 == 0
        self._api: Literal["chat", "messages"] = "chat" if number // 2 % 2 == 0 else "messages"
        self._clients = Clients(url, retries)
        self._retries = retries
        self.answers: list[tuple[Asked, Said]] = []
        self.failures: list[tuple[float, str]] = []
        self.happened: list[Happened] = []
        self.took_s: list[tuple[float, float]] = []  # when a request ended, and after how long
        self.longest_attempt_s = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        try:
            for conversation in itertools.count():
                turns = self._rng.randint(3, 6)
                # Nothing that was said before shares a prompt with this, but the system prompt.
                messages: list[dict[str, str]] = [
                    {"role": "user", "content": f"{SYSTEM} {self._name}.{conversation}"}
                ]
                for turn in range(turns):
                    if stop.is_set():
                        return
                    asked = Asked(
                        self._api, tuple(messages), self._rng.choice((24, 64, 160)), self._rng.random() < 0.6
                    )
                    said = await self._ask(asked, f"{self._name}.{conversation}", turn == turns - 1)
                    if said is None:
                        break  # as a user would, whose agent gave up
                    words = " ".join(f"word{self._rng.randrange(10**4)}" for _ in range(12))
                    messages += [
                        {"role": "assistant", "content": said.text},
                        {"role": "user", "content": words},
                    ]
                    await asyncio.sleep(self._rng.uniform(0.0, 0.4))
        finally:
            await self._clients.close()

    async def _ask(self, asked: Asked, branch: str, final: bool) -> Said | None:
        headers = {"X-EI-Timeout": f"{DEADLINE_S:g}"}
        if self._tagged:
            headers |= {"X-EI-Branch": branch} | ({"X-EI-Branch-Final": "true"} if final else {})
        begun = time.monotonic()
        read = ""
        try:
            async with asyncio.timeout(2 * (1 + self._retries) * ATTEMPT_S):
                try:
                    said = await self._once(asked, headers)
                except Broken as broken:
                    self._happens(broken.how, str(broken))
                    read = broken.text
                    said = await self._once(asked, headers)
            assert said.text.startswith(read), f"the broken stream said {read!r}, then {said.text!r}"
        except Exception as error:
            what = f"{branch} {asked.api}{' stream' if asked.stream else ''}"
            why = f"{what} after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {str(error)[:400]}"
            self.failures.append((time.monotonic(), f"{why} (answers {self._clients.statuses})"))
            return None
        self.took_s.append((time.monotonic(), time.monotonic() - begun))
        self.answers.append((asked, said))
        return said

    async def _once(self, asked: Asked, headers: dict[str, str]) -> Said:
        try:
            return await self._clients.ask(asked, headers)
        finally:
            times = [*self._clients.attempts, time.monotonic()]
            lasted = [end - begin for begin, end in itertools.pairwise(times)]
            self.longest_attempt_s = max(self.longest_attempt_s, *lasted, 0.0)
            for at in times[1:-1]:
                self.happened.append(Happened(at, "retry", str(self._clients.statuses)))

    def _happens(self, what: Literal["event", "cut"], why: str) -> None:
        self.happened.append(Happened(time.monotonic(), what, why))

"""Answers by an OpenAI-compatible endpoint, such as a vLLM server, many requests in flight.

The endpoint must serve the target itself: token ids come from the target's own tokenizer and
template, and the endpoint's count of prompt tokens is held against them. What fails for a while (no
connection, 408, 425, 429, 5xx, a broken answer) is asked again after growing waits; an endpoint
that stays away ends the run with what it has, to be gone on with later.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from forespeak.errors import DataError, OptionError, PromptError
from forespeak.models.tokenizer import Tokenizer
from forespeak.train.talks import Job, Limits, Outcome, Talk, derived
from forespeak.train.turns import TurnMarks
from forespeak.types import FinishReason

_FOR_A_WHILE = frozenset((408, 425, 429))
_OF_THE_PROMPT = frozenset((400, 413, 422))
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class EndpointSettings:
    """Where and how to ask.

    Attributes:
        url: base of the API, such as http://localhost:8000/v1.
        model: as the endpoint names it.
        in_flight: requests at a time.
        api_key_variable: environment variable that holds the key; None sends none.
        timeout_s: for one answer.
        tries: of one request.
        first_wait_s: before the second try; doubles each time.
    """

    url: str
    model: str
    in_flight: int
    api_key_variable: str | None = None
    timeout_s: float = 600.0
    tries: int = 6
    first_wait_s: float = 0.5

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise OptionError(
                f"--endpoint {self.url!r} is no address; allowed: http:// or https://, such as "
                "http://localhost:8000/v1."
            )

    def headers(self) -> dict[str, str]:
        """Of every request.

        Raises:
            OptionError: the variable that should hold the key is not set.
        """
        if self.api_key_variable is None:
            return {}
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise OptionError(
                f"The environment variable {self.api_key_variable} is not set; put the endpoint's "
                "key there, or leave --api-key-variable out."
            )
        return {"Authorization": f"Bearer {key}"}


class _Rejected(Exception):
    """The endpoint takes no such prompt."""


class _Passing(Exception):
    """Worth another try. ``wait_s`` is what the endpoint asks for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class _Answer:
    text: str
    reason: FinishReason
    num_prompt_tokens: int | None


class EndpointAnswers:
    """Dialogues answered by an endpoint.

    Args:
        settings: where and how to ask.
        tokenizer: the target's.
        limits: of prompts and answers.
    """

    def __init__(self, settings: EndpointSettings, tokenizer: Tokenizer, limits: Limits) -> None:
        self._settings, self._tokenizer, self._limits = settings, tokenizer, limits
        self._marks = TurnMarks.of(tokenizer)
        self._headers = settings.headers()

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Answer jobs; each comes out when it has ended, in no particular order.

        Raises:
            DataError: the endpoint stays away, refuses every request, or serves another target.
        """
        source = iter(jobs)
        with asyncio.Runner() as runner:
            client = runner.run(self._open())
            running: set[asyncio.Task[Outcome]] = set()
            try:
                while True:
                    while len(running) < self._settings.in_flight:
                        job = next(source, None)
                        if job is None:
                            break
                        task = runner.get_loop().create_task(self._answer(client, job))
                        running.add(task)
                    if not running:
                        return
                    done, running = runner.run(_first_of(running))
                    # An error ends the run: what was answered beside it comes out before.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        yield task.result()
            finally:
                runner.run(_end(running, client))

    async def _open(self) -> httpx.AsyncClient:
        number = self._settings.in_flight
        return httpx.AsyncClient(
            headers=self._headers, timeout=httpx.Timeout(self._settings.timeout_s, connect=30.0),
            limits=httpx.Limits(max_connections=number, max_keepalive_connections=number),
        )  # fmt: skip

    async def _answer(self, client: httpx.AsyncClient, job: Job) -> Outcome:
        talk = Talk(job, self._tokenizer, self._marks, self._limits)
        while (ids := talk.ask()) is not None:
            try:
                answer = await self._request(client, talk)
            except _Rejected:
                talk.reject()
                continue
            if answer.num_prompt_tokens not in (None, len(ids)):
                raise DataError(
                    f"{self._settings.url} counts {answer.num_prompt_tokens} tokens of a prompt "
                    f"that has {len(ids)} in the target's template; it serves another model or "
                    "template. Serve the target itself, or name what is served with --target."
                )
            talk.take(self._token_ids(talk, ids, answer), answer.reason)
        return talk.outcome()

    def _token_ids(self, talk: Talk, prompt_ids: list[int], answer: _Answer) -> list[int]:
        """The answer as it stands in the target's own rendering."""
        end = [self._marks.end_of_answer] if answer.reason == "stop" else []
        message = {"role": "assistant", "content": answer.text}
        try:
            whole = self._tokenizer.render_whole([*talk.messages, message])
        except PromptError:  # an answer of no Unicode text
            return end
        content = whole[len(prompt_ids) :]
        if whole[: len(prompt_ids)] != prompt_ids:
            content = self._tokenizer.encode(answer.text, add_special_tokens=False)
        if self._marks.end_of_answer in content:
            content = content[: content.index(self._marks.end_of_answer)]
        return content + end

    async def _request(self, client: httpx.AsyncClient, talk: Talk) -> _Answer:
        body = {
            "model": self._settings.model, "messages": talk.messages,
            "max_tokens": talk.num_new_tokens, "temperature": talk.job.temperature,
            "seed": talk.seed,
        }  # fmt: skip
        for number in range(1, self._settings.tries + 1):
            try:
                return await self._try(client, body)
            except _Passing as error:
                if number == self._settings.tries:
                    raise DataError(
                        f"{self._settings.url} did not answer in {number} tries ({error}); what "
                        "was answered is kept. Look after the endpoint and run the command again: "
                        "it goes on where it stopped."
                    ) from None
                # Spread out, so that many requests that failed together do not come back together.
                _, share = derived(talk.seed, "wait", str(number))
                wait = self._settings.first_wait_s * 2 ** (number - 1) * (0.5 + share)
                await asyncio.sleep(min(error.wait_s or wait, _LONGEST_WAIT_S))
        raise AssertionError("unreachable")

    async def _try(self, client: httpx.AsyncClient, body: dict[str, Any]) -> _Answer:
        url = self._settings.url.rstrip("/") + "/chat/completions"
        try:
            response = await client.post(url, json=body)
        except httpx.TransportError as error:
            raise _Passing(str(error) or type(error).__name__) from None
        status = response.status_code
        if status in _FOR_A_WHILE or status >= 500:
            raise _Passing(f"status {status}", _asked_wait(response))
        if status in _OF_THE_PROMPT:
            raise _Rejected
        if status != 200:
            raise DataError(
                f"{url} answers with status {status} for model {self._settings.model} "
                f"({response.text.strip()[:160]}); check the address (it usually ends in /v1), the "
                "model's name and the key."
            )
        return _read(response)


async def _first_of(
    running: set[asyncio.Task[Outcome]],
) -> tuple[set[asyncio.Task[Outcome]], set[asyncio.Task[Outcome]]]:
    return await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


async def _end(running: set[asyncio.Task[Outcome]], client: httpx.AsyncClient) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.aclose()


def _asked_wait(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # absent, or a date
        return None


def _read(response: httpx.Response) -> _Answer:
    try:
        record = response.json()
        choice = record["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        usage = record.get("usage") or {}
        count = usage.get("prompt_tokens")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _Passing("an answer in another form than OpenAI's") from None
    if reason not in ("stop", "length"):
        raise _Rejected  # filtered, or a call of a tool
    return _Answer(
        text if isinstance(text, str) else "", reason, count if isinstance(count, int) else None
    )

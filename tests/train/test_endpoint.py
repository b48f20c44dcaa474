"""Answers over HTTP, from a small server in a thread that fails in every way it is told to."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forespeak.errors import DataError, OptionError
from forespeak.train.dialogues import DIALOGUES, Fate, read_dialogues, read_samples
from forespeak.train.endpoint import EndpointAnswers, EndpointSettings
from forespeak.train.making import Jobs, Making, begin, jobs_of
from forespeak.train.overlap import Exclusion
from forespeak.train.talks import Limits, Outcome
from tests.train.talking import TOKENIZER, encode, manifest, prompt_set

pytestmark = pytest.mark.slow

Reply = tuple[int, Any] | None  # status and body; None hangs up
LIMITS = Limits(new_tokens=24, prompt_tokens=90, context=128)


def completion(body: dict[str, Any], text: str | None = None, reason: str = "stop") -> Any:
    """An answer that follows from the request alone, as a server with a seed gives it."""
    if text is None:
        text = f"ab {body['seed'] % 1000} {len(body['messages'])}"
    used = len(TOKENIZER.render_chat(body["messages"]))
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": used}}


@dataclass
class Server:
    """What it is told to answer, and what it was asked."""

    reply: Callable[[dict[str, Any], int], Reply]  # of the body, and how often it was asked before
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(reply: Callable[[dict[str, Any], int], Reply]) -> Iterator[Server]:
    server = Server(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(data)
            with server.lock:
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
                before = server.asked[data.decode()]
                server.asked[data.decode()] += 1
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
            answer = server.reply(body, before)
            with server.lock:
                server.now -= 1
            if answer is None:
                self.close_connection = True
                return
            status, record = answer
            out = record if isinstance(record, bytes) else json.dumps(record).encode()
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Length", str(len(out)))
            if status == 429:
                self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(out)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def jobs(number: int = 12) -> Jobs:
    turns = [[f"a{n}", f"b{n}"] if n % 3 == 0 else [f"a{n}"] for n in range(number)]
    return jobs_of(
        [prompt_set(*turns)], Exclusion(), seed=3, temperature=0.7, greedy_share=0.5
    )  # fmt: skip


def answers(url: str, **changes: Any) -> EndpointAnswers:
    values: dict[str, Any] = {"in_flight": 4, "first_wait_s": 0.001, "tries": 4, "timeout_s": 5.0}
    return EndpointAnswers(EndpointSettings(url, "tiny", **values | changes), TOKENIZER, LIMITS)


def make(folder: Path, url: str, on_outcome: Any = lambda _: None, **changes: Any) -> Any:
    begun = begin(folder, manifest(), TOKENIZER)
    return Making(folder, begun, jobs(), TOKENIZER).run(
        answers(url, **changes), on_outcome=on_outcome
    )


def test_requests_and_dialogues(tmp_path: Path):
    with serving(lambda body, _: (200, completion(body))) as server:
        done = make(tmp_path, server.url)
    assert done.counts == {"whole": 12}
    found = list(read_dialogues(tmp_path))
    assert [one.id for one in found] == [job.prompt.id for job in jobs().jobs]
    for job, one in zip(jobs().jobs, found, strict=True):
        assert (one.temperature, one.seed) == (job.temperature, job.seed)
        for number, answer in enumerate(one.answers):
            text = f"ab {(job.seed + number) % 1000} {2 * number + 1}"
            assert answer == (*encode(text), 0)
            messages: list[dict[str, str]] = []
            for turn, earlier in zip(one.turns[:number], one.answers, strict=False):
                messages.append({"role": "user", "content": turn})
                messages.append({"role": "assistant", "content": TOKENIZER.decode(earlier)})
            messages.append({"role": "user", "content": one.turns[number]})
            asked = {
                "model": "tiny", "messages": messages, "max_tokens": 24,
                "temperature": job.temperature, "seed": job.seed + number,
            }  # fmt: skip
            assert server.bodies.count(asked) == 1
    assert len(read_samples(tmp_path, TOKENIZER).samples) == 12
    assert server.most_at_once <= 4


def test_many_are_in_flight(tmp_path: Path):
    met = threading.Barrier(4, timeout=20)

    def together(body: dict[str, Any], _: int) -> Reply:
        met.wait()  # passes only when four are there at once
        return 200, completion(body)

    with serving(together) as server:
        make(tmp_path, server.url)
    assert server.most_at_once == 4


def test_failures_that_pass_change_nothing(tmp_path: Path):
    """Every request fails in its own way first, some several times."""
    failures: list[Reply] = [
        (500, {}), (503, b"busy"), (429, {}), None, (200, b"no json"), (200, {"choices": []}),
        (200, {"choices": [{"message": None, "finish_reason": "stop"}]}), (408, {}),
    ]  # fmt: skip

    def flaky(body: dict[str, Any], before: int) -> Reply:
        kind = body["seed"] % len(failures)
        return failures[(kind + before) % len(failures)] if before < kind % 4 else (
            200, completion(body)
        )  # fmt: skip

    with serving(lambda body, _: (200, completion(body))) as server:
        make(tmp_path / "calm", server.url)
    with serving(flaky) as server:
        make(tmp_path / "flaky", server.url)
    assert max(server.asked.values()) > 1
    for name in (DIALOGUES, "manifest.json"):
        assert (tmp_path / "flaky" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_an_endpoint_that_stays_away_ends_the_run_and_keeps_what_it_has(tmp_path: Path):
    served = 0

    def dying(body: dict[str, Any], _: int) -> Reply:
        nonlocal served
        served += 1
        return (200, completion(body)) if served <= 7 else (502, {})

    with (
        serving(dying) as server,
        pytest.raises(DataError, match=r"did not answer in 4 tries \(status 502\)"),
    ):
        make(tmp_path / "cut", server.url)
    kept = list(read_dialogues(tmp_path / "cut"))
    assert kept
    with serving(lambda body, _: (200, completion(body))) as server:
        make(tmp_path / "cut", server.url)
        asked = [body["messages"][0]["content"] for body in server.bodies]
        assert not {one.turns[0] for one in kept} & set(asked)
        make(tmp_path / "whole", server.url)
    for name in (DIALOGUES, "manifest.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_no_server_at_all(tmp_path: Path):
    with serving(lambda *_: None) as server:
        pass
    with pytest.raises(DataError, match="did not answer in 2 tries"):
        make(tmp_path, server.url, tries=2)


def test_an_interrupt_ends_the_requests(tmp_path: Path):
    def stop(_: Outcome) -> None:
        raise KeyboardInterrupt

    with serving(lambda body, _: (200, completion(body))) as server:
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, server.url, on_outcome=stop)
        assert len(list(read_dialogues(tmp_path))) == 1
        assert make(tmp_path, server.url).counts == {"whole": 12}


@pytest.mark.parametrize("status", [401, 403, 404, 405, 301])
def test_a_wrong_address_or_key_ends_the_run(tmp_path: Path, status: int):
    with (
        serving(lambda *_: (status, {"error": "no such model"})) as server,
        pytest.raises(DataError, match=f"status {status} for model tiny .*no such model"),
    ):
        make(tmp_path, server.url)
    assert not list(read_dialogues(tmp_path))


def test_prompts_that_are_rejected_are_counted(tmp_path: Path):
    def strict(body: dict[str, Any], _: int) -> Reply:
        first, last = (body["messages"][at]["content"] for at in (0, -1))
        if last == "b3":
            return 400, {"error": "too long"}
        if first == "a1":
            return 422, {}
        if first == "a2":
            return 200, completion(body, "a", "content_filter")
        if first == "a4":
            return 200, completion(body, "")
        if first == "a5":
            return 200, completion(body, "a" * 24, "length")
        return 200, completion(body)

    with serving(strict) as server:
        done = make(tmp_path, server.url)
    assert done.counts == {"whole": 8, "cut_rejected": 1, "rejected": 2, "empty": 1}
    found = {one.turns[0]: one for one in read_dialogues(tmp_path)}
    assert found["a3"].fate is Fate.CUT_REJECTED and len(found["a3"].answers) == 1
    assert found["a5"].finish_reasons == ("length",)
    assert found["a5"].answers == (tuple(encode("a" * 24)),)


def test_special_tokens_in_an_answer_end_it(tmp_path: Path):
    with serving(lambda body, _: (200, completion(body, "ab<end><user>c"))) as server:
        make(tmp_path, server.url)
    assert {one.answers[0] for one in read_dialogues(tmp_path)} == {(*encode("ab"), 0)}


def test_another_model_or_template_is_noticed(tmp_path: Path):
    def other(body: dict[str, Any], _: int) -> Reply:
        record = completion(body)
        record["usage"]["prompt_tokens"] += 2
        return 200, record

    with (
        serving(other) as server,
        pytest.raises(DataError, match="serves another model or template"),
    ):
        make(tmp_path, server.url)


def test_a_server_that_does_not_count_is_believed(tmp_path: Path):
    def silent(body: dict[str, Any], _: int) -> Reply:
        record = completion(body)
        del record["usage"]
        return 200, record

    with serving(silent) as server:
        assert make(tmp_path, server.url).counts == {"whole": 12}


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINY_KEY", "abc")
    with serving(lambda body, _: (200, completion(body))) as server:
        make(tmp_path / "with", server.url, api_key_variable="TINY_KEY")
        assert {one["Authorization"] for one in server.headers} == {"Bearer abc"}
        server.headers.clear()
        make(tmp_path / "without", server.url)
        assert not any("Authorization" in one for one in server.headers)
    with pytest.raises(OptionError, match="NO_SUCH_KEY is not set"):
        answers(server.url, api_key_variable="NO_SUCH_KEY")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/v1", "http://", "http://a:port", ""])
def test_what_is_no_address(url: str):
    with pytest.raises(OptionError, match="is no address; allowed: http:// or https://"):
        answers(url)

"""Judges behind a real HTTP server that plays an OpenAI-compatible one: seeing, busy, slow, failing and hostile."""

import asyncio
import base64
import contextlib
import io
import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flowrl
from flowrl.rewards import (
    ChatClient,
    JudgeError,
    QwenVLJudge,
    RewardError,
    RewardServer,
    RewardSet,
    RubricJudge,
    SoftTIFA,
    UnifiedReward,
    UnifiedReward2,
    VQAScore,
    quantise,
    remote,
    resolve,
    vlm_client,
    vlm_judge,
)
from flowrl.rewards.vlm_judge import atom_probability, soft_tifa, spellings

IMAGES = torch.rand(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "c", 'd "é" {prompt}']
KEY = "sk-secret-123"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(vlm_client, "PAUSE", 0.01)
    monkeypatch.delenv("FLOWRL_JUDGE_KEY", raising=False)


class Stub:
    """A server: `answer(question, image, body)` gives an object or bytes to send with status 200, or (status, either,
    headers). It counts what it is asked."""

    def __init__(self, answer, models=("judge-8b",)):
        self.answer, self.models, self.bodies, self.headers, self.times = answer, models, [], [], []
        self.busy = self.most = self.lists = 0
        self.lock = threading.Lock()

    def post(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.times.append(time.monotonic())
            self.busy += 1
            self.most = max(self.most, self.busy)
        picture, text = body["messages"][0]["content"]
        file = io.BytesIO(base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,")))
        try:
            return self.answer(text["text"], np.asarray(Image.open(file)), body)
        finally:
            with self.lock:
                self.busy -= 1

    def get(self, handler):
        self.lists += 1
        return {"data": [{"id": name} for name in self.models]}


@contextlib.contextmanager
def serving(answer, **options):
    stub = answer if isinstance(answer, Stub) else Stub(answer, **options)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, found):
            status, found, headers = found if isinstance(found, tuple) else (200, found, {})
            raw = found if isinstance(found, bytes) else json.dumps(found).encode()
            with contextlib.suppress(ConnectionError):  # the client hung up
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(raw)

        def do_POST(self):
            wrong = self.path != "/v1/chat/completions"
            self.reply((404, b"nothing here", {}) if wrong else stub.post(self))

        def do_GET(self):
            self.reply(stub.get(self) if self.path == "/v1/models" else (404, b"", {}))

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


def says(text, finish="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


def likely(top, text="Yes"):
    """A completion whose first token has these probabilities."""
    entries = [{"token": token, "logprob": math.log(p) if p else -9999.0, "bytes": []} for token, p in top.items()]
    choice = {"message": {"content": text}, "logprobs": {"content": [{**entries[0], "top_logprobs": entries}]}}
    return {"choices": [choice | {"finish_reason": "length"}]}


def sees_red(question, image, body):
    """P(yes) grows with the red in the image and shrinks with the blue."""
    red, blue = image[..., 0].mean() / 255, image[..., 2].mean() / 255
    p = min(max(0.5 + (red - blue) / 2, 0.01), 0.99)
    return likely({"Yes": 0.6 * p, " yes": 0.3 * p, "No": 0.9 * (1 - p), "The": 0.1, "YES": 0.0})


def call(judge, images=IMAGES, prompts=PROMPTS, **columns):
    return asyncio.run(judge(images, prompts, **columns))


def client(stub, **options):
    return ChatClient(stub.url, **{"timeout": 20, "deadline": 40, **options})


# ------------------------------------------------------------------------------------------- the two ways to score


def test_vqascore_is_p_yes_over_p_yes_or_no():
    with serving(sees_red) as stub:
        out = call(VQAScore(stub.url))
    pixels = quantise(IMAGES).float().mean((1, 2)) / 255
    torch.testing.assert_close(out.values, 0.5 + (pixels[:, 0] - pixels[:, 2]) / 2)
    torch.testing.assert_close(out.details["yes_or_no"], torch.full((4,), 0.9))
    assert out.valid.all() and "reason" not in out.details
    assert (stub.lists, len(stub.bodies)) == (1, 4)
    for body in stub.bodies:
        fixed = {key: body[key] for key in ("model", "temperature", "top_p", "max_tokens", "seed")}
        assert fixed == {"model": "judge-8b", "temperature": 0.0, "top_p": 1.0, "max_tokens": 1, "seed": 0}
        assert body["logprobs"] is True and body["top_logprobs"] == 20
    asked = {body["messages"][0]["content"][1]["text"] for body in stub.bodies}
    assert asked == {f'Does this figure show "{prompt}"? Please answer yes or no.' for prompt in PROMPTS}


def test_the_server_sees_the_8_bit_pixels():
    seen = {}

    def answer(question, image, body):
        seen[question] = image
        return sees_red(question, image, body)

    with serving(answer) as stub:
        call(VQAScore(stub.url, template="{prompt}"))
        for row, prompt in enumerate(PROMPTS):
            assert (seen[prompt] == quantise(IMAGES)[row].numpy()).all()
        call(VQAScore(stub.url, template="{prompt}", size=16))
        assert {image.shape for image in seen.values()} == {(16, 16, 3)}


REPLIES = {
    "Final Score: 4": 0.8,
    "final score : **4.5**": 0.9,
    "Maybe Final Score: 1. But no. Final Score: 5/5": 1.0,
    "Final Score: 6": "not within",
    "Final Score: -3": "not within",
    "Final Score: 9" + "9" * 400: "not within",
    "Final Score: 1-5": "no score in the reply",
    "Final Score: 1e9": "no score in the reply",
    "I cannot help with that.": "no score in the reply",
    "": "no score in the reply",
    "Score (1-5): 3": "no score in the reply",
}


def test_rubric_replies():
    with serving(lambda question, image, body: says(question)) as stub:
        judge = UnifiedReward(client(stub), template="{prompt}")
        out = call(judge, IMAGES[:1].expand(len(REPLIES), -1, -1, -1), list(REPLIES))
    for row, (text, expected) in enumerate(REPLIES.items()):
        if isinstance(expected, float):
            assert out.valid[row] and out.values[row].item() == pytest.approx(expected), text
        else:
            assert not out.valid[row] and out.values[row].isnan() and expected in out.details["reason"][row], text


def test_unified_reward_asks_at_512_and_ends_in_the_final_score():
    shapes = set()

    def answer(question, image, body):
        shapes.add(image.shape)
        assert question.rstrip().endswith("Final Score:") and "Caption: " in question and body["max_tokens"] == 512
        return says("Final Score: 3")

    with serving(answer) as stub:
        out = call(UnifiedReward(stub.url))
    assert shapes == {(512, 512, 3)} and out.values.tolist() == pytest.approx([0.6] * 4)


def test_unified_reward_2_is_the_mean_of_three():
    text = "Alignment Score (1-5): 3.5\nCoherence Score (1-5): 4\nStyle: 2"
    with serving(lambda question, image, body: says(text if '"é"' not in question else "Style: 2")) as stub:
        out = call(UnifiedReward2(stub.url))
    assert out.values[:3].tolist() == pytest.approx([9.5 / 15] * 3) and out.valid.tolist() == [True] * 3 + [False]
    assert out.details["alignment"][:3].tolist() == [3.5] * 3 and out.details["style"][3].isnan()
    assert "no alignment in the reply" in out.details["reason"][3]


def test_the_qwen_judge_reads_its_tag_and_tells_a_cut_reply():
    with serving(lambda question, image, body: says("Fine. <Score> 4 </score>")) as stub:
        assert call(QwenVLJudge(stub.url)).values.tolist() == pytest.approx([0.8] * 4)
    with serving(lambda question, image, body: says("Let me think", "length")) as stub:
        out = call(QwenVLJudge(stub.url))
    assert not out.valid.any() and "cut at max_tokens=2048" in out.details["reason"][0]


def test_samples_are_averaged_and_lost_ones_left_out():
    with serving(lambda question, image, body: says(f"<score>{body['seed'] + 1}</score>")) as stub:
        judge = RubricJudge(stub.url, "Rate it.", levels=(1, 4), samples=5, temperature=0.7)
        out = call(judge)
    assert out.values.tolist() == pytest.approx([2.5 / 4] * 4)  # the fifth says 5, above the levels
    assert len(stub.bodies) == 20 and {body["temperature"] for body in stub.bodies} == {0.7}


def test_a_json_schema_travels_in_the_extra_body():
    form = {"type": "json_object"}
    with serving(lambda question, image, body: says('{"score": 2, "why": "x"}')) as stub:
        shared = ChatClient(stub.url, extra_body={"response_format": form, "seed": 7})
        out = call(RubricJudge(shared, "Rate it as JSON.", {"score": r'"score"\s*:\s*([\d.]+)'}))
    assert out.values.tolist() == pytest.approx([0.4] * 4)
    assert all(body["response_format"] == form and body["seed"] == 7 for body in stub.bodies)


# ------------------------------------------------------------------------------------------- without log-probabilities


def test_a_server_without_log_probabilities_is_asked_for_a_word_and_said_so_once(caplog):
    words = {"a": "Yes.", "b": "no", "c": "YES, it does", 'd "é" {prompt}': "Perhaps"}

    def answer(question, image, body):
        return says("" if body["max_tokens"] == 1 else words[question])

    with serving(answer) as stub, caplog.at_level(logging.WARNING):
        judge = VQAScore(stub.url, template="{prompt}")
        for _ in range(2):
            out = call(judge)
            assert out.values[:3].tolist() == [1.0, 0.0, 1.0] and not out.valid[3]
        assert "neither yes nor no: 'Perhaps'" in out.details["reason"][3]
    assert [r.message for r in caplog.records if "vqascore" in r.message] == [caplog.records[0].message]
    assert "gives no log-probabilities" in caplog.records[0].message


def test_a_refusal_of_log_probabilities_counts_as_none(caplog):
    def answer(question, image, body):
        if "logprobs" in body:
            return 400, {"error": {"message": "logprobs are not supported"}}, {}
        return says("yes")

    with serving(answer) as stub:
        assert call(VQAScore(stub.url)).values.tolist() == [1.0] * 4
    assert "refuses log-probabilities" in caplog.text


def test_log_probabilities_that_vanish_later_make_samples_invalid():
    with serving(sees_red) as stub:
        judge = VQAScore(ChatClient(stub.url, cache=0))
        assert call(judge).valid.all()
        stub.answer = lambda question, image, body: says("Yes")
        out = call(judge)
    assert not out.valid.any() and "gives no log-probabilities any more" in out.details["reason"][0]


# ------------------------------------------------------------------------------------------- Soft-TIFA


def test_spellings():
    assert spellings("two") == spellings("2") == spellings(" Two ") == {"two", "Two", "2"}
    assert spellings("Yes") == {"yes", "Yes"} and spellings("10") == {"ten", "Ten", "10"}


@pytest.mark.parametrize(
    ("top", "answer", "expected"),
    [
        ({"two": 0.4, "Two": 0.2, " two": 0.1, "2": 0.1, "three": 0.1}, "two", 0.8),
        ({"Yes": 0.5, " yes": 0.2, "YES": 0.1, "No": 0.2}, "Yes", 0.7),
        ({"1": 0.6, "ten": 0.3, "2": 0.1}, "ten", 0.9),  # single digits: "1" begins "10", and counts once
        ({"1": 0.6, "10": 0.3, "2": 0.1}, "ten", 0.3),  # numbers are tokens here, so "1" is one
        ({"1": 0.6, "one": 0.3, "10": 0.1}, "one", 0.9),
        ({"four": 0.7, "fourteen": 0.2}, "fourteen", 0.2),
        ({"E": 0.6, "eight": 0.2, "": 0.1, " ": 0.1}, "eight", 0.8),
        ({"▁Three": 0.5, "Ġthree": 0.2}, "3", 0.7),
        ({"red": 0.5, "Red": 0.3}, "red", 0.8),
        ({"three": 0.9}, "two", 0.0),
        ({"two": 0.7, " two": 0.7}, "two", 1.0),
    ],
)
def test_atom_probability(top, answer, expected):
    assert atom_probability(top, answer) == pytest.approx(expected)


def test_means_of_atoms():
    assert soft_tifa([0.5, 0.125]) == pytest.approx((0.3125, 0.25))
    assert soft_tifa([1.0, 0.0]) == (0.5, 0.0)
    assert soft_tifa([1e-300] * 50)[1] == pytest.approx(1e-300)  # the product would underflow


def test_soft_tifa_reads_vqa_list():
    def answer(question, image, body):
        assert question.endswith("? Answer in one word.") and body["max_tokens"] == 1
        if "cows" in question:
            return (500, {"error": "out of memory"}, {}) if image[0, 0, 0] == 255 else likely({"five": 0.9, "4": 0.1})
        return likely({"Yes": 0.8, "yes": 0.1, "no": 0.1}) if "white" in question else likely({"four": 0.4, "4": 0.4})

    bikes = [["How many bicycles are there?", "four"], ["Are they white?", "Yes"]]
    cows = [["How many cows are there?", "three"]]
    images = torch.zeros(3, 3, 4, 4)
    images[2] = 1.0
    columns = {"vqa_list": [bikes, bikes + cows, cows + bikes], "skills": [[]] * 3}
    with serving(answer) as stub:
        scores = RewardSet({f"soft_tifa@{stub.url}": 1.0}).score(images, ["p"] * 3, columns)
        (name,) = scores.parts
        assert scores.total[:2].tolist() == pytest.approx([math.sqrt(0.72), 0.0]) and scores.valid.tolist()[2] is False
        assert scores.details[name]["am"][:2].tolist() == pytest.approx([0.85, 1.7 / 3])
        assert scores.details[name]["atoms"][1] == pytest.approx([0.8, 0.9, 0.0]) and "HTTP 500" in str(scores.details)
        mean = SoftTIFA(stub.url, mean="arithmetic")
        assert call(mean, images[:1], ["p"], vqa_list=[bikes]).values.item() == pytest.approx(0.85)
        with pytest.raises(ValueError, match=r"needs the prompt columns \['vqa_list'\]"):
            RewardSet(mean).check_columns(["skills"])
        for broken in (None, [], [["q"]], ["qa"], [["q", 3]], 5):
            with pytest.raises(ValueError, match=r"must hold \[question, answer\] texts, for 'p'"):
                call(mean, images[:1], ["p"], vqa_list=[broken])


def test_soft_tifa_without_log_probabilities_is_all_or_nothing():
    def answer(question, image, body):
        return says(" Two.\n" if "How many" in question else "No")

    pairs = [["How many?", "2"], ["Red?", "Yes"]]
    with serving(answer) as stub:
        out = call(SoftTIFA(stub.url), IMAGES[:1], ["p"], vqa_list=[pairs])
    assert out.details["atoms"] == [[1.0, 0.0]] and out.values.item() == 0.0 and out.valid.all()


# ------------------------------------------------------------------------------------------- a server with troubles


def test_a_busy_server_is_left_the_time_it_asks_for():
    def answer(question, image, body):
        first = len(stub.bodies) == 1
        return (429, {"error": "rate limit"}, {"Retry-After": "1"}) if first else sees_red(question, image, body)

    with serving(answer) as stub:
        out = call(VQAScore(client(stub)), IMAGES[:1], ["p"])
    assert out.valid.all() and stub.times[1] - stub.times[0] >= 1.0


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_passing_failures_are_tried_again_a_bounded_number_of_times(status):
    def answer(question, image, body):
        return sees_red(question, image, body) if len(stub.bodies) == 3 else (status, b"trouble", {})

    with serving(answer) as stub:
        assert call(VQAScore(client(stub, retries=2)), IMAGES[:1], ["p"]).valid.all()
        out = call(VQAScore(client(stub, retries=2)), IMAGES[1:2], ["p"])
    assert not out.valid.any() and f"HTTP {status}" in out.details["reason"][0] and len(stub.bodies) == 6


def test_other_refusals_cost_their_sample_only_and_are_not_repeated():
    def answer(question, image, body):
        return (400, {"error": {"message": "unsafe"}}, {}) if '"b"' in question else sees_red(question, image, body)

    with serving(answer) as stub:
        out = call(VQAScore(client(stub)))
    assert out.valid.tolist() == [True, False, True, True] and "unsafe" in out.details["reason"][1]
    assert len(stub.bodies) == 4


def test_a_slow_server_ends_at_the_timeout_and_at_the_deadline():
    release = threading.Event()

    def answer(question, image, body):
        release.wait(20)
        return sees_red(question, image, body)

    with serving(answer) as stub:
        start = time.monotonic()
        out = call(VQAScore(ChatClient(stub.url, "m", timeout=0.2, deadline=20, retries=1, concurrency=8)))
        assert not out.valid.any() and "no answer in 0.2 s" in out.details["reason"][0] and len(stub.bodies) <= 8
        out = call(VQAScore(ChatClient(stub.url, "m", timeout=20, deadline=0.4, concurrency=2)))
        assert not out.valid.any() and set(out.details["reason"]) == {"no answer in 0.4 s"}
        assert time.monotonic() - start < 15
        release.set()


def test_a_dripping_server_cannot_outlast_the_timeout():
    def drip(self, handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(200):
                handler.wfile.write(b" ")
                time.sleep(0.02)
        return b""

    with serving(sees_red) as stub:
        stub.post = drip.__get__(stub)
        start = time.monotonic()
        out = call(VQAScore(ChatClient(stub.url, "m", timeout=0.3, retries=0)), IMAGES[:1], ["p"])
    assert "no answer in 0.3 s" in out.details["reason"][0] and time.monotonic() - start < 10


HOSTILE = [
    b"",
    b"<html>",
    b"[" * 5000,
    b"null",
    [],
    {"choices": []},
    {"choices": None},
    {"choices": [7]},
    {"choices": [{"message": {}}]},
    says(3),
    says(["yes"]),
    likely({"Yes": 1.0}) | {"choices": "Yes"},
    b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": '
    b'[{"token": "Yes", "logprob": NaN}]}]}}]}',
    b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": '
    b'[{"token": "Yes", "logprob": 1e400}, {"token": "No", "logprob": -1e400}]}]}}]}',
    b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": [3]}]}}]}',
    b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": '
    b'[{"token": "Yes", "logprob": true}]}]}}]}',
    likely({"The": 0.9, "Well": 0.1}),
    likely({"Yes": 0.0, "No": 0.0}),
    (302, b"", {"Location": "http://example.invalid/"}),
    b"x" * 30_000,
]


@pytest.mark.parametrize("sent", HOSTILE, ids=lambda sent: re.sub(r"\W+", "_", str(sent))[:40])
def test_hostile_answers_are_invalid_and_never_zero(sent, monkeypatch):
    monkeypatch.setattr(remote, "MAX_ANSWER", 20_000)
    with serving(lambda question, image, body: sent) as stub:
        judge = VQAScore(client(stub))
        out = call(judge, IMAGES[:2], PROMPTS[:2])
        assert not out.valid.any() and out.values.isnan().all() and all(out.details["reason"])
        assert len(stub.bodies) == 2
        with pytest.raises(RewardError, match="2 of 2 samples could not be scored"):
            RewardSet(judge).score(IMAGES[:2], PROMPTS[:2])


def test_a_dead_server_is_left_alone_for_a_while():
    with serving(lambda question, image, body: (500, b"dead", {})) as stub:
        judge = VQAScore(client(stub, retries=0, trip_after=2, rest=60, concurrency=1))
        out = call(judge)
        assert len(stub.bodies) == 2
        assert "HTTP 500" in out.details["reason"][1] and "failed 2 requests in a row" in out.details["reason"][2]
        call(judge)
        assert len(stub.bodies) == 2  # it fails at once
        judge.client._closed_until = time.monotonic()  # a minute later
        stub.answer = sees_red
        assert call(judge).valid.all() and len(stub.bodies) == 6
        stub.answer = lambda question, image, body: (500, b"dead", {})
        assert not call(judge, IMAGES.flip(0)).valid.any()
        assert len(stub.bodies) == 8  # counted from nought again
        judge.client._closed_until = time.monotonic()
        assert not call(judge, IMAGES.flip(0)).valid.any()
        assert len(stub.bodies) == 9  # one failure closes it again


def test_no_server_at_all():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refused
        out = call(VQAScore(ChatClient(f"http://127.0.0.1:{free.getsockname()[1]}/v1", retries=1)))
    assert not out.valid.any() and "Connect" in out.details["reason"][3]


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "FLOWRL_JUDGE_KEY"), (403, "FLOWRL_JUDGE_KEY"), (404, "/models"), (405, "/v1")]
)
def test_refusals_of_every_request_raise_at_once(status, remedy, monkeypatch):
    monkeypatch.setenv("FLOWRL_JUDGE_KEY", KEY)
    with serving(lambda question, image, body: (status, {"error": {"message": f"no {KEY}"}}, {})) as stub:
        judge = VQAScore(client(stub, concurrency=2), template="{prompt}")
        with pytest.raises(RewardError, match=f"HTTP {status}.*{remedy}") as caught:
            RewardSet(judge).score(IMAGES.repeat(5, 1, 1, 1), [str(i) for i in range(20)])
    assert len(stub.bodies) <= 4 and isinstance(caught.value.__cause__, JudgeError)
    assert KEY not in str(caught.value) and KEY not in str(caught.value.__cause__)


def test_the_wrong_base_url_is_named():
    with serving(sees_red) as stub, pytest.raises(JudgeError, match="it usually ends in /v1"):
        call(VQAScore(stub.url.removesuffix("/v1")))


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    with serving(lambda question, image, body: (422, {"error": f"your {KEY} is odd"}, {})) as stub:
        judge = VQAScore(client(stub, key_env="MY_KEY"))
        out = call(judge)
        said = [*out.details["reason"], caplog.text, repr(vars(judge)), repr(vars(judge.client)), judge.fingerprint]
        assert "[key] is odd" in out.details["reason"][0]
        with pytest.raises(RewardError) as caught:
            RewardSet(judge).score(IMAGES, PROMPTS)
    assert {headers["Authorization"] for headers in stub.headers} == {f"Bearer {KEY}"}
    assert not any(KEY in text for text in [*said, str(caught.value)])
    monkeypatch.setenv("MY_KEY", "sk-é")
    with pytest.raises(ValueError, match="MY_KEY holds characters") as caught:
        call(judge)
    assert "sk-" not in str(caught.value)


# ------------------------------------------------------------------------------------------- requests


def test_what_was_asked_before_is_not_asked_again():
    with serving(sees_red) as stub:
        shared = client(stub)
        judge = VQAScore(shared)
        first = call(judge)
        assert call(judge).values.equal(first.values) and len(stub.bodies) == 4
        call(judge, IMAGES[:2], PROMPTS[:2])
        assert len(stub.bodies) == 4
        call(VQAScore(shared))  # another judge that asks the same
        assert len(stub.bodies) == 4
        call(VQAScore(shared, template="Is this {prompt}?"))
        assert len(stub.bodies) == 8
        call(judge, IMAGES.flip(0))
        assert len(stub.bodies) == 12
        small = VQAScore(client(stub, cache=2, concurrency=1))
        call(small)
        call(small)
        assert len(stub.bodies) == 20 and len(small.client._cache) == 2


def test_failures_are_not_kept():
    with serving(lambda question, image, body: b"broken") as stub:
        judge = VQAScore(client(stub))
        assert not call(judge).valid.any()
        stub.answer = sees_red
        assert call(judge).valid.all()


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_at_once_than_allowed(limit):
    barrier = threading.Barrier(limit, timeout=20)

    def answer(question, image, body):
        barrier.wait()
        return sees_red(question, image, body)

    pairs = [[f"Is it {i}?", "Yes"] for i in range(3)]
    with serving(answer) as stub:
        out = call(SoftTIFA(client(stub, concurrency=limit)), vqa_list=[pairs] * 4)
    assert out.valid.all() and len(stub.bodies) == 12 and stub.most == limit


def test_models_are_found_or_named():
    with serving(sees_red, models=("a", "b")) as stub:
        with pytest.raises(JudgeError, match=r"serves 2 models \(a, b\); name one: URL#MODEL"):
            call(VQAScore(stub.url))
        assert call(resolve(f"vqascore@{stub.url}#org/b")).valid.all()
        assert call(VQAScore(ChatClient(stub.url, "a"))).valid.all()
        assert {body["model"] for body in stub.bodies} == {"org/b", "a"}
    with serving(sees_red) as stub:
        stub.get = lambda handler: {"models": []}
        out = call(VQAScore(stub.url))
    assert not out.valid.any() and "is not a list of models" in out.details["reason"][0]


def test_it_works_in_a_running_loop_in_threads_and_beside_others():
    with serving(sees_red) as stub:
        rewards = RewardSet({f"vqascore@{stub.url}": 1.0, f"qwenvl_judge@{stub.url}": 0.0}, max_invalid_share=1.0)
        expected = call(VQAScore(stub.url)).values

        async def inside():
            return rewards.score(IMAGES, PROMPTS)

        found = [asyncio.run(inside()).parts, rewards.score(IMAGES, PROMPTS).parts]
        threads = [
            threading.Thread(target=lambda: found.append(rewards.score(IMAGES, PROMPTS).parts)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(found) == 5
    for parts in found:
        assert parts[f"vqascore@{stub.url}"].equal(expected) and parts[f"qwenvl_judge@{stub.url}"].isnan().all()


def test_images_are_prepared_beside_the_event_loop(monkeypatch):
    threads = []
    prepare = vlm_judge.to_pil
    monkeypatch.setattr(vlm_judge, "to_pil", lambda x: threads.append(threading.current_thread().name) or prepare(x))
    with serving(sees_red) as stub:
        assert RewardSet(VQAScore(stub.url)).score(IMAGES, PROMPTS).valid.all()
    assert len(threads) == 1 and threads[0] not in ("flowrl-rewards", threading.current_thread().name)


def test_the_self_test_covers_the_server():
    def rubric(question, image, body):
        return says(f"<score>{5 if image[112, 112, 0] > 200 else 1}</score>")

    with serving(sees_red) as stub:
        report = RewardSet([VQAScore(stub.url), SoftTIFA(stub.url)]).self_test()
        assert set(report) == {"vqascore", "soft_tifa"} and all(good > bad for good, bad in report.values())
        stub.answer = rubric
        assert RewardSet(QwenVLJudge(stub.url)).self_test() == {"qwenvl_judge": (1.0, pytest.approx(0.2))}
        stub.answer = lambda question, image, body: likely({"Yes": 0.7, "No": 0.3})  # a text model, say
        with pytest.raises(RewardError, match="self-test failed"):
            RewardSet(VQAScore(stub.url)).self_test()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ChatClient("host:8000/v1"), "needs a base URL"),
        (lambda: ChatClient("http://me:pw@host/v1"), "must not hold a key"),
        (lambda: ChatClient("http://host/v1?key=pw"), "must not hold a key"),
        (lambda: ChatClient("http://host/v1", timeout=0), "must be at least 0, its other numbers above 0"),
        (lambda: RubricJudge("http://host/v1"), "needs a template"),
        (lambda: RubricJudge("http://host/v1", "x", {"a": r"\d"}), "needs one group"),
        (lambda: RubricJudge("http://host/v1", "x", levels=(5, 1)), "lowest, highest"),
        (lambda: RubricJudge("http://host/v1", "x", samples=3), "need a temperature above 0"),
        (lambda: VQAScore("http://host/v1", size=-1), "size of at least 0"),
        (lambda: SoftTIFA("http://host/v1", template="Tell me."), r"a template with \{question\}"),
        (lambda: resolve("vqascore"), "did you mean 'vqascore@URL'"),
        (lambda: resolve("vqa_score@http://host:8000/v1"), "did you mean 'vqascore@URL'"),
        (lambda: resolve("unified_reward@"), "needs a base URL"),
    ],
)
def test_unusable_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "pw" not in str(caught.value)


def test_what_a_judge_says_of_itself():
    url = "http://host/v1"
    assert VQAScore(url).range == (0.0, 1.0) and RubricJudge(url, "x", levels=(1, 4)).range == (0.25, 1.0)
    judges = [
        VQAScore(url),
        VQAScore(url, size=512),
        VQAScore(url, template="{prompt}?"),
        VQAScore(url + "#m"),
        SoftTIFA(url),
        SoftTIFA(url, mean="arithmetic"),
        RubricJudge(url, "x"),
        RubricJudge(url, "x", samples=2, temperature=1.0),
        RubricJudge(ChatClient(url, extra_body={"min_p": 0.1}), "x"),
    ]
    assert len({judge.fingerprint for judge in judges}) == len(judges)
    with serving(sees_red) as stub:
        judge = VQAScore(stub.url)
        before = judge.fingerprint
        call(judge)
        assert judge.fingerprint == before == VQAScore(url).fingerprint  # a resumed run knows it on another port


# ------------------------------------------------------------------------------------------- judges with own packages

ROOT = Path(flowrl.__file__).parents[1]


def test_the_documented_file_serves_packages_we_do_not_have(monkeypatch):
    """docs/rewards.md's judges.py, with stand-ins that have the packages' interfaces."""
    (code,) = re.findall(r"```python\n(# judges\.py.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)

    class Inferencer:
        def __init__(self, device):
            assert device == "cuda"

        def reward(self, prompts, image_paths):
            means = [np.asarray(Image.open(path)).mean() / 255 for path in image_paths]
            return torch.tensor([[mean + len(prompt), 9.0] for mean, prompt in zip(means, prompts, strict=True)])

    class Quality:
        def score(self, images):
            return torch.tensor([np.asarray(image).mean() / 51 for image in images], dtype=torch.float16)

    hub = types.SimpleNamespace(from_pretrained=lambda name, **options: Quality() if "Mix3" in name else None)
    monkeypatch.setitem(sys.modules, "hpsv3", types.SimpleNamespace(HPSv3RewardInferencer=Inferencer))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoModelForCausalLM=hub))
    judges = types.ModuleType("judges")
    exec(code, judges.__dict__)
    monkeypatch.setitem(sys.modules, "judges", judges)
    means = quantise(IMAGES).float().mean((1, 2, 3)) / 255
    lengths = torch.tensor([float(len(prompt)) for prompt in PROMPTS])
    for name, expected, rounding in (("hpsv3", means + lengths, 1e-5), ("deqa", means, 1e-2)):
        with RewardServer(f"judges:{name}", port=0) as server:
            total = RewardSet(f"remote@{server.url}").score(IMAGES, PROMPTS).total
        torch.testing.assert_close(total, expected, atol=rounding, rtol=0)


def test_serving_needs_torch_numpy_and_pillow_only():
    blocked = ["transformers", "diffusers", "accelerate", "peft", "open_clip", "safetensors", "torchvision", "httpx"]
    blocked += ["yaml", "jsonargparse", "matplotlib", "rich", "scipy", "tqdm"]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({blocked})\n"
        "from flowrl.cli import main; from flowrl.rewards import RewardServer\n"
        "with RewardServer('jpeg_compressibility', port=0) as server: print(server.url)\n"
        "print(main(['serve-reward', 'nothing']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout.startswith("http://127.0.0.1:") and done.stdout.endswith("\n2\n"), done.stderr
    assert "unknown reward 'nothing'" in done.stderr

"""A real HTTP server and its client: equal, busy, slow, failing and hostile."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import ssl
import struct
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from flowrl.cli import main
from flowrl.rewards import (
    FingerprintError,
    RemoteReward,
    RewardError,
    RewardOutput,
    RewardServer,
    RewardSet,
    cached,
    jpeg_compressibility,
    quantise,
    remote,
    resolve,
    scaled,
)
from flowrl.rewards.server import Limits, _has_left

IMAGES = torch.rand(5, 3, 8, 12, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "b", "c", "d", "é"]


def brightness(images, prompts):
    return images.mean((1, 2, 3)) / 3


def picky(images, prompts, *, tag, weight=None):
    """Scores its column and the length of the prompt; cannot score tag "skip"."""
    values = torch.tensor(
        [float("nan") if t == "skip" else len(t) + len(p) / 7 for t, p in zip(tag, prompts, strict=True)]
    )
    details = {
        "reason": [f"no {t}" for t in tag],
        "seen": torch.arange(len(tag)),
        "odd": [(float("inf"), t) for t in tag],
    }
    return RewardOutput(values, values.isfinite(), details)


def call(reward, images=IMAGES, prompts=PROMPTS, **columns):
    return asyncio.run(reward(images, prompts, **columns))


def post(server, body, path="/score", **headers):
    """(status, headers, answer) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server._http.server_port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())


def png(pixels=IMAGES[0], mode="RGB"):
    file = io.BytesIO()
    Image.fromarray(quantise(pixels[None])[0].numpy()).convert(mode).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def bomb(width, height):
    """A PNG of a few bytes that claims this size."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9)))]
    chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


@contextlib.contextmanager
def stub(answer, health=None):
    """A server that is not ours: `answer(request)` gives (status, bytes) or writes itself and gives None; so does
    `health`, without which it hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found := answer(self):
                self.send_response(found[0])
                self.end_headers()
                self.wfile.write(found[1])

        def do_GET(self):
            if found := health and health(self):
                self.send_response(found[0])
                self.end_headers()
                self.wfile.write(found[1])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # the client hangs up
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def scored(handler, fingerprint="x", value=1.0):
    n = len(handler.body["images"])
    return 200, json.dumps({"fingerprint": fingerprint, "values": [value] * n}).encode()


@pytest.fixture(scope="module")
def nobody():
    """A URL where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, not listening: refused


# ---------------------------------------------------------------------------------------------- the same values


@pytest.mark.parametrize("reward", [brightness, "jpeg_compressibility"])
def test_remote_equals_local_bit_for_bit(reward):
    pixels = quantise(IMAGES).permute(0, 3, 1, 2).float() / 255
    local = RewardSet(reward).score(pixels, PROMPTS).total
    with RewardServer(reward, port=0, device="cpu") as server:
        out = call(RemoteReward(server.url, batch_size=2))
        named = RewardSet({f"remote@{server.url}": 2.0}).score(IMAGES, PROMPTS)
    assert out.valid.all() and out.details == {}
    assert out.values.tolist() == local.tolist()
    assert len(set(local.tolist())) > 1 and named.total.tolist() == (2 * local).tolist()


def test_columns_details_and_invalid_rows_arrive_in_order():
    columns = {"tag": ["x", "skip", "yy", "zzz", "skip"], "weight": [1, 2, 3, 4, 5], "other": [None] * 5}
    prompts = ["p" * k for k in range(1, 6)]
    local = picky(IMAGES, prompts, tag=columns["tag"])
    with RewardServer(picky, port=0) as server:
        out = call(RemoteReward(server.url, batch_size=2), prompts=prompts, **columns)
    assert out.valid.tolist() == [True, False, True, True, False]
    assert out.values[out.valid].tolist() == local.values[local.valid].tolist() and out.values[~out.valid].isnan().all()
    assert out.details["reason"] == local.details["reason"]  # of valid rows, too
    assert out.details["seen"] == [0, 1, 0, 1, 0]
    assert out.details["odd"] == [[None, t] for t in columns["tag"]]


def test_missing_columns_are_refused_before_any_image_is_made():
    with RewardServer(picky, port=0) as server:
        reward = RewardSet(RemoteReward(server.url))
        with pytest.raises(ValueError, match=r"needs the prompt columns \['tag'\]"):
            reward.check_columns(["weight"])
        reward.check_columns(["tag"])
        out = call(RemoteReward(server.url))  # not asked before
    assert not out.valid.any() and "needs the prompt columns ['tag']" in out.details["reason"][0]


def test_a_set_is_offered_as_one_reward_that_needs_what_its_rewards_need():
    for several in ({brightness: 0.5}, [brightness, picky]):
        with pytest.raises(ValueError, match=r"a server offers one reward, .* give RewardSet\(\.\.\.\)"):
            RewardServer(several, port=0)
    with RewardServer(RewardSet({brightness: 2.0, scaled(picky, -1.0): 1.0}), port=0, device="cpu") as server:
        out = call(RemoteReward(server.url), tag=["xyz"] * 5)
        local = 2 * brightness(quantise(IMAGES).permute(0, 3, 1, 2) / 255, None) - 3 - torch.tensor(1.0) / 7
        with pytest.raises(ValueError, match=r"needs the prompt columns \['tag'\]"):
            RemoteReward(server.url).check_columns([])
    assert torch.allclose(out.values, local) and set(out.details) == {"brightness", "scaled_picky", "reason"}


def test_the_server_puts_images_on_its_device():
    server = RewardServer(brightness, port=0, device="meta")
    images, *_ = server._read(json.dumps({"images": [png()], "prompts": ["p"]}).encode())
    server._http.server_close()
    assert images.device.type == "meta" and images.shape == (1, 3, 8, 12)
    with pytest.raises(ValueError, match="cannot compute on 'nowhere'"):
        RewardServer(brightness, port=0, device="nowhere")


def test_pixels_are_prepared_beside_the_event_loop(monkeypatch):
    threads = []
    monkeypatch.setattr(remote, "quantise", lambda x: threads.append(threading.current_thread()) or quantise(x))
    with stub(scored) as url:
        assert call(RemoteReward(url)).valid.all()
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_bad_construction_and_input():
    for urls in ([], "", "host:8000", "ftp://host", "http://a,http://a/", "http://a:0"):
        with pytest.raises(ValueError, match="URLs"):
            RemoteReward(urls)
    with pytest.raises(ValueError, match="Port out of range"):
        RemoteReward("http://a:99999")
    for secret in ("http://me:pw@a", "http://a?token=pw", "http://b,https://a#pw"):
        with pytest.raises(ValueError, match="goes into the environment variable FLOWRL_REWARD_TOKEN") as caught:
            RemoteReward(secret)
        assert "pw" not in str(caught.value)
    assert isinstance(RemoteReward("HTTPS://a")._verify, ssl.SSLContext) and not RemoteReward("http://a")._verify
    for wrong in ({"deadline": 0}, {"hedge_after": -1}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            RemoteReward("http://a", **wrong)
    found = resolve("remote@http://a:1, https://b/")
    assert [r.url for r in found.replicas] == ["http://a:1", "https://b"] and not hasattr(found, "differentiable")
    with pytest.raises(ValueError, match="'tag' cannot be sent as JSON"):
        call(found, tag=[object()] * 5)
    with pytest.raises(TypeError, match="image tensors"):
        call(found, images=["text"] * 5)
    with pytest.raises(ValueError, match="above 0"):
        Limits(queue=0)


# ----------------------------------------------------------------------------------------------- bad servers


def test_a_server_that_is_down_leaves_invalid_samples_and_stops_the_step(nobody):
    start = time.monotonic()
    out = call(RemoteReward(nobody, deadline=1.5))
    assert time.monotonic() - start < 10
    assert not out.valid.any() and out.values.isnan().all()
    assert "no answer in 1.5 s" in out.details["reason"][0] and "ConnectError" in out.details["reason"][0]
    with pytest.raises(RewardError, match=r"5 of 5 samples could not be scored.*ConnectError"):
        RewardSet(RemoteReward(nobody, deadline=1.0)).score(IMAGES, PROMPTS)


def test_a_run_hears_that_the_server_is_down_before_it_computes(nobody):
    rewards = RewardSet({scaled(f"remote@{nobody}", 2.0): 1.0, cached(f"remote@{nobody}"): 1.0})
    rewards.check_columns([])  # it may still come up
    for ask in (rewards.self_test, lambda: rewards.identity):
        with pytest.raises(
            RuntimeError, match=r"no server of this reward can be reached: http.*ConnectError.*Start it"
        ):
            ask()
    with RewardServer(brightness, port=0) as server:
        rewards = RewardSet({scaled(f"remote@{nobody},{server.url}", 2.0): 1.0, cached(f"remote@{server.url}"): 0.5})
        assert rewards.self_test() == {}
        known = f"remote {server.description['fingerprint']}"
        assert rewards.identity == {f'["scaled", 2.0, 0.0, {{"{known}": 1.0}}]': 1.0, known: 0.5}
    assert len(rewards.identity) == 2  # it is known now
    with stub(scored, lambda handler: (404, b"")) as url:  # it is there, what it runs it says with its first answer
        assert RewardSet(RemoteReward(url)).identity == {f"remote at {url}": 1.0}


def test_a_replica_that_is_down_costs_nothing(nobody):
    with RewardServer(brightness, port=0) as server:
        reward = RemoteReward([nobody, server.url], batch_size=1)
        out = call(reward)
        assert out.valid.all()
        assert reward.replicas[1].in_flight == reward.replicas[0].in_flight == 0


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"<html>welcome</html>", "not an object"),
        (200, b"[" * 100_000, "not an object"),
        (200, b"[0.5, 0.5]", "not an object"),
        (200, b'{"values": [1, 2, 3, 4, 5]}', "not an object with a fingerprint"),
        (200, b'{"fingerprint": "x", "values": "high"}', "must be lists"),
        (200, b'{"fingerprint": "x", "values": [1, 2]}', "'values' is not a list of 5 entries"),
        (200, b'{"fingerprint": "x", "values": [1, 2, 3, 4, 5], "valid": [true]}', "'valid' is not a list of 5"),
        (200, b'{"fingerprint": "x", "values": [1, 2, 3, 4, 5], "details": {"a": 1}}', "'a' is not a list of 5"),
        (200, b'{"fingerprint": "x", "values": [1, 2], "details": {"values": [1, 2, 3, 4, 5]}}', "'values' is not"),
        (200, b'{"fingerprint": "x", "values": [1, 2, 3, 4, 5], "details": {"values": [1]}}', "'values' is not"),
        (500, b'{"error": "out of memory"}', "HTTP 500, out of memory"),
        (302, b"", "HTTP 302"),
        (404, b"\xff\x00", "HTTP 404, not JSON"),
    ],
)
def test_wrong_answers_are_invalid_and_not_asked_again(status, body, reason):
    asked = []
    with stub(lambda handler: asked.append(1) or (status, body)) as url:
        out = call(RemoteReward(url, deadline=60))
    assert not out.valid.any() and out.values.isnan().all()
    assert reason in out.details["reason"][4] and len(asked) == 1


def test_only_the_rows_without_a_number_are_lost():
    values = '[NaN, "good", 0.25, null, true]'
    answer = f'{{"fingerprint": "x", "values": {values}}}'.encode()
    huge = json.dumps({"fingerprint": "x", "values": [1e39, -1e39, 10**400, [1], 3]}).encode()
    with stub(lambda handler: (200, answer)) as url:
        out = call(RemoteReward(url))
        with pytest.raises(RewardError, match="4 of 5 samples could not be scored"):
            RewardSet(RemoteReward(url)).score(IMAGES, PROMPTS)
        assert RewardSet(RemoteReward(url), max_invalid_share=0.8).score(IMAGES, PROMPTS).valid.sum() == 1
    assert out.valid.tolist() == [False, False, True, False, False] and out.values[2] == 0.25
    assert "'good' as a score" in out.details["reason"][1] and out.details["reason"][2] == ""
    with stub(lambda handler: (200, huge)) as url:
        assert call(RemoteReward(url)).valid.tolist() == [False] * 4 + [True]


def test_an_endless_or_dripping_answer_ends(monkeypatch):
    monkeypatch.setattr(remote, "MAX_ANSWER", 10_000)
    done = threading.Event()

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()
        while not done.is_set():
            handler.wfile.write(b" " * 4096)

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not done.wait(0.05):
            handler.wfile.write(b" ")

    for answer, reason in ((endless, "more than 10000 bytes"), (drip, "no answer in 1.5 s")):
        with stub(answer) as url:
            out = call(RemoteReward(url, deadline=1.5 if answer is drip else 30))
            done.set()
        done.clear()
        assert not out.valid.any() and reason in out.details["reason"][0]


def test_health_that_cannot_be_read_is_left_to_the_first_batch(monkeypatch):
    monkeypatch.setattr(remote, "MAX_ANSWER", 10_000)
    done = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not done.wait(0.05):
            handler.wfile.write(b" ")

    bodies = [b"", b"[]", b"<html>", b'{"columns": 3}', b" " * 20_000, b"[" * 9_000]
    for health in (None, drip, *[lambda handler, body=body: (200, body) for body in bodies]):
        with stub(scored, health) as url:
            reward = RemoteReward(url, deadline=60 if health is not drip else 1.0)
            reward.check_columns([])
            assert reward.required == set() and reward.fingerprint is None
            done.set()
    with stub(scored, lambda handler: (200, b'{"columns": ["tag"], "fingerprint": "x"}')) as url:
        reward = RemoteReward(url)
        with pytest.raises(ValueError, match="needs the prompt columns"):
            reward.check_columns([])
        assert call(reward).valid.all() and reward.fingerprint == "x"


def test_busy_servers_are_asked_again():
    asked = []

    def answer(handler):
        asked.append(time.monotonic())
        return (503, b'{"error": "busy"}') if len(asked) < 3 else scored(handler)

    with stub(answer) as url:
        out = call(RemoteReward(url, deadline=60))
    assert out.values.tolist() == [1.0] * 5
    assert asked[1] - asked[0] >= 0.25 and asked[2] - asked[1] >= 0.5


def test_a_slow_replica_is_raced_and_then_avoided():
    release = threading.Event()
    with stub(lambda handler: release.wait(60) and None) as slow, stub(scored) as quick:
        reward = RemoteReward([slow, quick], deadline=60, hedge_after=0.1, batch_size=1)
        start = time.monotonic()
        out = call(reward)
        assert out.valid.all() and time.monotonic() - start < 30
        assert reward.replicas[0].avoid_until > 0
        reward.replicas[0].avoid_until = time.monotonic() + 60
        reward.hedge_after = 30.0
        assert call(reward).valid.all() and time.monotonic() - start < 30  # nobody waits for the slow one
        release.set()


def test_replicas_must_serve_one_reward():
    with RewardServer(brightness, port=0) as one, RewardServer(picky, port=0) as other:
        with pytest.raises(FingerprintError, match="Restart all servers"):
            RewardSet(RemoteReward([one.url, other.url])).check_columns(["tag"])
        assert RemoteReward(one.url).fingerprint is None
    assert one.description["fingerprint"] != other.description["fingerprint"]


def test_a_server_that_changes_during_the_run_stops_it():
    prints = iter(["x", "x", "y"])
    with stub(lambda handler: scored(handler, next(prints))) as url:
        rewards = RewardSet(RemoteReward(url))
        for _ in range(2):
            assert rewards.score(IMAGES, PROMPTS).valid.all()
        with pytest.raises(RewardError, match=r"serves reward y, the first answer came from x"):
            rewards.score(IMAGES, PROMPTS)


def test_the_fingerprint_is_of_name_source_and_attribute():
    class Model:
        def __init__(self, fingerprint):
            self.fingerprint = fingerprint

        def __call__(self, images, prompts):
            return images.mean((1, 2, 3))

    rewards = [Model("a"), Model("a"), Model("b"), brightness, jpeg_compressibility, "jpeg_compressibility"]
    rewards += [scaled(brightness, 1), scaled(brightness, 2), scaled(Model("a"), 1), scaled(Model("b"), 1)]
    rewards += [RewardSet({brightness: 1.0}), RewardSet({brightness: 2.0})]
    found = []
    for reward in rewards:
        with RewardServer(reward, port=0) as server:
            found.append(server.description["fingerprint"])
    assert found[0] == found[1] and found[4] == found[5] and len(set(found)) == 10


# ---------------------------------------------------------------------------------------------- bad requests


@pytest.fixture(scope="module")
def server():
    limits = Limits(body_bytes=20_000, images=3, pixels=100, read_seconds=1.0)
    with RewardServer(picky, port=0, limits=limits) as running:
        yield running


def request(images, prompts=None, columns=None, **more):
    prompts = ["p"] * len(images) if prompts is None else prompts
    columns = {"tag": ["t"] * len(images)} if columns is None else columns
    return json.dumps({"images": images, "prompts": prompts, "columns": columns, **more})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "not JSON"),
        ("[" * 10_000, 400, "not JSON"),
        (b"\xff\xfe\x00", 400, "not JSON"),
        ('{"images": [NaN], "prompts": ["p"]}', 400, "NaN is not JSON"),
        ("[]", 400, "must be an object"),
        ('{"images": []}', 400, "must be an object"),
        (request([png()], pickle="x"), 400, "must be an object"),
        (request([]), 400, "got 0 images for 0 prompts"),
        (request([png()], ["p", "q"]), 400, "got 1 images for 2 prompts"),
        (request([png()], [7]), 400, "prompts must be a list of strings"),
        (request("abc", ["p"] * 3), 400, "images must be a list of strings"),
        (request([png()], columns=[1]), 400, "columns must be an object of lists"),
        (request([png()], columns={"tag": "t"}), 400, "columns must be an object of lists"),
        (request([png()], columns={"tag": ["t", "t"]}), 400, "column 'tag' must be a list of 1 entries"),
        (request([png()], columns={"tag": ["t"], "images": [0]}), 400, "hide the reward arguments"),
        (request([png()], columns={}), 400, "needs the prompt columns ['tag']"),
        (request(["%%%"]), 400, "images[0] is not a base64 PNG"),
        (request([base64.b64encode(b"GIF89a" + bytes(30)).decode()]), 400, "images[0] is not a base64 PNG"),
        (request([png(), png()[:80]]), 400, "images[1] is not a base64 PNG"),
        (request([png(mode="L")]), 400, "must be 8-bit RGB, it is L"),
        (request([png(mode="RGBA")]), 400, "must be 8-bit RGB, it is RGBA"),
        (request([png(), png(IMAGES[0, :, :4])]), 400, "must have one size"),
        (request([png()] * 4), 413, "4 images in a request; at most 3"),
        (request([png(torch.zeros(3, 10, 11))]), 413, "11 x 10 pixels, at most 100"),
        (request([bomb(10_000, 8_000)]), 413, "10000 x 8000 pixels, at most 100"),
        (request([bomb(100_000, 100_000)]), 413, "images[0]"),
        (b" " * 20_001, 413, "a body of 20001 bytes; at most 20000"),
    ],
)
def test_bad_requests_are_answered_with_one_clear_error(server, body, status, message):
    found, headers, answer = post(server, body)
    assert (found, headers["Content-Type"]) == (status, "application/json")
    assert message in answer["error"] and set(answer) == {"error"}
    assert post(server, request([png()]))[0] == 200  # and the next one is served


def raw(server, *parts, pause=0.0):
    """What comes back for bytes sent as they are."""
    with socket.create_connection(("127.0.0.1", server._http.server_port), timeout=20) as connection:
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        with contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


def test_requests_that_are_hardly_http(server):
    assert b" 411 " in raw(server, b"POST /score HTTP/1.1\r\n\r\n")
    assert b" 411 " in raw(server, b"POST /score HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    for length in (b"-1", b"x", b"1e3", b"9" * 30, "²".encode("latin-1")):
        assert b" 400 " in raw(server, b"POST /score HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n")
    assert b" 404 " in raw(server, b"POST /other HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
    assert b" 404 " in raw(server, b"GET / HTTP/1.1\r\n\r\n")
    assert b'{"error": ' in raw(server, b"DELETE /score HTTP/1.1\r\n\r\n")
    assert b'{"error": ' in raw(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert raw(server, b"") == b"" and post(server, request([png()]))[0] == 200


def test_a_request_that_does_not_come_to_its_end_is_cut_off(server):
    start = time.monotonic()
    raw(server, b"POST /score HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", *[b" "] * 100, pause=0.05)
    assert time.monotonic() - start < 20
    raw(server, *[b"GET /health HTTP/1.1\r\n", *[b"A: b\r\n"] * 60], pause=0.05)
    assert post(server, request([png()]))[0] == 200


def test_the_token(monkeypatch):
    monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "secret")
    for bad in (" ", "sécret", "a\nb"):
        with pytest.raises(ValueError, match="token of a reward server must be printable ASCII"):
            RemoteReward("http://a", token=bad)
        with pytest.raises(ValueError, match="token of a reward server must be printable ASCII"):
            RewardServer(brightness, port=0, token=bad)
    with RewardServer(brightness, port=0, token="secret\n") as server:  # as a file ends
        body = json.dumps({"images": [png()], "prompts": ["p"]})
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}):
            status, _, answer = post(server, body, **headers)
            assert status == 401 and "Authorization: Bearer TOKEN" in answer["error"]
        assert post(server, body, Authorization="Bearer secret")[0] == 200
        assert call(RemoteReward(server.url)).valid.all()
        assert call(RemoteReward(server.url, token="secret\r\n")).valid.all()
        out = call(RemoteReward(server.url, token="other"))
    assert not out.valid.any() and "HTTP 401" in out.details["reason"][0] and "secret" not in out.details["reason"][0]


# ------------------------------------------------------------------------------------------ load and failing


class Slow:
    """A reward that waits until it is let go; counts its calls."""

    def __init__(self):
        self.calls, self.entered, self.release = 0, threading.Event(), threading.Event()

    def __call__(self, images, prompts):
        self.calls += 1
        self.entered.set()
        assert self.release.wait(60)
        return images.mean((1, 2, 3))


def test_many_clients_and_a_short_queue():
    def reward(images, prompts):
        time.sleep(0.005)
        return images.mean((1, 2, 3))

    images = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 3, 4, 4) / 255
    refused = []
    with RewardServer(reward, port=0, limits=Limits(queue=2), device="cpu") as server:
        submit = server.submit

        def counted(*args):
            try:
                return submit(*args)
            except Exception as error:
                refused.append(str(error))
                raise

        server.submit = counted
        rewards = [RemoteReward(server.url, batch_size=1) for _ in range(3)]

        async def everybody():
            return await asyncio.gather(*[reward(images, PROMPTS) for reward in rewards])

        outputs = asyncio.run(everybody())
    for out in outputs:
        assert out.valid.all(), out.details
        assert out.values.tolist() == images.mean((1, 2, 3)).tolist()
    assert refused and set(refused) == {"2 requests are waiting already; come back later"}


def test_a_full_queue_refuses_and_clients_that_left_are_not_scored():
    body, slow = json.dumps({"images": [png()], "prompts": ["p"]}), Slow()
    with RewardServer(slow, port=0, limits=Limits(queue=1)) as server:
        first = threading.Thread(target=post, args=(server, body))
        first.start()
        assert slow.entered.wait(20)
        leaver = http.client.HTTPConnection("127.0.0.1", server._http.server_port)
        leaver.request("POST", "/score", body)
        while not server._jobs.full():
            time.sleep(0.01)
        status, headers, answer = post(server, body)
        assert (status, headers["Retry-After"]) == (503, "1") and "1 requests are waiting" in answer["error"]
        health = http.client.HTTPConnection("127.0.0.1", server._http.server_port, timeout=20)
        health.request("GET", "/health")
        assert json.load(health.getresponse())["status"] == "ok"  # also while it computes
        leaver.close()
        slow.release.set()
        first.join(20)
    assert slow.calls == 1


def test_too_many_connections_are_turned_away(monkeypatch):
    monkeypatch.setattr("flowrl.rewards.server.SPARE_CONNECTIONS", 0)
    with RewardServer(brightness, port=0, limits=Limits(queue=1, read_seconds=5)) as server:
        address = ("127.0.0.1", server._http.server_port)
        idle = [socket.create_connection(address) for _ in range(2)]
        with socket.create_connection(address, timeout=20) as third:
            assert third.recv(100).startswith(b"HTTP/1.0 503")
        for connection in idle:
            connection.close()
        assert call(RemoteReward(server.url)).valid.all()


def test_a_connection_without_a_thread_takes_no_place(monkeypatch):
    server = RewardServer(brightness, port=0)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    free = server._http.slots._value
    with socket.socket() as connection, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            server._http.process_request(connection, ("", 0))
    assert server._http.slots._value == free
    server._http.socket.close()


def test_who_has_left_is_seen_on_any_descriptor():
    fcntl, resource = pytest.importorskip("fcntl"), pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1100)) as high:
            ours.close()
            assert high.fileno() >= 1024 and not _has_left(high)
            theirs.sendall(b"x")
            assert not _has_left(high) and high.recv(1) == b"x"
            theirs.close()
            assert _has_left(high)
        assert _has_left(high)  # closed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("how", [lambda: 1 / 0, lambda: float("nan"), lambda: sys.exit(3)])
def test_a_reward_that_fails_costs_only_its_request(how):
    def reward(images, prompts):
        return [how() if p == "bad" else 1.0 for p in prompts]

    with RewardServer(reward, port=0) as server:
        out = call(RemoteReward(server.url, batch_size=1), prompts=["a", "bad", "c", "d", "e"])
        assert out.valid.tolist() == [True, False, True, True, True]
        assert "HTTP 500" in out.details["reason"][1]


def test_stopping_finishes_what_was_accepted():
    body, slow, answers = json.dumps({"images": [png()], "prompts": ["p"]}), Slow(), []
    with RewardServer(slow, port=0) as server:
        threads = [threading.Thread(target=lambda: answers.append(post(server, body))) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server._jobs.qsize() < 2:
            time.sleep(0.01)
        threading.Timer(0.3, slow.release.set).start()
    for thread in threads:
        thread.join(20)
    assert [status for status, _, _ in answers] == [200] * 3 and slow.calls == 3
    assert not any(thread.is_alive() for thread in server._threads)
    with pytest.raises(ConnectionError):
        post(server, body)


def test_the_command(capsys, monkeypatch):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    out = {}
    entered = RewardServer.__enter__

    def enter(self):
        def use():
            time.sleep(0.1)
            out["scores"] = call(RemoteReward(self.url))
            os.kill(os.getpid(), signal.SIGTERM)

        entered(self)
        threading.Thread(target=use).start()
        return self

    monkeypatch.setattr(RewardServer, "__enter__", enter)
    options = ["--port", "0", "--max-images", "16", "--host", "0.0.0.0", "--device", "cpu"]
    assert main(["serve-reward", "jpeg_compressibility", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("serving jpeg_compressibility (") and "set FLOWRL_REWARD_TOKEN" in printed.err
    assert out["scores"].valid.all() and "stopping" in printed.err
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert main(["serve-reward", "jpeg_compresibility"]) == 2
    assert "did you mean 'jpeg_compressibility'" in capsys.readouterr().err

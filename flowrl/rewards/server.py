"""Serve a reward over HTTP: JSON and PNG, nothing that can execute. Needs only the standard library's server.

    POST /score  {"images": [base64 of an RGB PNG, ...], "prompts": [N texts], "columns": {name: [N values]}}
    200          {"fingerprint": text, "values": [N numbers, null if invalid], "valid": [N], "details": {name: [N]}}
    GET /health  {"status": "ok", "reward", "version", "fingerprint", "columns": [required], "max_images", "max_pixels"}

Anything else is answered by {"error": text}: 400 bad request, 401 wrong token, 404, 411 no length, 413 too large,
500 the reward failed, 503 with Retry-After when the queue is full or the server stops.
"""

import base64
import contextlib
import functools
import hashlib
import hmac
import inspect
import io
import json
import logging
import math
import queue
import selectors
import signal
import socket
import socketserver
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl import __version__
from flowrl.rewards.base import Reward, RewardError
from flowrl.rewards.combinators import _Derived
from flowrl.rewards.remote import read_token
from flowrl.rewards.reward_set import RewardSet, _Named

log = logging.getLogger(__name__)
PATHS = "there are GET /health and POST /score"
SPARE_CONNECTIONS = 32  # beside those that wait for a score


@dataclass(frozen=True)
class Limits:
    """What one request may cost.

    body_bytes: size of the body. images: images in a request. pixels: width x height of an image, checked before it
    is decoded. queue: requests that wait; the next is answered 503. read_seconds: time to send a request in.
    """

    body_bytes: int = 64 << 20
    images: int = 64
    pixels: int = 2048 * 1024
    queue: int = 16
    read_seconds: float = 30.0

    def __post_init__(self):
        if min(self.body_bytes, self.images, self.pixels, self.queue, self.read_seconds) <= 0:
            raise ValueError(f"every limit of a reward server must be above 0, got {self}")


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def fingerprint(name: str, reward: Reward) -> str:
    """16 hex digits of SHA-256 over the name, this package's version, the source file that defines the reward, and its
    attribute `fingerprint` if it has one: set it to what the file does not say (a model's revision, a template). What
    is made of other rewards has its settings and theirs."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    try:
        source = inspect.getsourcefile(reward if inspect.isroutine(reward) else type(reward))
        code = Path(source).read_bytes() if source else b""
    except (TypeError, OSError):  # defined in no file
        code = b""
    own = getattr(reward, "settings" if isinstance(reward, _Derived) else "fingerprint", "")
    inner = [[named.weight, fingerprint(named.name, named.call)] for named in _sources(reward)]
    says = f"{name}\n{__version__}\n{own if isinstance(own, str | list) else ''}\n{inner}\n"
    return hashlib.sha256(says.encode() + code).hexdigest()[:16]


def _sources(reward: Reward) -> list[_Named]:
    """The rewards that a set or what was derived from sets is made of."""
    sets = [reward] if isinstance(reward, RewardSet) else reward.sources if isinstance(reward, _Derived) else []
    return [named for one in sets for named in one.rewards]


def _columns(named: _Named) -> set[str]:
    """The prompt columns it needs."""
    return named.required.union(*map(_columns, _sources(named.call)))


def _device(name: torch.device | str | None) -> torch.device:
    if name is None:
        name = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        raise ValueError(f"cannot compute on {str(name)!r}: {error}") from error


class RewardServer:
    """A reward behind HTTP, scored by one thread, in the order the requests came.

    reward: a registered name, `module:attribute` or callable, as in a `RewardSet`; a `RewardSet` offers its total.
    port: 0 takes a free one. token: if given, /score wants the header `Authorization: Bearer TOKEN`.
    device: where the images are put, and so where rewards that run where the images are do; default: the accelerator.

    Use it as a context manager, or `serve` until a signal comes; both finish what was accepted. The reward sees the
    pixels of the PNG, k / 255. Raises ValueError or TypeError on an unusable reward, OSError on a port in use.
    """

    def __init__(
        self,
        reward: str | Reward,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        limits: Limits | None = None,
        device: torch.device | str | None = None,
    ):
        if isinstance(reward, dict | list | tuple):
            raise ValueError(f"a server offers one reward, got {reward!r}: give RewardSet(...) of them for their sum")
        self.rewards = RewardSet(reward, max_invalid_share=1.0)  # the client judges the share
        self.limits, self.token, self.stopping = limits or Limits(), read_token(token), False
        self.device = _device(device)
        if self.rewards.groupwise:
            raise ValueError(
                f"{reward!r} compares the samples of a group, and a request holds parts of groups: run it locally"
            )
        (named,) = self.rewards.rewards
        self.description = {
            "reward": named.name,
            "version": __version__,
            "fingerprint": fingerprint(named.name, named.call),
            "columns": sorted(_columns(named)),
            "max_images": self.limits.images,
            "max_pixels": self.limits.pixels,
        }
        self._jobs: queue.Queue = queue.Queue(self.limits.queue)
        self._http = _Listener((host, port), self)
        self.url = f"http://{host}:{self._http.server_port}"
        self._threads = [
            threading.Thread(target=self._work, name="flowrl-reward-worker", daemon=True),
            threading.Thread(target=self._http.serve_forever, args=(0.1,), name="flowrl-reward-http", daemon=True),
        ]

    def __enter__(self) -> "RewardServer":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop: take no more requests, answer those that wait."""
        self.stopping = True
        self._http.shutdown()
        self._http.server_close()  # waits for the open connections, so nobody submits after this
        self._jobs.put(None)
        self._threads[0].join()

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT; a second signal ends the process at once. Call it from the main thread."""
        stop = threading.Event()
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        about = self.description
        with self:
            print(f"serving {about['reward']} ({about['fingerprint']}) at {self.url}; Ctrl-C stops", flush=True)
            stop.wait()
            for number in before:
                signal.signal(number, signal.SIG_DFL)
            print("stopping: finishing accepted requests", file=sys.stderr, flush=True)
        for number, handler in before.items():
            signal.signal(number, handler)

    def submit(self, body: bytes, connection: socket.socket) -> dict[str, Any]:
        """The answer to a request's body, once its turn has come."""
        if self.stopping:
            raise _Refused(503, "the server is stopping")
        answer: Future[dict[str, Any]] = Future()
        try:
            self._jobs.put_nowait((body, connection, answer))
        except queue.Full:
            raise _Refused(503, f"{self.limits.queue} requests are waiting already; come back later") from None
        return answer.result()

    def _work(self) -> None:
        with torch.no_grad():  # grad mode is per thread
            while (job := self._jobs.get()) is not None:
                body, connection, answer = job
                try:
                    if _has_left(connection):  # it gave up, or another replica was faster
                        raise _Refused(503, "the client has left")
                    answer.set_result(self._score(body))
                except BaseException as error:  # even sys.exit() in a reward must not stop the queue
                    answer.set_exception(error)

    def _score(self, body: bytes) -> dict[str, Any]:
        images, prompts, columns = self._read(body)
        try:
            scores = self.rewards.score(images, prompts, columns)
        except RewardError as error:
            log.error("%s", error, exc_info=error.__cause__)
            raise _Refused(500, str(error)) from error
        except ValueError as error:  # a column is missing or has another length
            raise _Refused(400, str(error)) from error
        ((name, values),) = scores.parts.items()
        found = {"values": values, "valid": scores.valid, "details": scores.details[name]}
        return {"fingerprint": self.description["fingerprint"], **_plain(found)}

    def _read(self, body: bytes) -> tuple[Tensor, list[str], dict[str, list]]:
        try:
            request = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is not JSON: {error}") from error
        known = {"images", "prompts", "columns"}
        if not isinstance(request, dict) or not {"images", "prompts"} <= set(request) <= known:
            raise _Refused(400, "the body must be an object with images, prompts and, if needed, columns")
        images, prompts, columns = request["images"], request["prompts"], request.get("columns", {})
        for key, texts in (("images", images), ("prompts", prompts)):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise _Refused(400, f"{key} must be a list of strings")
        if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
            raise _Refused(400, "columns must be an object of lists")
        if len(images) > self.limits.images:
            raise _Refused(
                413, f"{len(images)} images in a request; at most {self.limits.images}, send smaller batches"
            )
        if not images or len(images) != len(prompts):
            raise _Refused(400, f"got {len(images)} images for {len(prompts)} prompts")
        pixels = [self._pixels(row, text) for row, text in enumerate(images)]
        if len({image.shape for image in pixels}) > 1:
            raise _Refused(400, "the images of a request must have one size")
        found = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float().div_(255)
        return found.to(self.device), prompts, columns  # divided before: an accelerator may round otherwise

    def _pixels(self, row: int, text: str) -> np.ndarray:
        try:
            image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
            width, height = image.size  # of the header: nothing is decoded yet
            if width * height <= self.limits.pixels and image.mode == "RGB":
                return np.asarray(image)
        except Image.DecompressionBombError as error:
            raise _Refused(413, f"images[{row}]: {error}") from error
        except Exception as error:  # Pillow raises many kinds on broken files
            raise _Refused(400, f"images[{row}] is not a base64 PNG: {error}") from error
        if width * height > self.limits.pixels:
            raise _Refused(413, f"images[{row}] has {width} x {height} pixels, at most {self.limits.pixels}")
        raise _Refused(400, f"images[{row}] must be 8-bit RGB, it is {image.mode}")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _has_left(connection: socket.socket) -> bool:
    try:
        with selectors.DefaultSelector() as ready:  # `select` takes no descriptor above 1023
            ready.register(connection, selectors.EVENT_READ)
            return bool(ready.select(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def _plain(value: Any) -> Any:
    """What JSON can hold: arrays as lists, non-finite numbers as null, other objects as their repr."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else repr(value)


class _Listener(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: RewardServer):
        self.owner = owner
        self.slots = threading.BoundedSemaphore(owner.limits.queue + 1 + SPARE_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks the host up in DNS
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.slots.acquire(blocking=False):
            try:
                return super().process_request(request, client_address)
            except BaseException:  # no thread started, which would have given the slot back
                self.slots.release()
                raise
        with contextlib.suppress(OSError):
            request.sendall(b'HTTP/1.0 503 Busy\r\nRetry-After: 1\r\n\r\n{"error": "too many connections"}')
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client hung up
            log.exception("request of %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection (HTTP/1.0), which must arrive within `read_seconds`."""

    def setup(self) -> None:
        super().setup()
        self.owner: RewardServer = self.server.owner  # ty: ignore[missing-attribute]
        self.guard = threading.Timer(self.owner.limits.read_seconds, self._cut)
        self.guard.daemon = True
        self.guard.start()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def finish(self) -> None:
        self.guard.cancel()
        super().finish()

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._reply(404, {"error": PATHS})
        stopping = self.owner.stopping
        status = {"status": "stopping" if stopping else "ok"}
        self._reply(503 if stopping else 200, status | self.owner.description)

    def do_POST(self) -> None:
        try:
            body = self._body()
        except _Refused as error:
            self._reply(error.status, {"error": str(error)})
            with contextlib.suppress(OSError):  # closing while it still sends would reset it under our answer
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(1 << 16):
                    pass
            return
        self.guard.cancel()
        try:
            answer, status = self.owner.submit(body, self.connection), 200
        except _Refused as error:
            answer, status = {"error": str(error)}, error.status
        except BaseException as error:
            log.exception("a request failed")
            answer, status = {"error": f"{type(error).__name__}: {error}"}, 500
        self._reply(status, answer)

    def _body(self) -> bytes:
        owner, length = self.owner, self.headers.get("Content-Length")
        if self.path != "/score":
            raise _Refused(404, PATHS)
        given = self.headers.get("Authorization", "")
        if owner.token and not hmac.compare_digest(given.encode(), f"Bearer {owner.token}".encode()):
            raise _Refused(401, "wrong or no token: send the header 'Authorization: Bearer TOKEN'")
        if length is None or "Transfer-Encoding" in self.headers:
            raise _Refused(411, "a body with Content-Length is needed")
        if not length.isascii() or not length.isdecimal() or len(length) > 18:
            raise _Refused(400, "Content-Length must be a number of bytes")
        if int(length) > owner.limits.body_bytes:
            raise _Refused(413, f"a body of {length} bytes; at most {owner.limits.body_bytes}, send smaller batches")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer, allow_nan=False).encode()
        self.connection.settimeout(self.owner.limits.read_seconds)  # it must take the answer, too
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._reply(code, {"error": message or HTTPStatus(code).phrase})

    def log_message(self, format: str, *args: Any) -> None:
        log.info(format, *args)

"""A reward scored by `flowrl serve-reward` on one or several machines."""

import asyncio
import base64
import io
import json
import os
import random
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.rewards.base import RewardOutput, quantise
from flowrl.rewards.calling import cancel, together

PASSING = (429, 502, 503, 504)  # statuses of a server that is busy or restarts
AVOID_SECONDS = 10.0  # how long a replica that failed or was slow is only asked after the others
MAX_ANSWER = 64 << 20
LARGEST = torch.finfo(torch.float32).max


class FingerprintError(RuntimeError):
    """Servers of one reward do not run the same reward, or it changed during the run."""


class Failed(Exception):
    """A request without a usable answer. passing: it may work later. after: seconds the server wants to be left alone.
    status: of HTTP, 0 when there is none."""

    def __init__(self, reason: str, passing: bool, after: float = 0.0, status: int = 0):
        super().__init__(reason)
        self.passing, self.after, self.status = passing, after, status


@dataclass(eq=False)
class _Replica:
    url: str
    in_flight: int = 0
    avoid_until: float = 0.0


class RemoteReward:
    """The reward behind one URL or several replicas of it; in a recipe `remote@http://a:8000,http://b:8000`.

    urls: where `flowrl serve-reward` listens; a string may hold several, separated by commas.
    deadline: seconds in which a call ends, whatever the servers do.
    hedge_after: seconds after which a request is also sent to the next replica; the first answer counts.
    batch_size: images per request. token: of the servers; default: the environment's FLOWRL_REWARD_TOKEN.

    A call splits N images into requests, four at a time per replica, to the least busy one. Refused connections,
    time-outs and the statuses 429, 502, 503, 504 are tried again on another replica and, with growing pauses, until the
    deadline; a wrong answer (another status, malformed, another count) only on the other replicas. Rows nobody
    scored are invalid, with details["reason"], never 0. Values are those of the 8-bit pixels (`quantise`), bit for
    bit what the reward returns for them locally.

    Raises ValueError on unusable URLs, numbers or tokens, and FingerprintError when an answer comes from another reward
    than the first one did: mixed replicas, or a server updated during the run.
    """

    name = "remote"

    def __init__(
        self,
        urls: str | Sequence[str],
        deadline: float = 120.0,
        hedge_after: float = 10.0,
        batch_size: int = 16,
        token: str | None = None,
    ):
        urls = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        if any(map(holds_key, urls)):
            raise ValueError(
                "a remote reward's URLs must be addresses alone, without a user, password or query: they are logged. "
                "The server's token goes into the environment variable FLOWRL_REWARD_TOKEN"
            )
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"a remote reward needs distinct URLs, got {urls}")
        for url in urls:
            if not is_url(url):
                raise ValueError(f"a remote reward needs URLs such as http://host:8000, got {url!r}")
        if not (deadline > 0 and hedge_after > 0 and batch_size >= 1):
            raise ValueError("deadline, hedge_after and batch_size of a remote reward must be above 0")
        self.deadline, self.hedge_after, self.batch_size = deadline, hedge_after, batch_size
        self.replicas = [_Replica(url) for url in urls]
        token = read_token(os.environ.get("FLOWRL_REWARD_TOKEN") if token is None else token)
        self.headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._verify = verifier(*urls)
        self.fingerprint: str | None = None
        self.required: set[str] | None = None
        self._random = random.Random()  # the global one belongs to the run's seed

    def check_columns(self, available: Iterable[str]) -> None:
        """Ask each server, once, what it runs: raises ValueError when the prompts lack a column it needs, and
        FingerprintError. A server that does not answer is left to `self_test` and the first batch."""
        if self.required is None:
            self.required = set()
            self._describe_all()
        if missing := self.required - set(available):
            raise ValueError(f"the reward at {self.replicas[0].url} needs the prompt columns {sorted(missing)}")

    def self_test(self, device: torch.device | str = "cpu") -> dict[str, tuple[float, float]]:
        """Raises RuntimeError when no server can be reached: this comes before what computes."""
        if self.fingerprint is None:
            failures = self._describe_all()
            if self.fingerprint is None and all(failures):
                raise RuntimeError(f"no server of this reward can be reached: {'; '.join(failures)}. Start it first.")
        return {}

    @property
    def identity(self) -> dict[str, float]:
        """As of a `RewardSet`: what the servers run, wherever they are."""
        self.self_test()
        return {f"{self.name} {self.fingerprint or 'at ' + ','.join(r.url for r in self.replicas)}": 1.0}

    def _describe_all(self) -> list[str]:
        return [self._describe(replica.url) for replica in self.replicas]

    def _describe(self, url: str) -> str:
        """Learn what a server runs, if it says so; why it cannot be reached, or nothing."""
        import httpx

        limit, raw = min(5.0, self.deadline), bytearray()
        end = time.monotonic() + limit
        try:
            with httpx.stream("GET", f"{url}/health", timeout=limit, verify=self._verify) as response:
                for chunk in response.iter_raw():
                    raw += chunk
                    if len(raw) > MAX_ANSWER or time.monotonic() > end:
                        return ""
        except httpx.HTTPError as error:
            return f"{url}: {type(error).__name__} {error}"
        about = _json(bytes(raw))
        if response.status_code != 200 or not isinstance(about, dict) or not isinstance(about.get("columns"), list):
            return ""
        self._same(about.get("fingerprint"), url)
        self.required = {str(column) for column in about["columns"]}
        return ""

    def _same(self, theirs: object, url: str) -> None:
        self.fingerprint = self.fingerprint or str(theirs)
        if str(theirs) != self.fingerprint:
            raise FingerprintError(
                f"{url} serves reward {theirs}, the first answer came from {self.fingerprint}: another reward, version "
                "or source file. Restart all servers with the same one; a run must not change its reward."
            )

    async def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Sequence) -> RewardOutput:
        import httpx

        if not isinstance(images, Tensor):
            raise TypeError("a remote reward scores image tensors [N, 3, H, W]")
        for key, column in columns.items():
            try:
                json.dumps(column, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"prompt column {key!r} cannot be sent as JSON: {error}") from error
        end = time.monotonic() + self.deadline
        # The loop is everybody's: what computes or copies is done beside it.
        pixels, n = await asyncio.to_thread(lambda: quantise(images).cpu().numpy()), len(prompts)
        values, reasons = torch.full((n,), torch.nan), [""] * n
        details: dict[str, Any] = {}
        slots = asyncio.Semaphore(4 * len(self.replicas))

        async def score(rows: slice) -> None:
            count = len(prompts[rows])
            try:
                async with slots:
                    part = {key: list(column[rows]) for key, column in columns.items()}
                    body = await asyncio.to_thread(_body, pixels[rows], prompts[rows], part)
                    answer = await self._ask(client, body, count, end)
            except Failed as error:
                reasons[rows] = [str(error)] * count
                return
            values[rows], reasons[rows] = answer.values, answer.details.pop("reason")
            for key, column in answer.details.items():
                details.setdefault(key, [None] * n)[rows] = column

        # A client belongs to one event loop, so it lives no longer than this call.
        async with httpx.AsyncClient(headers=self.headers, verify=self._verify) as client:
            await together([score(slice(i, i + self.batch_size)) for i in range(0, n, self.batch_size)])
        valid = values.isfinite()
        return RewardOutput(values, valid, details | ({"reason": reasons} if any(reasons) else {}))

    async def _ask(self, client: Any, body: bytes, count: int, end: float) -> RewardOutput:
        """One request's answer, with retries; raises `Failed` when the deadline or the servers say so."""
        candidates, pause, last = list(self.replicas), 0.25, "none came"
        while (now := time.monotonic()) < end:
            # Least busy first; equals in random order, or one of them would get every first request.
            order = sorted(candidates, key=lambda r: (r.avoid_until > now, r.in_flight, self._random.random()))
            failures = await self._hedged(client, order, body, count, end)
            if isinstance(failures, RewardOutput):
                return failures
            candidates = [r for r in candidates if r not in failures or failures[r].passing]
            last = "; ".join(str(failure) for failure in failures.values()) or last
            if not candidates:
                raise Failed(last, passing=False)
            pause = max(pause, *(failure.after for failure in failures.values()), 0.0)
            await asyncio.sleep(min(pause * (1 + self._random.random() / 2), max(end - time.monotonic(), 0.0)))
            pause = min(2 * pause, 8.0)
        raise Failed(f"no answer in {self.deadline:g} s; last: {last}", passing=False)

    async def _hedged(
        self, client: Any, order: list[_Replica], body: bytes, count: int, end: float
    ) -> RewardOutput | dict[_Replica, Failed]:
        """The first answer of some replicas, each asked when the one before failed or was slow; or their failures."""
        running: dict[asyncio.Task, _Replica] = {}
        failures: dict[_Replica, Failed] = {}
        waiting = iter(order)
        more: _Replica | None = next(waiting)
        try:
            while more or running:
                if more:
                    running[asyncio.create_task(self._post(client, more, body, count, end))] = more
                    more = next(waiting, None)
                left = max(end - time.monotonic(), 0.0)
                patience = min(self.hedge_after, left) if more else left
                done, _ = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    for replica in running.values():
                        replica.avoid_until = time.monotonic() + AVOID_SECONDS
                    if time.monotonic() >= end:
                        break
                for task in done:
                    replica = running.pop(task)
                    try:
                        answer = task.result()
                    except Failed as failure:
                        failures[replica] = failure
                        replica.avoid_until = time.monotonic() + max(AVOID_SECONDS, failure.after)
                    else:
                        replica.avoid_until = 0.0
                        return answer
        finally:
            await cancel(running)
        return failures

    async def _post(self, client: Any, replica: _Replica, body: bytes, count: int, end: float) -> RewardOutput:
        replica.in_flight += 1
        try:
            answer = await fetch(client, replica.url, "/score", max(end - time.monotonic(), 0.001), body)
        finally:
            replica.in_flight -= 1
        try:
            output = _output(answer, count)
        except ValueError as error:
            raise Failed(f"{replica.url}: {error}", passing=False) from error
        self._same(answer["fingerprint"], replica.url)
        return output


def is_url(url: str) -> bool:
    """Whether `url` is http or https with a host; raises ValueError when its port is out of range."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0


def verifier(*urls: str) -> ssl.SSLContext | bool:
    """What checks the certificates of https, for all requests to these URLs: making it takes a while."""
    return ssl.create_default_context() if any(urlsplit(url).scheme == "https" for url in urls) else False


def holds_key(url: str) -> bool:
    """Whether there is more to it than an address: names of rewards are logged, and so are their URLs."""
    parts = urlsplit(url)
    return bool(parts.username or parts.password or parts.query or parts.fragment)


def read_token(token: str | None) -> str | None:
    """The token without the newline that a file ends in; raises ValueError when no HTTP header can carry it."""
    found = token and token.strip()
    if token and not (found and found.isascii() and found.isprintable()):
        raise ValueError("the token of a reward server must be printable ASCII; see FLOWRL_REWARD_TOKEN")
    return found or None


async def fetch(client: Any, url: str, path: str, patience: float, body: bytes | None = None) -> Any:
    """The JSON a server answers with status 200 to a POST of `body`, or to a GET; a text that says so if it is none.

    client: httpx.AsyncClient. patience: seconds between two signs of life. Raises `Failed`.
    """
    import httpx

    timeout, raw = httpx.Timeout(patience, connect=min(patience, 5.0)), bytearray()
    method = "GET" if body is None else "POST"
    try:
        async with client.stream(method, url + path, content=body, timeout=timeout) as response:
            async for chunk in response.aiter_raw():
                raw += chunk
                if len(raw) > MAX_ANSWER:
                    raise Failed(f"{url} sent more than {MAX_ANSWER} bytes", passing=False)
    except httpx.HTTPError as error:
        raise Failed(f"{url}: {type(error).__name__} {error}".strip(), passing=True) from error
    answer, status = _json(bytes(raw)), response.status_code
    if status != 200:
        said = str(answer.get("error") or answer if isinstance(answer, dict) else answer)[:500]
        after = response.headers.get("Retry-After", "")
        seconds = min(float(after), 60.0) if after.isascii() and after.isdecimal() else 0.0
        raise Failed(f"{url}: HTTP {status}, {said}", status in PASSING, seconds, status)
    return answer


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return f"not JSON: {raw[:100]!r}"


def png(image: Image.Image) -> str:
    """base64 of the image as a PNG."""
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def _body(pixels: np.ndarray, prompts: Sequence[str], columns: dict[str, list]) -> bytes:
    images = [png(Image.fromarray(image)) for image in pixels]
    return json.dumps({"images": images, "prompts": list(prompts), "columns": columns}).encode()


def _output(answer: Any, count: int) -> RewardOutput:
    """A server's answer, NaN where it gave no finite number; raises ValueError when it cannot be matched to rows."""
    if not isinstance(answer, dict) or not isinstance(answer.get("fingerprint"), str):
        raise ValueError(f"the answer is not an object with a fingerprint, but {str(answer)[:100]}")
    values, details = answer.get("values"), answer.get("details", {})
    valid = answer.get("valid", [True] * count)
    if not isinstance(values, list) or not isinstance(valid, list) or not isinstance(details, dict):
        raise ValueError("values and valid must be lists, details an object")
    for key, column in [("values", values), ("valid", valid), *details.items()]:
        if not isinstance(column, list) or len(column) != count:
            raise ValueError(f"{key!r} is not a list of {count} entries, one per image")
    said = details.get("reason", [None] * count)
    numbers, reasons = [torch.nan] * count, [""] * count
    for row, value in enumerate(values):
        if valid[row] is not True:
            reasons[row] = str(said[row] or "the server marked it invalid")
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            numbers[row], reasons[row] = float(value), str(said[row] or "")
        else:
            reasons[row] = f"the server returned {str(value)[:100]!r} as a score"
    return RewardOutput(torch.tensor(numbers), details={**details, "reason": reasons})

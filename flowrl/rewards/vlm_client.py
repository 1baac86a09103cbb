"""A client for vision-language models behind an OpenAI-compatible server: `vllm serve`, SGLang, hosted APIs."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flowrl.rewards.remote import Failed, fetch, holds_key, is_url, verifier

log = logging.getLogger(__name__)
T = TypeVar("T")
TOP = 20  # most likely tokens asked for; vLLM's and OpenAI's limit
PAUSE = 0.5  # seconds before the first retry, doubled by each further one up to 8
WRONG = {  # statuses that say no request of this kind can work, and what to do
    401: "set the environment variable {env} to the server's API key before the run",
    403: "the key in {env} may not use this model",
    404: "check the base URL (it usually ends in /v1) and the model's name (the server lists its own under /models)",
    405: "check the base URL; it usually ends in /v1",
}


class JudgeError(RuntimeError):
    """The server refuses every request of this kind: a wrong key, model or address."""


@dataclass(frozen=True)
class Reply:
    """text: of the reply, "" if none. top: the most likely first tokens -> probability, None where the server gives no
    log-probabilities. cut: the reply ended at max_tokens."""

    text: str
    top: dict[str, float] | None
    cut: bool


@dataclass(eq=False)
class Session:
    """One call's connections, its end in `time.monotonic()` and its requests in flight."""

    http: Any
    end: float
    slots: asyncio.Semaphore


class ChatClient:
    """A server that answers POST {url}/chat/completions about images.

    url: its base, usually ending in /v1; `URL#MODEL` names the model too.
    model: default: the only one the server lists under /models.
    concurrency: requests at once in a call. timeout: seconds for one request. deadline: seconds in which a call of a
        judge ends, whatever the server does.
    retries: further attempts after a time-out, a refused connection, 408, 429 and 5xx, with growing jittered pauses,
        or the server's Retry-After.
    trip_after, rest: after so many requests in a row have failed with all their retries, the server is not asked for
        `rest` seconds and everything fails at once; a busy server's 429 does not count.
    cache: replies kept, by a hash of the whole request: image bytes, prompt, template, model, sampling.
    key_env: environment variable that holds the API key, if any. It is read at each call and kept nowhere; it is sent
        to this URL only.
    extra_body: more fields of every request, which go last: {"response_format": ...} for a JSON schema,
        {"chat_template_kwargs": {"enable_thinking": False}}.

    Several judges may share a client. Every request states temperature, top_p, max_tokens and seed, since servers
    fill in a model's own defaults otherwise. Raises ValueError on unusable arguments.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        concurrency: int = 16,
        timeout: float = 60.0,
        deadline: float = 300.0,
        retries: int = 4,
        trip_after: int = 8,
        rest: float = 30.0,
        cache: int = 4096,
        key_env: str = "FLOWRL_JUDGE_KEY",
        extra_body: Mapping[str, Any] | None = None,
    ):
        base, _, named = url.strip().partition("#")
        if holds_key(base):
            raise ValueError(f"a judge's URL must not hold a key; put it in the environment variable {key_env}")
        if not is_url(base):
            raise ValueError(f"a judge needs a base URL such as http://host:8000/v1, got {url!r}")
        if min(timeout, deadline, rest) <= 0 or min(concurrency, trip_after) < 1 or min(retries, cache) < 0:
            raise ValueError("a judge's retries and cache must be at least 0, its other numbers above 0")
        self.url, self.model = base.rstrip("/"), model or named or None
        self.concurrency, self.timeout, self.deadline, self.retries = concurrency, timeout, deadline, retries
        self.trip_after, self.rest, self.cache_size, self.key_env = trip_after, rest, cache, key_env
        self.extra_body = dict(extra_body or {})
        self._verify = verifier(base)
        self._cache: OrderedDict[bytes, Reply] = OrderedDict()
        self._lock = threading.Lock()  # calls may come from several threads
        self._failures, self._closed_until, self._last = 0, 0.0, ""
        self._random = random.Random()  # the global one belongs to the run's seed

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Connections for one call: they belong to one event loop, so they live no longer.

        Finds the model's name on first use. Raises JudgeError, `Failed`, and ValueError on a key that cannot be sent.
        """
        import httpx

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(headers=headers, verify=self._verify, limits=limits) as http:
            session = Session(http, time.monotonic() + self.deadline, asyncio.Semaphore(self.concurrency))
            if self.model is None:
                self.model = await self._request(session, "/models", None, self._only_model)
                log.info("%s serves %s", self.url, self.model)
            yield session

    async def ask(self, session: Session, image: str, text: str, **sampling: Any) -> Reply:
        """The reply to one question about one image, greedy unless `sampling` says otherwise.

        image: base64 of a PNG. Raises `Failed` when there is no reply, JudgeError when there can be none.
        """
        body = await asyncio.to_thread(self._body, image, text, sampling)
        key = hashlib.sha256(body).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        reply = await self._request(session, "/chat/completions", body, read_reply)
        with self._lock:
            self._cache[key] = reply
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return reply

    def clean(self, text: str) -> str:
        """`text` without the key, should the server have repeated it."""
        key = self._key()
        return text.replace(key, "[key]") if key else text

    def _key(self) -> str:
        key = os.environ.get(self.key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"the environment variable {self.key_env} holds characters no HTTP header can carry")
        return key

    def _body(self, image: str, text: str, sampling: Mapping[str, Any]) -> bytes:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        messages = [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]
        greedy = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 1, "seed": 0}
        request = {"model": self.model, "messages": messages, **greedy, **sampling, **self.extra_body}
        return json.dumps(request).encode()

    async def _request(self, session: Session, path: str, body: bytes | None, read: Callable[[Any], T]) -> T:
        """What `read` makes of the server's answer, with retries; raises `Failed` or JudgeError."""
        late = f"no answer in {self.deadline:g} s"
        for attempt in range(self.retries + 1):
            async with session.slots:
                if (rest := self._closed_until - time.monotonic()) > 0:
                    raise Failed(
                        f"{self.url} failed {self._failures} requests in a row and is left alone for {rest:.0f} s; "
                        f"last: {self._last}",
                        passing=False,
                    )
                if (left := session.end - time.monotonic()) <= 0:
                    raise Failed(late, passing=False)
                try:
                    patience = min(self.timeout, left)  # for the whole request; httpx's is for each of its parts
                    answer = await asyncio.wait_for(fetch(session.http, self.url, path, patience + 1, body), patience)
                    found = read(answer)
                    self._failures = 0
                    return found
                except asyncio.TimeoutError:
                    if left < self.timeout:  # the call's own end: it says nothing of the server
                        raise Failed(late, passing=False) from None
                    failure = Failed(f"{self.url}: no answer in {self.timeout:g} s", passing=True)
                except Failed as error:
                    failure = error
            if failure.status in WRONG:
                said = WRONG[failure.status].format(env=self.key_env)
                raise JudgeError(self.clean(f"{failure} ({path}). {said[0].upper()}{said[1:]}.")) from None
            if not (failure.passing or failure.status == 408 or failure.status >= 500):
                raise failure
            pause = min(PAUSE * 2**attempt, 8.0) * (1 + self._random.random() / 2)
            pause = max(pause, failure.after * (1 + self._random.random() / 10))
            if attempt == self.retries:
                break
            if pause >= session.end - time.monotonic():
                raise Failed(f"{late}; last: {failure}", passing=False)
            await asyncio.sleep(pause)
        if failure.status != 429:
            self._failures, self._last = self._failures + 1, str(failure)
            if self._failures >= self.trip_after:
                self._closed_until = time.monotonic() + self.rest
        raise failure

    def _only_model(self, answer: Any) -> str:
        try:
            found = [str(model["id"]) for model in answer["data"]]
        except (TypeError, KeyError):
            raise Failed(f"{self.url}/models is not a list of models: {str(answer)[:100]}", passing=False) from None
        if len(found) != 1:
            raise JudgeError(
                f"{self.url} serves {len(found)} models ({', '.join(found[:8])}); name one: URL#MODEL, or model="
            )
        return found[0]


def read_reply(answer: Any) -> Reply:
    """A chat completion's first choice; raises `Failed` when it is not one."""
    broken = Failed(f"the answer is not a chat completion: {str(answer)[:200]}", passing=False)
    try:
        choice = answer["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        raise broken from None
    if text is not None and not isinstance(text, str):
        raise broken
    return Reply(text or "", _top(choice.get("logprobs")), finish == "length")


def _top(logprobs: Any) -> dict[str, float] | None:
    """token -> probability of the first position; None where the server gave none."""
    try:
        entries = logprobs["content"][0]["top_logprobs"]
    except (TypeError, KeyError, IndexError):
        return None
    if not isinstance(entries, list) or not entries:
        return None
    found: dict[str, float] = {}
    for entry in entries:
        token, value = (entry.get("token"), entry.get("logprob")) if isinstance(entry, dict) else (None, None)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(token, str) or not number or not value <= 1e-3:  # NaN is not
            raise Failed(f"a log-probability of the answer is broken: {str(entry)[:100]}", passing=False)
        found.setdefault(token, math.exp(min(value, 0.0)) if value > -700 else 0.0)
    return found

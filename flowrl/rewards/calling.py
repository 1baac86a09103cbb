"""Where rewards that wait for servers are called: on one event loop, or in threads, beside the caller."""

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
BLOCKING = 64  # calls of blocking rewards at once; they wait for servers, so the cores do not matter


class _Runner(NamedTuple):
    """One loop for all asynchronous rewards: it works beside a loop of the caller's, and HTTP clients that belong to a
    loop survive from step to step. Blocking rewards have threads of their own: the loop's own encode PNGs."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    blocking: ThreadPoolExecutor


_runners: dict[int, _Runner] = {}  # by process: after a fork the parent's threads are not there
_lock = threading.Lock()


def _runner() -> _Runner:
    with _lock:
        if os.getpid() not in _runners:
            _runners[os.getpid()] = _start()
        return _runners[os.getpid()]


def _start() -> _Runner:
    loop = asyncio.new_event_loop()

    def serve() -> None:
        with torch.no_grad():  # grad mode is per thread
            while True:
                with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a reward: its caller gets it
                    loop.run_forever()

    thread = threading.Thread(target=serve, name="flowrl-rewards", daemon=True)
    thread.start()
    return _Runner(loop, thread, ThreadPoolExecutor(BLOCKING, thread_name_prefix="flowrl-blocking"))


def submit(awaitable: Awaitable) -> Future:
    """Run it on the loop; raises RuntimeError when called from there."""

    async def run():
        return await awaitable

    runner = _runner()
    if threading.current_thread() is runner.thread:  # waiting for ourselves would never end
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError("an async reward cannot call a RewardSet with async rewards; await the inner reward")
    return asyncio.run_coroutine_threadsafe(run(), runner.loop)


def is_async(reward: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def in_thread(reward: Callable[..., Any]) -> Callable[..., Awaitable]:
    """A blocking reward as an async one."""

    def call(*args, **columns):
        with torch.no_grad():  # grad mode is per thread
            return reward(*args, **columns)

    async def ask(*args, **columns):
        blocking = _runner().blocking
        return await asyncio.get_running_loop().run_in_executor(blocking, functools.partial(call, *args, **columns))

    return ask


async def after(futures: Sequence[Future], then: Callable[[], T]) -> T:
    """`then()`, when the futures are done, well or badly; cancels them when it is cancelled."""
    await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    with torch.enable_grad():  # the loop's thread has it off, and some parts may have been computed with it
        return then()


def when_all(answers: Sequence[Any], then: Callable[[list], T]) -> T | Awaitable[T]:
    """`then(answers)`, or an awaitable of it where some answers are awaitables; these run together."""
    if not any(map(inspect.isawaitable, answers)):
        return then(list(answers))

    async def later() -> T:
        come = iter(await together(filter(inspect.isawaitable, answers)))
        with torch.enable_grad():  # as in `after`
            return then([next(come) if inspect.isawaitable(answer) else answer for answer in answers])

    return later()


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """The results of what is run at once; when one raises, the others are ended first."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Future]) -> None:
    """End tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

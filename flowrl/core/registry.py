"""Links of the hooks, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

HOOKS = (
    "group_key",  # (batch) -> int64 [B]
    "reward_shape",  # chain: (reward, batch, state, cfg) -> [B] | [B,K]
    "advantage",  # chain: (x, reward, batch, state, cfg) -> Tensor | AdvOut; first link: x = reward
    "credit",  # chain: (adv_tok, adv, batch, state, cfg) -> [B,T]; adv_tok is None for the first link
    "log_ratio",  # (batch, cfg) -> [B,T]
    "bounds",  # (log_ratio, adv_tok, batch, cfg) -> (lo, hi): floats or broadcastable tensors
    "surrogate",  # (log_ratio, adv_tok, (lo, hi), batch, cfg) -> [B,T], to be minimised
    "correction",  # chain: (log_ratio, adv_tok, batch, state, cfg) -> Correction
    "kl",  # (batch, cfg) -> [B,T]
    "aggregate",  # (tok_loss, num_mask, den_mask, adv_tok, batch, cfg) -> scalar, linear in tok_loss
    "aux",  # list of (coef, name): (batch, adv_tok, pg_value, state, cfg) -> scalar
    "on_step",  # (state, stats, cfg) -> None
    "sampler",  # (prompts, state, cfg, services) -> generator, see allocation.py
)


@dataclass(frozen=True)
class Link:
    """A registered function: its hook, the batch data it needs, its place in a chain, its cfg defaults."""

    hook: str
    name: str
    fn: Callable[..., Any]
    needs: tuple[str, ...] = ()
    first: bool | None = None
    defaults: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


_LINKS: dict[str, dict[str, Link]] = {hook: {} for hook in HOOKS}


def suggest(word: str, known: Iterable[str]) -> str:
    """A sentence to end an error about an unknown name: the closest known one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}."


def register(
    hook: str, name: str, needs: Iterable[str] = (), *, first: bool | None = None, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a function available to presets as link `name` of `hook`.

    needs: names of `Batch` fields or `Batch.extra` entries that must be there. first: True = must open its
    chain (an estimator), False = must follow another link. defaults: the cfg keys that the function reads.
    Raises ValueError on an unknown hook or a name that is taken.
    """
    if hook not in _LINKS:
        raise ValueError(f"unknown hook {hook!r}. {suggest(hook, HOOKS)}")
    if name in _LINKS[hook]:
        raise ValueError(f"{hook} link {name!r} is registered already")

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        _LINKS[hook][name] = Link(hook, name, fn, tuple(needs), first, defaults)
        return fn

    return add


def lookup(hook: str, name: str) -> Link:
    """The link `name` of `hook`. Raises ValueError with the closest name when there is none."""
    if hook not in _LINKS:
        raise ValueError(f"unknown hook {hook!r}. {suggest(hook, HOOKS)}")
    if name not in _LINKS[hook]:
        raise ValueError(f"unknown {hook} link {name!r}. {suggest(name, _LINKS[hook])}")
    return _LINKS[hook][name]

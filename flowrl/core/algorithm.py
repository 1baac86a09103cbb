"""Composition of the hooks: the same lines for every preset."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .allocation import Sampler
from .batch import AdvOut, Batch, State, Totals, compute_dtype
from .corrections import combine
from .presets import PRESETS, Preset
from .registry import HOOKS, Link, lookup, suggest

CORE_CFG = {"beta": 0.0, "pg_coef": 1.0}
ON_ADVANTAGES = HOOKS[:4]
ON_LOSS = HOOKS[4:11]
MAX_LOG_RATIO = 20.0


class Algorithm:
    """A preset with its settings: advantages of a batch of rewards, loss of a batch of log-probs.

        L = pg_coef * aggregate( w surrogate(log_ratio, A) + beta kl ) + sum_k c_k aux_k

    preset: name in `PRESETS` or a `Preset`. cfg: settings of the links in use (see `algorithm.cfg`), `beta`
    (weight of the KL, 0 skips it) and `pg_coef`. Raises ValueError on an unknown preset, link or key (with a
    suggestion), on a chain in the wrong order, and when two links declare one key with different defaults and
    the preset sets none.
    """

    def __init__(self, preset: str | Preset, **cfg: Any) -> None:
        if isinstance(preset, str):
            if preset not in PRESETS:
                raise ValueError(f"unknown preset {preset!r}. {suggest(preset, PRESETS)}")
            preset = PRESETS[preset]
        self.preset = preset
        self.links = {hook: _chain(preset, hook) for hook in HOOKS}
        self.cfg = SimpleNamespace(**_settings(self.links, preset, cfg))
        self.state: State = {}

    @property
    def needs(self) -> frozenset[str]:
        """Names of `Batch` fields and `extra` entries that the preset reads; checked on every batch."""
        return frozenset(self.preset.needs).union(*(link.needs for link in self._active(HOOKS)))

    @property
    def beta(self) -> float:
        """Weight of the KL now: what a controller set, else cfg.beta."""
        return self.state.get("beta", self.cfg.beta)

    @torch.no_grad()
    def advantages(self, batch: Batch) -> AdvOut:
        """Advantage of every unit, once per rollout, on the full batch gathered over ranks (whole groups).

        Returns adv [B,T], detached, 0 outside the loss, float32 (float64 if the rewards are), and keep [B]
        bool, the rows in the loss. Log-probs are not needed unless a link reads them. Raises ValueError when
        a valid row has a reward that is not finite or a link misses its data.
        """
        cfg, state = self.cfg, self.state
        finite = torch.isfinite(batch.reward)
        bad = ~(finite if finite.dim() == 1 else finite.all(1)) & batch.valid_rows
        if bad.any():
            raise ValueError(f"rewards of valid rows {bad.nonzero().flatten().tolist()} are not finite")
        _require(batch, self._active(ON_ADVANTAGES))
        statistics = (batch.mask != 0) & batch.valid_rows[:, None]
        batch = batch.clean(statistics, compute_dtype(batch.reward))
        batch = replace(batch, group_id=self._only("group_key")(batch))

        reward = batch.reward
        for link in self.links["reward_shape"]:
            reward = link(reward, batch, state, cfg)
        adv, keep = reward, batch.loss_rows
        for link in self.links["advantage"]:
            out = link(adv, reward, batch, state, cfg)
            adv = out.adv if isinstance(out, AdvOut) else out
            if isinstance(out, AdvOut) and out.keep is not None:
                keep = keep & out.keep.bool()
        adv_tok = None
        for link in self.links["credit"]:
            adv_tok = link(adv_tok, adv, batch, state, cfg)
        if adv_tok is None or adv_tok.shape != batch.mask.shape:
            raise ValueError(f"the credit chain must end in [B,T] = {tuple(batch.mask.shape)}")
        return AdvOut(torch.where(statistics & keep[:, None], adv_tok, 0), keep)

    def loss(self, batch: Batch, adv: AdvOut | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch, a scalar with gradient, and detached metrics.

        adv: result of `advantages`, cut like the batch (`AdvOut.slice`), or its tensor [B,T]. With
        `batch.totals` given, losses and metrics add up over the micro-batches and ranks of one update to
        those of the full batch; nothing is left to divide. Metrics that add up: loss, pg_loss, kl (before
        beta), kl_loss (beta kl), one aux/NAME per term (before its coefficient), clip_frac_high and
        clip_frac_low (share of ratios beyond the bounds), drop_frac (share of units whose surrogate
        a correction drops), approx_kl = 0.5 mean (log ratio)^2, ratio_mean, ratio_square_mean, divergence (mean, where
        `extra` has it).
        Exceptions: ratio_min, ratio_max and log_ratio_max (largest |log ratio| before the clamp) are
        extremes; lr_scale multiplies the learning rate of this update. Raises ValueError when a link misses
        its data, or a correction wants to renormalise a partial batch.
        """
        cfg, state = self.cfg, self.state
        adv = adv if isinstance(adv, AdvOut) else AdvOut(adv)
        _require(batch, self._active(ON_LOSS), self.preset.needs)
        if adv.adv.shape != batch.mask.shape:
            raise ValueError(f"advantages are {tuple(adv.adv.shape)}, the batch is {tuple(batch.mask.shape)}")
        if adv.keep is not None:
            batch = replace(batch, in_loss=adv.keep if batch.in_loss is None else batch.in_loss & adv.keep)
        mask = batch.loss_mask
        dtype = compute_dtype(batch.mask if batch.logp is None else batch.logp)
        batch = batch.clean(mask, dtype)
        batch = replace(batch, group_id=self._only("group_key")(batch))
        adv_tok = torch.where(mask, adv.adv.detach().to(dtype), 0)

        raw = self._only("log_ratio")(batch, cfg)
        log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moved = log_ratio.detach()
        fix = combine(link(moved, adv_tok, batch, state, cfg) for link in self.links["correction"])
        bounds = self._only("bounds")(moved, adv_tok, batch, cfg)
        token_loss = self._only("surrogate")(log_ratio, adv_tok, bounds, batch, cfg)
        if fix.weight is not None:
            token_loss = token_loss * fix.weight
        kept = mask if fix.keep is None else mask & fix.keep.bool()
        if fix.renorm and batch.totals is not None:
            raise ValueError("a correction with renorm counts kept units: it needs the whole update at once")
        counted = kept if fix.renorm else mask

        def aggregate(x: Tensor) -> Tensor:
            return self._only("aggregate")(x, kept, counted, adv_tok, batch, cfg)

        pg_loss = aggregate(token_loss)
        kl = aggregate(self._only("kl")(batch, cfg)) if self.beta else torch.zeros_like(pg_loss)
        loss = cfg.pg_coef * (pg_loss + self.beta * kl)
        metrics = {"pg_loss": pg_loss, "kl": kl, "kl_loss": self.beta * kl}
        for (coef, name), link in zip(self.preset.aux, self.links["aux"], strict=True):
            metrics[f"aux/{name}"] = link(batch, adv_tok, pg_loss.detach(), state, cfg)
            loss = loss + coef * metrics[f"aux/{name}"]
        metrics |= {"loss": loss, "lr_scale": torch.tensor(fix.lr_scale)}
        metrics |= _ratio_metrics(raw, bounds, mask, batch)
        if self.links["correction"]:
            acting = kept if fix.weight is None else kept & (fix.weight != 0)
            metrics["drop_frac"] = (mask & ~acting).sum() / max((batch.totals or Totals.of(mask)).tokens, 1)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def on_step(self, stats: Mapping[str, Any]) -> None:
        """Let the controller read the metrics of a finished update and write `state`."""
        self._only("on_step")(self.state, stats, self.cfg)

    def sampler(self, prompts: Sequence[Any], services: Any = None) -> Sampler:
        """The generator of requests for these prompts, see `allocation.run_sampler`."""
        return self._only("sampler")(prompts, self.state, self.cfg, services)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the preset's name and a copy of the hooks' state."""
        return {"preset": self.preset.name, "state": copy.deepcopy(self.state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back `state_dict`. Raises ValueError on a partial one or one of another preset."""
        if set(saved) != {"preset", "state"}:
            raise ValueError(f"expected the keys 'preset' and 'state', got {sorted(saved)}")
        if saved["preset"] != self.preset.name:
            raise ValueError(f"state of preset {saved['preset']!r} does not fit preset {self.preset.name!r}")
        self.state = copy.deepcopy(saved["state"])

    def _only(self, hook: str) -> Link:
        return self.links[hook][0]

    def _active(self, hooks: Sequence[str]) -> list[Link]:
        return [link for hook in hooks if hook != "kl" or self.beta for link in self.links[hook]]


def _require(batch: Batch, links: Sequence[Link], needs: Sequence[str] = ()) -> None:
    wanted = [(name, f"{link.hook} link {link.name!r}") for link in links for name in link.needs]
    for name, who in wanted + [(name, "the preset") for name in needs]:
        if not batch.has(name):
            raise ValueError(f"{who} needs {name!r}, which the batch does not have")


def _chain(preset: Preset, hook: str) -> list[Link]:
    """The links that `preset` names for `hook`, in order."""
    value = getattr(preset, hook)
    if hook == "aux":
        value = [name for _, name in value]
    names = [value] if isinstance(value, str) else list(value)
    links = [lookup(hook, name) for name in names]
    if hook in ("advantage", "credit") and not links:
        raise ValueError(f"preset {preset.name!r} has no {hook} link")
    for i, link in enumerate(links):
        if link.first is not None and link.first != (i == 0):
            rule = "must come first" if link.first else "must follow an estimator"
            raise ValueError(f"{hook} link {link.name!r} {rule}, preset {preset.name!r} has {names}")
    return links


def _settings(links: Mapping[str, list[Link]], preset: Preset, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the core and of all links, overridden by the preset, then by the user."""
    known = dict(CORE_CFG)
    for link in (link for chain in links.values() for link in chain):
        for key, value in link.defaults.items():
            if known.setdefault(key, value) != value and key not in {*preset.cfg, *cfg}:
                raise ValueError(f"two links have different defaults for {key!r}: set it in the preset's cfg")
    for key in (*preset.cfg, *cfg):
        if key not in known:
            raise ValueError(f"unknown setting {key!r} for preset {preset.name!r}. {suggest(key, known)}")
    return {**known, **preset.cfg, **cfg}


@torch.no_grad()
def _ratio_metrics(raw: Tensor, bounds: tuple[Any, Any], mask: Tensor, batch: Batch) -> dict[str, Tensor]:
    """How far the policy moved; sums over units are divided by the units of the whole update."""
    tokens = max((batch.totals or Totals.of(mask)).tokens, 1)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    lo, hi = bounds

    def share(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0).sum() / tokens

    divergence = batch.extra.get("divergence")
    moved = {} if divergence is None else {"divergence": share(divergence.to(ratio))}
    return moved | {
        "clip_frac_high": share((ratio > 1 + hi).to(ratio)),
        "clip_frac_low": share((ratio < 1 - lo).to(ratio)),
        "approx_kl": 0.5 * share(log_ratio**2),
        "ratio_mean": share(ratio),
        "ratio_square_mean": share(ratio**2),
        "ratio_min": torch.where(mask, ratio, torch.inf).min(),
        "ratio_max": torch.where(mask, ratio, -torch.inf).max(),
        "log_ratio_max": torch.where(mask, raw.abs(), 0).max(),
    }

"""A float64 policy small enough to write out, and micro-batches cut from a rollout as the trainer does."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from flowrl.core import Batch
from flowrl.objectives import Micro
from flowrl.policy import Transition
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers import Explicit, FlowSDE

GRID = (1.0, 0.8, 0.55, 0.25, 0.0)
REWARDS = (1.0, 2.0, 5.0, 0.0, 0.3, 0.9)


class LinearPolicy:
    """v(x, sigma) = w x + b sigma, elementwise, in float64. Follows the protocol as far as objectives use it."""

    def __init__(self, size: int = 5) -> None:
        self.module = nn.ParameterDict(
            {
                "w": nn.Parameter(torch.linspace(-0.4, 0.6, size, dtype=torch.float64)),
                "b": nn.Parameter(torch.linspace(0.3, -0.2, size, dtype=torch.float64)),
            }
        )
        self.weights = {name: self._values() for name in ("reference", "old")}
        self.used: list[str] = []

    def _values(self):
        return {n: p.detach().clone() for n, p in self.module.items()}

    def trainable(self):
        return dict(self.module.items())

    def move(self, scale: float = 0.1, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.module.values():
                p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        return self

    def velocity(self, x, sigma, rollout):
        sigma = sigma.double().expand(len(x))[:, None]
        return self.module["w"] * x.double() + self.module["b"] * sigma

    def evaluate(self, rollout, unit, sampler):
        start, end = rollout.interval(unit)
        x = rollout.states[:, unit]
        v = self.velocity(x, rollout.sigmas[start], rollout)
        distribution = sampler.transition(x, v, rollout.sigmas, start, end=end)
        return Transition(distribution, sampler.log_prob(distribution, rollout.actions[:, unit]), v)

    @contextmanager
    def use(self, weights):
        self.used.append(weights)
        live = self._values()
        self._load(self.weights[weights])
        try:
            yield
        finally:
            self._load(live)

    def equals(self, weights):
        return all(torch.equal(p, self.weights[weights][n]) for n, p in self.module.items())

    @torch.no_grad()
    def _load(self, values):
        for n, p in self.module.items():
            p.data = values[n].clone()  # not in place: a graph of the live weights stays usable


@pytest.fixture
def linear():
    return LinearPolicy()


@pytest.fixture(scope="session")
def linear_rollout():
    """(policy, sampler, groups, size, spread): a rollout under the policy's present weights, float64.

    `spread` scatters the behaviour log-probs, so that the ratios are not one.
    """

    def make(policy, sampler=None, groups=2, size=3, spread=0.0, seed=0):
        sampler = sampler or FlowSDE(steps=len(GRID) - 1, schedule=Explicit(GRID))
        sigmas = sampler.sigmas()
        plan = sampler.plan.draw(0, 0, sampler.steps, sampler.feasible(sigmas).tolist())
        generator = torch.Generator().manual_seed(seed)
        rows, d = groups * size, len(policy.module["w"])

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x, states, actions, means, log_prob = draw(rows, d), [], [], [], []
        with torch.no_grad():
            for i in range(sampler.steps):
                v = policy.velocity(x, sigmas[i], None)
                distribution = sampler.transition(x, v, sigmas, i, plan.stochastic[i])
                action = distribution.sample(draw(rows, d))
                if plan.trained[i]:
                    std = distribution.std
                    states.append(x)
                    actions.append(action)
                    means.append(distribution.mean)
                    log_prob.append(Normal(distribution.mean, std).log_prob(action).mean(1))
                x = action
        stack = lambda xs: torch.stack(xs, 1) if xs else torch.zeros(rows, 0, d)  # noqa: E731
        lp = torch.stack(log_prob, 1) if log_prob else torch.zeros(rows, 0)
        return Rollout(
            prompts=[Prompt(10 + 3 * g, f"prompt {g}") for g in range(groups) for _ in range(size)],
            members=list(range(size)) * groups,
            iteration=1,
            seed=4,
            plans=[plan] * rows,
            sigmas=sigmas,
            guidance_scale=1.0,
            calls={},
            shared={},
            latents=x,
            states=stack(states),
            actions=stack(actions),
            means=stack(means),
            log_prob=lp + spread * draw(*lp.shape),
        )

    return make


@pytest.fixture(scope="session")
def table():
    """(objective, rollout, rewards, valid) -> (batch, advantages) of the whole update, as the trainer builds them."""

    def make(objective, rollout, rewards=REWARDS, valid=None):
        columns = objective.columns(rollout)
        rewards = torch.as_tensor(rewards, dtype=torch.float64)[: len(rollout)]
        batch = Batch(
            mask=torch.ones(len(rollout), columns, dtype=torch.bool),
            reward=rewards,
            group_id=rollout.group_id,
            valid=None if valid is None else torch.tensor(valid),
        )
        return batch, objective.advantages(batch)

    return make


@pytest.fixture(scope="session")
def micros():
    """(rollout, batch, advantages, size, order) -> all micro-batches of an update: `size` rows by one column each."""

    def cut(rollout, batch, advantage, size=None, order=None):
        order = list(range(len(rollout)) if order is None else order)
        size = size or len(order)
        whole = batch.slice(keep=advantage.keep)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            where = torch.tensor(rows)
            for unit in range(batch.mask.shape[1]):
                cut_batch = whole.slice(where, [unit])
                yield Micro(rollout.rows(rows), unit, cut_batch, advantage.slice(where, [unit]))

    return cut


@pytest.fixture(scope="session")
def total():
    """(objective, policy, sampler, micro-batches) -> (loss, {name: gradient}, metrics) summed over them."""

    def add(objective, policy, sampler, parts):
        named = policy.trainable()
        loss, grads, metrics = 0.0, {n: torch.zeros_like(p) for n, p in named.items()}, {}
        for micro in parts:
            value, stats = objective.loss(policy, sampler, micro)
            loss += value.item()
            for k, v in stats.items():
                metrics[k] = metrics.get(k, 0.0) + v.item()
            if value.requires_grad:
                found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
                for n, g in zip(named, found, strict=True):
                    if g is not None:
                        grads[n] += g
        return loss, grads, metrics

    return add


@pytest.fixture(scope="session")
def update(table, micros, total):
    """(objective, policy, rollout, sampler, ...) -> (loss, gradients, metrics) of one whole update."""

    def run(objective, policy, rollout, sampler, rewards=REWARDS, valid=None, size=None, order=None):
        batch, advantage = table(objective, rollout, rewards, valid)
        return total(objective, policy, sampler, micros(rollout, batch, advantage, size, order))

    return run


@pytest.fixture(scope="session")
def close():
    """Two {name: gradient} agree."""

    def check(one, other, rtol=1e-10, atol=1e-12):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")

    return check


@pytest.fixture
def sde():
    return FlowSDE(steps=len(GRID) - 1, schedule=Explicit(GRID))


@pytest.fixture(scope="session")
def shift_log_prob():
    """A rollout whose recorded log-probs are lower by `amount`: the log-ratio on-policy becomes `amount`."""
    return lambda rollout, amount: replace(rollout, log_prob=rollout.log_prob - amount)

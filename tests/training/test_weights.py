"""Copies of the weights: bit-exact swaps, loud misuse, the formula of the averages."""

import pytest
import torch
from torch import nn

from flowrl.training.weights import WeightCopies, ema_decay


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def snapshot(net):
    return [p.detach().clone() for p in net.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def shift(net, by=0.1):
    with torch.no_grad():
        for p in net.parameters():
            p.add_(by)


@pytest.fixture
def copies(net):
    made = WeightCopies(dict(net.named_parameters()), ("old",))
    shift(net)
    return made


def test_a_swap_shows_the_copy_and_restores_every_bit(net, copies):
    live, storage = snapshot(net), [p.data_ptr() for p in net.parameters()]
    with copies.swapped("old"):
        inside = snapshot(net)
    assert not same(inside, live)
    assert same(snapshot(net), live)
    # In place: DDP and the optimizer hold these very tensors.
    assert [p.data_ptr() for p in net.parameters()] == storage
    assert all(p.requires_grad for p in net.parameters())


def test_a_copy_is_the_policy_until_one_of_them_moves(net, copies):
    assert not copies.is_policy("old") and not copies.is_policy("nothing")
    copies.capture("old")
    assert copies.is_policy("old")
    with copies.swapped("old"):
        assert not copies.is_policy("old")  # the policy is out of sight: nothing is said of it
    assert copies.is_policy("old")
    with torch.no_grad():
        net[2].bias[1] += 1e-6
    assert not copies.is_policy("old")
    copies.blend("old", 0.0)
    assert copies.is_policy("old")
    copies._sharded = [net]  # other processes hold other shards
    assert not copies.is_policy("old")


def test_awkward_bits_survive(net, copies):
    with torch.no_grad():
        first = next(net.parameters())
        first[0, :3] = torch.tensor([-0.0, 1e-45, 3e38])
    live = [p.view(torch.int32) for p in snapshot(net)]
    with copies.swapped("old"):
        pass
    assert same([p.detach().view(torch.int32) for p in net.parameters()], live)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_restores_and_leaves_the_copies_usable(net, copies, error):
    live = snapshot(net)
    with pytest.raises(error), copies.swapped("old"):
        raise error
    assert same(snapshot(net), live)
    with copies.swapped("old"):
        pass
    assert same(snapshot(net), live)


def test_what_happens_inside_changes_neither_the_copy_nor_the_policy(net, copies):
    live = snapshot(net)
    with copies.swapped("old"):
        old = snapshot(net)
        shift(net, 7.0)
    assert same(snapshot(net), live)
    with copies.swapped("old"):
        assert same(snapshot(net), old)


def test_nesting_raises_and_restores(net, copies):
    copies.capture("ema")
    live = snapshot(net)
    with pytest.raises(RuntimeError, match="nested"), copies.swapped("old"), copies.swapped("ema"):
        pass
    assert same(snapshot(net), live)


def test_an_unknown_copy_is_named_together_with_those_that_exist(net, copies):
    with pytest.raises(KeyError, match=r"'ema'.*old"), copies.swapped("ema"):
        pass
    assert "old" in copies and "ema" not in copies and copies.names == ("old",)


def test_backward_inside_a_swap_of_a_graph_from_before_raises(net, copies):
    loss = net(torch.ones(4, 3)).square().sum()
    live = snapshot(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), copies.swapped("old"):
        loss.backward()
    assert same(snapshot(net), live)


def test_backward_after_a_swap_of_a_graph_from_before_raises(net, copies):
    loss = net(torch.ones(4, 3)).square().sum()
    with copies.swapped("old"):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("peft", [True, None])
def test_backward_across_a_swap_raises_on_a_real_pipeline(make_sd3_policy, perturb, make_rows, give_copies, peft):
    from flowrl import FlowSDE

    policy = perturb(make_sd3_policy(peft))
    give_copies(policy, "old")
    rollout = policy.sample(*make_rows(1, 2), FlowSDE(steps=3), seed=0, iteration=0, batch_size=2)
    before = policy.evaluate(rollout, 0, FlowSDE(steps=3)).log_prob.sum()
    with policy.use("old"):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    # The right order goes through and reaches every trained weight.
    policy.evaluate(rollout, 0, FlowSDE(steps=3)).log_prob.sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())


def test_capture_copies_and_does_not_alias(net, copies):
    copies.capture("ema")
    at_capture = snapshot(net)
    shift(net)
    with copies.swapped("ema"):
        assert same(snapshot(net), at_capture)


def test_capture_writes_an_existing_copy_in_place(net, copies):
    tensors = [id(t) for t in copies._copies["old"]]
    copies.capture("old")
    assert [id(t) for t in copies._copies["old"]] == tensors
    with copies.swapped("old"):
        inside = snapshot(net)
    assert same(inside, snapshot(net))


def test_blend_with_decay_zero_is_bit_equal_to_the_policy(net, copies):
    live = snapshot(net)
    copies.blend("old", 0.0)
    with copies.swapped("old"):
        assert same(snapshot(net), live)


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.999])
def test_blend_follows_its_formula_in_float64(decay):
    torch.manual_seed(1)
    w = nn.Parameter(torch.randn(50, dtype=torch.float64))
    copies = WeightCopies({"w": w}, ("ema",))
    expected = w.detach().clone()
    for _ in range(5):
        with torch.no_grad():
            w.copy_(torch.randn(50, dtype=torch.float64))
        copies.blend("ema", decay)
        expected = decay * expected + (1 - decay) * w.detach()
    with copies.swapped("ema"):
        torch.testing.assert_close(w.detach(), expected, rtol=0, atol=1e-14)


def test_blending_equal_weights_changes_nothing(net):
    copies = WeightCopies(dict(net.named_parameters()), ("ema",))
    live = snapshot(net)
    for _ in range(20):
        copies.blend("ema", 0.9)
    with copies.swapped("ema"):
        assert same(snapshot(net), live)


def test_decay_of_the_average():
    """The released warm-up: a tenth of the past at first, the cap once (1 + n) / (10 + n) passes it."""
    assert ema_decay(0, 0.9) == 0.1
    assert ema_decay(1, 0.9) == 2 / 11
    assert ema_decay(79, 0.9) < 0.9
    assert ema_decay(80, 0.9) == 0.9
    assert ema_decay(90, 0.9) == 0.9
    assert ema_decay(90, 0.999) == 0.91
    values = [ema_decay(n, 0.9) for n in range(200)]
    assert values == sorted(values)

from dataclasses import fields, replace

import pytest
import torch

from flowrl.core import PRESETS, AdvOut, Algorithm, Batch, Totals, registry

from .tables import B, T, table

ADDITIVE = (
    *("loss", "pg_loss", "kl", "kl_loss", "clip_frac_high", "clip_frac_low", "approx_kl"),
    *("ratio_mean", "ratio_square_mean"),
)
INVALID = torch.tensor([True, True, True, True, True, True, False, True])
BORROWED = torch.tensor([True, False, True, True, True, True, True, True])


def run(algorithm, batch, adv=None):
    """Loss, gradient with respect to logp, metrics."""
    adv = algorithm.advantages(batch) if adv is None else adv
    loss, metrics = algorithm.loss(batch, adv)
    return loss.detach(), torch.autograd.grad(loss, batch.logp)[0], metrics


@pytest.fixture(params=PRESETS)
def algorithm(request):
    return Algorithm(request.param, beta=0.2)


def rich(**fields):
    return table(spread=0.3, valid=INVALID, in_loss=BORROWED, **fields)


def test_advantages_are_detached_and_shaped_like_the_mask(algorithm):
    batch = rich()
    out = algorithm.advantages(batch)
    assert out.adv.shape == (B, T)
    assert out.adv.dtype == torch.float64
    assert not out.adv.requires_grad
    assert torch.equal(out.keep, INVALID & BORROWED)
    assert (out.adv[~batch.loss_mask] == 0).all()
    bare = Batch(mask=torch.ones(B, 3), reward=batch.reward.half(), group_id=batch.group_id, valid=INVALID)
    bare.extra = {"std": torch.ones(B, 3), "length": torch.ones(B, 3)}  # log-probs are not needed
    out32 = algorithm.advantages(bare)
    assert out32.adv.dtype == torch.float32
    expected = algorithm.advantages(replace(bare, reward=batch.reward)).adv.float()
    torch.testing.assert_close(out32.adv, expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_of_another_precision_give_the_same_advantages(algorithm, dtype):
    rewards = (torch.arange(B) ** 2 % 7).to(torch.float16) / 8  # exact in half precision
    expected = algorithm.advantages(table(reward=rewards)).adv
    out = algorithm.advantages(table(reward=rewards.to(dtype))).adv
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=0)


def test_the_loss_is_float32_whatever_comes_in(algorithm):
    batch = rich()
    expected, _, _ = run(algorithm, batch)
    half = replace(
        batch,
        **{
            f.name: getattr(batch, f.name).detach().bfloat16()
            for f in fields(batch)
            if isinstance(getattr(batch, f.name), torch.Tensor) and getattr(batch, f.name).is_floating_point()
        },
    )
    loss, metrics = algorithm.loss(half, algorithm.advantages(half))
    assert loss.dtype == metrics["ratio_max"].dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, atol=0.1, rtol=0.1)


def test_invalid_rows_leave_everything(algorithm):
    batch = rich()
    hurt = replace(batch, reward=torch.where(INVALID, batch.reward, torch.nan))
    for name in ("logp", "old_logp", "ref_logp", "token_kl"):
        spoiled = torch.where(INVALID[:, None], getattr(batch, name).detach(), torch.nan)
        hurt = replace(hurt, **{name: spoiled.requires_grad_(name == "logp")})
    loss, gradient, metrics = run(algorithm, hurt)
    rows = INVALID.nonzero().squeeze(1)
    small = replace(batch.slice(rows), totals=None)
    small.logp = small.logp.detach().requires_grad_()
    expected, expected_gradient, expected_metrics = run(algorithm, small)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[rows], expected_gradient)
    torch.testing.assert_close(metrics, expected_metrics)
    assert (gradient[~INVALID] == 0).all()


def test_borrowed_rows_count_in_the_statistics_only(algorithm):
    batch = table(spread=0.3, in_loss=BORROWED)
    whole = algorithm.advantages(replace(batch, in_loss=None))
    out = algorithm.advantages(batch)
    torch.testing.assert_close(out.adv[BORROWED], whole.adv[BORROWED])
    _, gradient, _ = run(algorithm, batch)
    assert (gradient[~BORROWED] == 0).all()
    moved = replace(batch, reward=batch.reward + 0.5 * ~BORROWED)
    assert not torch.allclose(algorithm.advantages(moved).adv, out.adv)


def test_rewards_of_valid_rows_must_be_finite(algorithm):
    reward = table().reward
    reward[2] = float("inf")
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        algorithm.advantages(table(reward=reward))


def test_groups_without_spread_give_exactly_zero(algorithm):
    for dtype in (torch.float32, torch.float64):
        batch = table(reward=torch.full((B,), 0.1, dtype=dtype))
        assert torch.equal(algorithm.advantages(batch).adv, torch.zeros(B, T, dtype=dtype))
    if algorithm.preset.advantage[0] == "beta_baseline":
        return  # compares with rewards of earlier batches, not with the group's
    batch = table(reward=torch.tensor([0.1] * 4 + [0.1, 0.2, 0.3, 0.4]))
    assert torch.equal(algorithm.advantages(batch).adv[:4], torch.zeros(4, T))


def test_permuting_rows_permutes_the_gradient(algorithm):
    batch = rich()
    order = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    other = replace(batch.slice(order), totals=None)
    other.logp = other.logp.detach().requires_grad_()
    loss, gradient, metrics = run(algorithm, batch)
    loss2, gradient2, metrics2 = run(algorithm, other)
    torch.testing.assert_close((loss, gradient[order], metrics), (loss2, gradient2, metrics2))


def test_relabelling_groups_changes_nothing(algorithm):
    batch = rich()
    other = replace(batch, group_id=torch.where(batch.group_id == 3, 2**50, 11))
    assert torch.equal(run(algorithm, batch)[1], run(algorithm, other)[1])


def test_padding_changes_nothing(algorithm):
    batch = rich()

    def pad(x, value):
        return torch.cat([x.detach(), torch.full((B, 3), value, dtype=x.dtype)], 1)

    values = {name: pad(getattr(batch, name), torch.nan) for name in ("old_logp", "ref_logp", "token_kl")}
    logp = pad(batch.logp, torch.nan).requires_grad_()
    extra = batch.extra | {name: pad(batch.extra[name], torch.nan) for name in ("divergence", "std", "length")}
    wide = replace(batch, mask=pad(batch.mask, False), logp=logp, behav_logp=None, extra=extra, **values)
    loss, gradient, metrics = run(algorithm, batch)
    loss2, gradient2, metrics2 = run(algorithm, wide)
    torch.testing.assert_close((loss, gradient, metrics), (loss2, gradient2[:, :T], metrics2))
    assert torch.equal(gradient2[:, T:], torch.zeros(B, 3, dtype=torch.float64))


def test_a_constant_added_to_the_rewards_changes_no_advantage(algorithm):
    batch = rich()
    out = algorithm.advantages(replace(batch, reward=batch.reward + 3))
    torch.testing.assert_close(out.adv, algorithm.advantages(batch).adv)


CUTS = {
    "rows": [(slice(0, 3), slice(None)), (slice(3, 8), slice(None))],
    "shuffled rows": [([6, 0, 5], slice(None)), (torch.tensor([1, 2, 3, 4, 7]), slice(None))],
    "columns": [(slice(None), slice(i, i + 1)) for i in range(T)],
    "both": [(rows, columns) for rows in (slice(0, 5), slice(5, 8)) for columns in ([0, 4], [1, 2, 3, 5])],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean", "seq_sum_const"])
@pytest.mark.parametrize("name", ["grpo", "flow_grpo"])
def test_losses_of_slices_add_up(cut, aggregate, name):
    preset = replace(PRESETS[name], aggregate=aggregate, correction=("tis",), aux=((0.3, "entropy"),))
    algorithm = Algorithm(preset, beta=0.2, clip_hi=0.1)
    batch = rich()
    adv = algorithm.advantages(batch)
    _, gradient, metrics = run(algorithm, batch, adv)
    parts = []
    for rows, columns in CUTS[cut]:
        part, part_metrics = algorithm.loss(batch.slice(rows, columns, adv.keep), adv.slice(rows, columns))
        part.backward()
        parts.append(part_metrics)
    torch.testing.assert_close(batch.logp.grad, gradient)
    for key in (*ADDITIVE, "aux/entropy"):
        torch.testing.assert_close(sum(part[key] for part in parts), metrics[key])
    for key, reduce in (("ratio_min", min), ("ratio_max", max), ("log_ratio_max", max)):
        torch.testing.assert_close(reduce(part[key] for part in parts), metrics[key])


def test_totals_of_two_ranks():
    algorithm, batch = Algorithm("grpo"), rich()
    adv = algorithm.advantages(batch)
    whole, _ = algorithm.loss(batch, adv)
    rows = torch.arange(B).split(3)
    counts = [Totals.of(batch.mask[r], adv.keep[r]) for r in rows]
    n, tokens = sum(c.rows for c in counts), sum(c.tokens for c in counts)
    total = 0
    for r, count in zip(rows, counts, strict=True):
        part = replace(batch.slice(r), totals=replace(count, rows=n, tokens=tokens))
        total = total + algorithm.loss(part, adv.slice(r))[0]
    torch.testing.assert_close(total, whole)


def test_gradcheck(algorithm):
    batch = table(spread=0.05)
    adv = algorithm.advantages(batch)

    def loss(logp, token_kl):
        return algorithm.loss(replace(batch, logp=logp, token_kl=token_kl), adv)[0]

    inputs = (batch.logp.detach().requires_grad_(), batch.token_kl.detach().requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-6)


def loss_at(name, key, value, **cfg):
    algorithm, batch = Algorithm(name, **(cfg | {key: value})), table(spread=0.5)
    return algorithm.loss(batch, algorithm.advantages(batch))[0].item()


@pytest.mark.parametrize(
    ("name", "key", "at", "cfg"),
    [
        ("grpo", "beta", 0.3, {}),
        ("flow_grpo", "beta", 0.3, {}),
        ("grpo", "pg_coef", 0.7, {"beta": 0.2}),
        ("grpo", "clip_lo", 0.2, {}),
        ("grpo", "clip_hi", 0.2, {}),
        ("grpo", "eps", 0.1, {}),
        ("flow_grpo", "eps", 0.1, {}),
        ("flow_grpo", "adv_clip_max", 0.5, {}),
        ("dr_grpo", "agg_const", 5.0, {}),
    ],
)
def test_every_coefficient_moves_the_loss_as_the_formula_says(name, key, at, cfg):
    h = 1e-5
    slope = (loss_at(name, key, at + h, **cfg) - loss_at(name, key, at - h, **cfg)) / (2 * h)
    algorithm, batch = Algorithm(name, **(cfg | {key: at})), table(spread=0.5)
    adv = algorithm.advantages(batch).adv
    loss, metrics = algorithm.loss(batch, adv)
    ratio = (batch.logp - batch.old_logp).exp().detach()
    share = batch.mask / batch.mask.sum(1, keepdim=True) / B
    if key == "beta":
        expected = metrics["kl"].item()
    elif key == "pg_coef":
        expected = loss.item() / at
    elif key == "clip_hi":  # -A (1 + hi) wherever A > 0 and the ratio is beyond
        expected = -(adv * share)[(adv > 0) & (ratio > 1 + at)].sum().item()
    elif key == "clip_lo":
        expected = (adv * share)[(adv < 0) & (ratio < 1 - at)].sum().item()
    elif key == "agg_const":
        expected = -loss.item() / at
    else:  # through the advantage: the loss is linear in each |A|
        per_unit = -torch.where(adv > 0, ratio.clamp(max=1 + algorithm.cfg.clip_hi), 0)
        per_unit -= torch.where(adv < 0, ratio.clamp(min=1 - algorithm.cfg.clip_lo), 0)
        d_adv = derivative_of_advantage(name, key, at, batch)
        expected = (per_unit * d_adv * share).sum().item()
    assert abs(expected) > 1e-4
    assert slope == pytest.approx(expected, rel=1e-4)


def derivative_of_advantage(name, key, at, batch):
    groups = batch.reward.reshape(2, 4)
    centred = groups - groups.mean(1, keepdim=True)
    std = groups.std(1, keepdim=True) if name == "grpo" else batch.reward.std(correction=0)
    if key == "eps":
        return (-centred / (std + at) ** 2).reshape(B, 1)
    raw = (centred / (std + 1e-4)).reshape(B, 1)
    return raw.sign() * (raw.abs() > at)


def test_no_hook_sees_or_leaves_a_graph_where_it_must_not():
    seen, given = {}, {}
    algorithm = Algorithm(replace(PRESETS["flow_grpo"], correction=("tis",)))

    def watch(link):
        def fn(*args):
            given[link.hook] = args
            seen[link.hook] = link.fn(*args)
            return seen[link.hook]

        return replace(link, fn=fn)

    algorithm.links = {hook: [watch(link) for link in links] for hook, links in algorithm.links.items()}
    batch = table()
    _, metrics = algorithm.loss(batch, algorithm.advantages(batch))
    assert set(seen) >= {"group_key", "reward_shape", "advantage", "credit", "bounds", "correction"}
    for hook in ("group_key", "reward_shape", "advantage", "credit"):
        assert not seen[hook].requires_grad
    assert not seen["correction"].weight.requires_grad
    assert not given["correction"][0].requires_grad
    assert not given["bounds"][0].requires_grad
    algorithm.loss(batch, torch.full((B, T), torch.nan))
    assert torch.equal(given["surrogate"][1] == 0, ~batch.mask)
    for name in ("logp", "old_logp", "token_kl"):  # hooks never meet padding
        assert torch.equal(getattr(given["log_ratio"][0], name) == 0, ~batch.mask)
    assert seen["log_ratio"].requires_grad
    assert seen["surrogate"].requires_grad
    assert not any(value.requires_grad for value in metrics.values())


def test_metrics():
    batch = table(spread=0.3)
    algorithm = Algorithm("grpo", clip_lo=0.1, clip_hi=0.2)
    _, metrics = algorithm.loss(batch, algorithm.advantages(batch))
    lr = (batch.logp - batch.old_logp).detach()[batch.mask]
    ratio = lr.exp()
    expected = {
        "approx_kl": 0.5 * (lr**2).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_square_mean": (ratio**2).mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "log_ratio_max": lr.abs().max(),
        "clip_frac_high": (ratio > 1.2).double().mean(),
        "clip_frac_low": (ratio < 0.9).double().mean(),
    }
    torch.testing.assert_close({key: metrics[key] for key in expected}, expected)


def test_the_loss_drops_what_the_batch_or_the_advantage_drops(algorithm):
    batch = table(in_loss=BORROWED)
    adv = torch.where(batch.loss_mask, algorithm.advantages(batch).adv, torch.nan)
    expected = run(algorithm, batch)
    for given in (adv, AdvOut(adv, torch.ones(B, dtype=torch.bool))):
        torch.testing.assert_close(run(algorithm, batch, given), expected)


def test_an_advantage_link_may_drop_rows():
    def pivot(x, reward, batch, state, cfg):
        return AdvOut(x, torch.arange(len(x)) % 4 != 0)

    registry.register("advantage", "pivot", first=False)(pivot)
    try:
        algorithm, batch = Algorithm(replace(PRESETS["grpo"], advantage=("z", "pivot"))), table()
        adv = algorithm.advantages(batch)
        loss, gradient, _ = run(algorithm, batch, adv)
        borrowed = algorithm.advantages(replace(batch, in_loss=BORROWED))
    finally:
        del registry._LINKS["advantage"]["pivot"]
    assert adv.keep.tolist() == [False, True, True, True] * 2
    assert torch.equal(borrowed.keep, adv.keep & BORROWED)
    both = (run(algorithm, replace(batch, in_loss=rows), borrowed)[1] for rows in (BORROWED, borrowed.keep))
    assert torch.equal(*both)
    assert (gradient[~adv.keep] == 0).all()
    plain = Algorithm("grpo")
    expected, _ = plain.loss(replace(batch, in_loss=adv.keep), plain.advantages(batch))
    torch.testing.assert_close(loss, expected.detach())


def test_an_all_invalid_batch_is_zero_not_nan(algorithm):
    batch = table(valid=torch.zeros(B, dtype=torch.bool))
    loss, gradient, metrics = run(algorithm, batch)
    assert loss == 0
    assert (gradient == 0).all()
    assert metrics["ratio_mean"] == 0


def test_wrong_advantages_are_refused(algorithm):
    with pytest.raises(ValueError, match="advantages are"):
        algorithm.loss(table(), torch.zeros(B))


def test_missing_data_is_named():
    batch = replace(table(), old_logp=None)
    with pytest.raises(ValueError, match="log_ratio link 'token' needs 'old_logp'"):
        Algorithm("grpo").loss(batch, torch.zeros(B, T))
    algorithm = Algorithm(replace(PRESETS["grpo"], needs=("scope",)))
    with pytest.raises(ValueError, match="preset needs 'scope'"):
        algorithm.loss(table(), torch.zeros(B, T))


def test_a_shared_default_must_be_settled():
    preset = replace(PRESETS["grpo"], advantage=("z", "other"))
    registry.register("advantage", "other", first=False, eps=0.5)(lambda x, *rest: x)
    try:
        with pytest.raises(ValueError, match="different defaults for 'eps'"):
            Algorithm(preset)
        assert Algorithm(preset, eps=0.1).cfg.eps == 0.1
    finally:
        del registry._LINKS["advantage"]["other"]

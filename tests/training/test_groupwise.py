"""Rewards that compare the samples of a group, and rewards normalised one by one (GDPO), through the trainer."""

import pytest
import torch
from accelerate import debug_launcher

from flowrl import DiffusionNFT, FlowGRPO, SuperFlow
from flowrl.rewards import RewardOutput, RewardSet, per_group, ranked, scaled, win_rate
from flowrl.training.recipe import recipe_from


def brightness(images, prompts):
    return images.flatten(1).mean(1)


def redness(images, prompts):
    return (images[:, 0] - images[:, 1:].mean(1)).flatten(1).mean(1)


def brighter(a, b, prompts):
    """A judge that likes what it sees first a little better."""
    return torch.sigmoid(200 * (brightness(a, prompts) - brightness(b, prompts)) + 0.01)


def place_and_company(images, prompts, group_id):
    """How many of its group came before a sample, and how many are there."""
    size = [group_id.count(g) for g in group_id]
    return [10.0 * n + group_id[:i].count(group_id[i]) for i, n in enumerate(size)]


REWARDS = {ranked(brightness): 1.0, win_rate(brighter, both_orders=False): 1.0, place_and_company: 1e-3}


def scored(make_trainer, folder):
    """(rank, the rewards of two iterations by sample number)."""
    trainer = make_trainer(folder / "run", rewards=REWARDS, prompts_per_iteration=3, group_size=4, micro_batch_size=2)
    return trainer.accelerator.process_index, [trainer.rollout(i)[1].extra["rewards"] for i in range(2)]


def child(make_trainer, folder):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # a forked child inherits that there is one process
    GradientState._reset_state()
    torch.set_num_threads(1)
    rank, rewards = scored(make_trainer, folder)
    torch.save(rewards, folder / f"rewards-{rank}.pt")


def test_a_groupwise_reward_sees_whole_groups_on_any_number_of_processes(make_trainer, tmp_path):
    _, one = scored(make_trainer, tmp_path / "one")
    for rewards in one:
        ranks, wins, places = (x.reshape(3, 4) for x in rewards.T)
        assert torch.equal(ranks.sort(1).values, torch.tensor([0, 1, 2, 3]).div(3).expand(3, 4))
        assert torch.equal(ranks.argsort(1), wins.argsort(1))
        assert torch.equal(places, torch.tensor([40.0, 41, 42, 43]).expand(3, 4))  # in the order of the members
    # Three groups on two processes: one has two of them, and none of its samples need be its own.
    debug_launcher(child, (make_trainer, tmp_path), num_processes=2)
    for rank in range(2):
        for a, b in zip(one, torch.load(tmp_path / f"rewards-{rank}.pt"), strict=True):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=0)
            assert torch.equal(b[:, 2], a[:, 2])


def test_check_evaluation_and_clashing_columns(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, rewards=per_group(brightness))
    assert len(trainer.check()["rewards"]["per_group_brightness"]) == 4
    for evaluate in (
        lambda: make_trainer(tmp_path, rewards=ranked(brightness), eval_prompts=["a"]),
        lambda: trainer.evaluate(["a"]),
    ):
        with pytest.raises(ValueError, match=r"compares the samples of a group .* give other eval_rewards"):
            evaluate()
    with pytest.raises(ValueError, match=r"\['group_id'\] hide"):
        make_trainer(tmp_path, prompts=[{"prompt": str(i), "group_id": i} for i in range(3)])


# ------------------------------------------------------------------------------------------------------------ GDPO


def half_valid(images, prompts):
    """Every third sample cannot be scored."""
    valid = torch.arange(len(prompts)) % 3 != 0
    return RewardOutput(redness(images, prompts).cpu(), valid)


def test_gdpo_makes_scales_irrelevant_and_leaves_invalid_rows_out(make_trainer, tmp_path):
    def rollout(rewards, objective):
        _, batch, advantage, _ = make_trainer(tmp_path, objective, rewards=rewards, sample_batch_size=8).rollout(0)
        return batch, advantage.adv

    rewards = {brightness: 1.0, half_valid: 2.0}
    rescaled = {scaled(brightness, 300, -7): 1.0, scaled(half_valid, 20, 5): 2.0}
    for make in (FlowGRPO, DiffusionNFT):
        batch, a = rollout(rewards, make(combine="gdpo"))
        moved, b = rollout(rescaled, make(combine="gdpo"))
        assert not torch.allclose(batch.reward[batch.valid], moved.reward[batch.valid], atol=0.1)
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
        assert 0 < batch.valid.sum() < len(batch.valid) and a[~batch.valid].abs().max() == 0
        _, plain = rollout(rewards, make())
        _, other = rollout(rescaled, make())
        assert not torch.allclose(plain, other, atol=0.05)  # the sum is the large reward's
        # Written out, on the valid rows alone.
        parts, gid = batch.extra["rewards"][batch.valid].double(), batch.group_id[batch.valid]
        total = torch.zeros(len(parts), dtype=torch.float64)
        for k, weight in enumerate(batch.extra["reward_weights"]):
            for g in gid.unique():
                r = parts[gid == g, k]
                total[gid == g] += weight * (r - r.mean()) / r.std()
        expected = (total - total.mean()) / total.std()
        torch.testing.assert_close(a[batch.valid, 0].double(), expected, atol=2e-3, rtol=0)


def test_gdpo_trains(make_trainer, tmp_path):
    objective = FlowGRPO(combine="gdpo", clip_range=1e-3, kl=0.01)
    summary = make_trainer(tmp_path, objective, rewards=[brightness, redness], iterations=2).train()
    assert summary["finished"]


def test_gdpo_in_yaml_and_what_it_does_not_go_with():
    recipe = recipe_from(
        {
            "description": "x",
            "model": {"path": "shapes"},
            "objective": {"name": "FlowDPPO", "combine": "gdpo"},
            "sampler": "FlowSDE",
            "rewards": {"shapes": 1.0, "jpeg_compressibility": 1.0},
            "prompts": "shapes/train",
        }
    )
    assert recipe.objective.algorithm.preset.advantage == ("gdpo",)
    with pytest.raises(ValueError, match=r"unknown combine 'mean': one of sum, gdpo"):
        DiffusionNFT(combine="mean")
    with pytest.raises(ValueError, match="takes no baseline: take baseline='group'"):
        SuperFlow(combine="gdpo")
    assert SuperFlow(combine="gdpo", baseline="group").algorithm.preset.advantage == ("gdpo", "clip")


# ------------------------------------------------------------------------------------------- ranges and identities


def test_a_tracker_refuses_rewards_that_declare_another_range(make_trainer, tmp_path):
    def stars(images, prompts):
        return [3.0] * len(prompts)

    stars.range = (1.0, 5.0)
    with pytest.raises(ValueError, match=r"SuperFlow's tracker needs rewards in \[0, 1\], and these lie in \[1, 5\]"):
        make_trainer(tmp_path, SuperFlow(m_min=2), rewards=stars)
    make_trainer(tmp_path, SuperFlow(m_min=2), rewards=scaled(stars, 0.25, -0.25))
    make_trainer(tmp_path, rewards=stars)  # nobody asked


class Judge:
    """Behind a URL, which is its name; what it is says its fingerprint."""

    def __init__(self, url, fingerprint):
        self.name, self.fingerprint = "judge", fingerprint
        self.url = url

    def __call__(self, images, prompts):
        return brightness(images, prompts)


def test_a_run_knows_its_reward_by_the_fingerprint(make_trainer, tmp_path):
    from flowrl.training.checkpoint import CheckpointError

    trainer = make_trainer(tmp_path / "a", rewards={Judge("http://a:8000", "v1"): 1.0}, iterations=1)
    folder = trainer.save_checkpoint()
    assert trainer.identity()["rewards"] == {"judge v1": 1.0}
    make_trainer(tmp_path / "b", rewards={Judge("http://b:9000", "v1"): 1.0}).load_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"\(rewards.judge v1: 1.0 there, None here; rewards.judge v2: None"):
        make_trainer(tmp_path / "c", rewards={Judge("http://a:8000", "v2"): 1.0}).load_checkpoint(folder)


def test_the_address_of_a_server_is_not_part_of_the_run():
    from flowrl.rewards import RewardServer

    identities = []
    for _ in range(2):
        with RewardServer(brightness, port=0) as server:
            rewards = RewardSet({f"remote@{server.url}": 0.5})
            rewards.check_columns([])  # asks the server who it is
            identities.append(rewards.identity)
    assert identities[0] == identities[1] and list(identities[0].values()) == [0.5]
    assert next(iter(identities[0])).startswith("remote ")

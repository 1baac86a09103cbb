import asyncio
import json
import re
import threading
from pathlib import Path

import pytest
import torch
import yaml

from flowrl.rewards import (
    RewardError,
    RewardOutput,
    RewardServer,
    RewardSet,
    cached,
    gate,
    majority,
    per_group,
    ranked,
    scaled,
    win_rate,
)
from flowrl.training.recipe import load_recipe

N = 4
PROMPTS = [f"prompt {i}" for i in range(N)]


@pytest.fixture
def images():
    return torch.rand(N, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def ones(images, prompts):
    return [1.0] * len(prompts)


async def slow_index(images, prompts):
    await asyncio.sleep(0.01)
    return [float(prompt.split()[1]) for prompt in prompts]


def invalid_rows(*rows, reason="timeout"):
    def flaky(images, prompts):
        valid = torch.tensor([row not in rows for row in range(len(prompts))])
        values = torch.arange(len(prompts)).float().masked_fill(~valid, torch.nan)
        return RewardOutput(values, valid, {"reason": [None if ok else reason for ok in valid.tolist()]})

    return flaky


def test_scaled(images):
    scores = RewardSet({scaled(slow_index, 0.5, -1): 2.0}).score(images, PROMPTS)
    assert scores.total.tolist() == [-2.0, -1.0, 0.0, 1.0]
    assert scores.details["scaled_slow_index"]["slow_index"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gate_spends_the_inner_reward_only_where_open(images):
    seen = []

    def expensive(images, prompts, tag):
        seen.append((len(images), list(prompts), tag))
        return [float(t) for t in tag]

    columns = {"tag": [5, 6, 7, 8]}
    reward = gate(lambda i, p: [True, False, True, False], {expensive: 10.0}, otherwise=-1.0)
    scores = RewardSet(reward).score(images, PROMPTS, columns)
    assert scores.total.tolist() == [50.0, -1.0, 70.0, -1.0]
    assert seen == [(2, ["prompt 0", "prompt 2"], [5, 7])]
    details = scores.details["gated_expensive"]
    assert details["passed"].tolist() == [True, False, True, False]
    assert details["expensive"].isnan().tolist() == [False, True, False, True]


def test_gate_vetoes_whatever_the_weights_and_keeps_validity(images):
    huge = {ones: 1e6, brightness: 1e6}
    assert RewardSet(gate(lambda i, p: [0] * len(p), huge, -5.0)).score(images, PROMPTS).total.tolist() == [-5.0] * N
    scores = RewardSet(gate(invalid_rows(3), invalid_rows(0))).score(images, PROMPTS)
    # row 0 is shut; row 1 is the first that passes, which the inner reward cannot score; row 3: no condition
    assert scores.valid.tolist() == [True, False, True, False]
    assert scores.total.nan_to_num(-9).tolist() == [0.0, -9.0, 1.0, -9.0]


def test_ranges_of_what_is_derived():
    def unit(images, prompts): ...

    unit.range = (0, 1)
    assert RewardSet(scaled(unit, -2, 1)).range == (-1, 1)
    assert RewardSet(scaled(ones, 2)).range is None
    assert RewardSet(gate(ones, unit, otherwise=-5)).range == (-5, 1)
    assert RewardSet(gate(unit, ones)).range is None
    assert RewardSet([cached(unit), per_group(unit), ranked(ones)]).range == (0, 3)


def test_a_gate_passes_reasons_on(images):
    scores = RewardSet(gate(invalid_rows(3), invalid_rows(0, reason="busy")), 1.0).score(images, PROMPTS)
    assert scores.details["gated_flaky"]["reason"] == ["", "busy", "", "timeout"]


# cached


class Counting:
    """A reward that costs: remembers what it was asked."""

    name = "counting"

    def __init__(self, broken=()):
        self.asked, self.broken = [], broken

    def __call__(self, images, prompts, target=None):
        self.asked.append(list(prompts))
        valid = torch.tensor([p not in self.broken for p in prompts])
        return RewardOutput(images.mean((1, 2, 3)), valid, {"reason": ["" if ok else "down" for ok in valid.tolist()]})


def test_cached_asks_for_each_content_once(images):
    judge = Counting()
    rewards = RewardSet({cached(judge): 2.0})
    assert list(rewards.weights) == ["counting"]  # remembering changes no experiment
    columns = {"target": ["a", "b", "c", "d"]}
    plain = RewardSet({judge: 2.0}).score(images, PROMPTS, columns)
    judge.asked.clear()
    first = rewards.score(images, PROMPTS, columns)
    again = rewards.score(images.flip(0), PROMPTS[::-1], {"target": [*"dcba"]})
    assert torch.equal(first.total, plain.total) and torch.equal(again.total, first.total.flip(0))
    assert torch.equal(again.details["counting"]["counting"], first.total.flip(0) / 2)
    assert judge.asked == [PROMPTS]
    # What the 8-bit pixels cannot tell apart is the same; another prompt, column or pixel is not.
    rewards.score(images + 1e-5, PROMPTS, columns | {"unused": [1, 2, 3, 4]})
    assert len(judge.asked) == 1
    images[3, 0, 0, 0] = 1 - images[3, 0, 0, 0]
    rewards.score(images, [*PROMPTS[:2], "other", PROMPTS[3]], columns | {"target": ["a", "x", "c", "d"]})
    assert judge.asked[1:] == [["prompt 1", "other", "prompt 3"]]


def test_cached_scores_equal_samples_of_a_batch_once_and_forgets_the_oldest(images):
    judge = Counting()
    rewards = RewardSet(cached(judge, size=2))
    twins = images[[0, 0, 1, 0]]
    scores = rewards.score(twins, ["a", "a", "a", "a"])
    assert judge.asked == [["a", "a"]] and torch.equal(scores.total, twins.mean((1, 2, 3)))
    for image, known in ((0, True), (2, False), (0, True), (1, False)):  # 1 was asked for the longest ago
        before = len(judge.asked)
        rewards.score(images[[image]], ["a"])
        assert (len(judge.asked) == before) is known


def test_cached_does_not_remember_failures(images):
    judge = Counting(broken={"prompt 1"})
    rewards = RewardSet(cached(judge))
    scores = rewards.score(images[[0, 1, 1, 3]], ["prompt 0", "prompt 1", "prompt 1", "prompt 3"])
    assert scores.valid.tolist() == [True, False, False, True]
    assert scores.details["counting"]["reason"] == ["", "down", "down", ""]
    judge.broken = ()
    assert rewards.score(images, PROMPTS).valid.all()
    assert judge.asked == [["prompt 0", "prompt 1", "prompt 3"], ["prompt 1", "prompt 2"]]


def test_cached_texts_async_rewards_and_what_it_refuses(images):
    def length(texts, prompts):
        length.calls += 1
        return [len(text) for text in texts]

    length.calls = 0
    rewards = RewardSet(cached(length))
    assert [rewards.score(["a", "bc"], ["p", "p"]).total.tolist() for _ in range(2)] == [[1.0, 2.0]] * 2
    assert length.calls == 1
    assert RewardSet(cached(slow_index)).score(images, PROMPTS).total.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="depends on the others"):
        cached(ranked(ones))


def test_what_waits_is_asked_beside_what_computes(images):
    asked, computed, threads = [], threading.Event(), []

    async def judge(images, prompts):
        asked.append(list(prompts))
        while not computed.is_set():  # for ever if it were waited for
            await asyncio.sleep(0.001)
        return [float(prompt.split()[1]) for prompt in prompts]

    def not_last(images, prompts):
        threads.append(threading.current_thread())
        return [prompt != "prompt 3" for prompt in prompts]

    def local(images, prompts):
        computed.set()
        return [0.0] * len(prompts)

    derived = [scaled(judge, 2.0), gate(not_last, judge, -1.0), cached(judge), cached(scaled(gate(ones, judge), 3.0))]
    rewards = RewardSet([*derived, local])
    expected = [[0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, -1.0], [0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 6.0, 9.0]]
    for calls in (4, 2):  # the second time two are remembered
        parts = list(rewards.score(images, PROMPTS).parts.values())
        assert [part.tolist() for part in parts[:4]] == expected
        assert len(asked) == calls and PROMPTS[:3] in asked
        asked.clear()
        computed.clear()
    assert set(threads) == {threading.current_thread()}  # what computes does so where it always did


def test_a_condition_that_waits_comes_first(images):
    reward = gate(slow_index, slow_index, -1.0)
    assert RewardSet(reward).score(images, PROMPTS).total.tolist() == [-1.0, 1.0, 2.0, 3.0]


def test_the_identity_is_of_settings_and_sources():
    class Model:
        name, fingerprint = "model", "rev1"

        def __call__(self, images, prompts): ...

    def known(reward):
        (key,) = RewardSet(reward).identity
        return key

    assert known(scaled(Model(), 2, 1)) == '["scaled", 2.0, 1.0, {"model rev1": 1.0}]'
    assert known(gate(ones, Model(), -1)) == '["gate", -1.0, {"ones": 1.0}, {"model rev1": 1.0}]'
    assert RewardSet({cached({Model(): 3.0}): 2.0}).identity == {"model rev1": 6.0}  # remembering changes nothing
    assert known(ranked(scaled(ones, 2))) == json.dumps(["ranked", {'["scaled", 2.0, 0.0, {"ones": 1.0}]': 1.0}])
    others = [
        per_group(ones),
        ranked(ones),
        win_rate(ones),
        win_rate(ones, False),
        majority(ones),
        majority(brightness),
    ]
    assert len({known(reward) for reward in others}) == len(others)


# inside a group

GROUPS = {"group_id": [5, 2, 5, 5]}


def test_per_group_calls_once_for_each_group(images):
    seen = []

    def spread(images, prompts, tag):
        seen.append((list(prompts), tag))
        mean = images.mean(0, keepdim=True)
        return (images - mean).abs().mean((1, 2, 3))

    rewards = RewardSet(per_group(spread))
    scores = rewards.score(images, PROMPTS, GROUPS | {"tag": [*"abcd"]})
    assert seen == [(["prompt 0", "prompt 2", "prompt 3"], ["a", "c", "d"]), (["prompt 1"], ["b"])]
    group = images[[0, 2, 3]]
    expected = (group - group.mean(0, keepdim=True)).abs().mean((1, 2, 3))
    assert torch.allclose(scores.total, torch.stack([expected[0], torch.tensor(0.0), *expected[1:]]))
    with pytest.raises(ValueError, match="'per_group_spread' compares the samples of a group"):
        rewards.check_columns(["tag"])
    with pytest.raises(ValueError, match="'spread' needs the prompt columns"):
        rewards.check_columns([], supplied=["group_id"])


def values(*numbers):
    return lambda images, prompts: [float(x) for x in numbers]


def test_ranked():
    images, prompts = torch.zeros(6, 3, 2, 2), [""] * 6
    gid = {"group_id": [1, 1, 1, 1, 0, 3]}
    scores = RewardSet(ranked(values(100, -3, 5, 5, 7, 2))).score(images, prompts, gid)
    assert scores.total.tolist() == pytest.approx([1.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    same = RewardSet(ranked(values(0, 0, 0, 0, 0, 0))).score(images, prompts, gid)
    assert same.total.tolist() == [0.5] * 6  # nothing to learn, and no NaN
    scores = RewardSet(ranked(invalid_rows(1))).score(images, prompts, gid)
    assert scores.valid.tolist() == [True, False, True, True, True, True]
    assert scores.total[[0, 2, 3]].tolist() == [0.0, 0.5, 1.0]  # the invalid one has no rank


def strength(images):
    return images[:, 0, 0, 0]


def test_win_rate_is_the_mean_probability_of_beating_the_others():
    images = torch.tensor([0.2, 0.9, 0.4, 0.1]).reshape(4, 1, 1, 1).expand(4, 3, 2, 2)
    calls = []

    def compare(a, b, prompts):
        calls.append(list(prompts))
        return (0.5 + (strength(a) - strength(b)) / 2).clamp(0, 1)

    scores = RewardSet(win_rate(compare)).score(images, PROMPTS, GROUPS)
    s = strength(images)[[0, 2, 3]]
    expected = torch.stack([(0.5 + (s[i] - s[[j for j in range(3) if j != i]]) / 2).mean() for i in range(3)])
    assert torch.allclose(scores.total[[0, 2, 3]], expected) and scores.total[1] == 0.5  # alone
    assert len(calls[0]) == 6  # 3 x 2 in one call
    assert scores.details["win_rate_compare"]["disagreement"][[0, 2, 3]].abs().max() < 1e-6
    half = RewardSet(win_rate(compare, both_orders=False)).score(images, PROMPTS, GROUPS)
    assert torch.allclose(half.total, scores.total) and len(calls[1]) == 3


def test_asking_in_both_orders_undoes_a_liking_for_the_first():
    images = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    gid = {"group_id": [0] * 4}

    def first(a, b, prompts):
        return [1.0] * len(prompts)

    scores = RewardSet(win_rate(first)).score(images, PROMPTS, gid)
    assert scores.total.tolist() == [0.5] * 4
    assert scores.details["win_rate_first"]["disagreement"].tolist() == [1.0] * 4
    # With one order each sample comes first about as often as second, so the liking does not follow the place.
    rates = RewardSet(win_rate(first, both_orders=False)).score(images, PROMPTS, gid).total
    assert rates.max() - rates.min() <= 1 / 3 + 1e-6


def test_win_rate_in_small_calls_async_and_with_failures(images, monkeypatch):
    from flowrl.rewards import combinators

    monkeypatch.setattr(combinators, "PAIRS", 5)
    gid = {"group_id": [0] * 4}
    sizes = []

    async def judge(a, b, prompts):
        sizes.append(len(prompts))
        await asyncio.sleep(0)
        down = (strength(a) == strength(images)[2]) | (strength(b) == strength(images)[2])
        return RewardOutput((strength(a) > strength(b)).float(), ~down)

    scores = RewardSet(win_rate(judge)).score(images, PROMPTS, gid)
    assert sorted(sizes) == [2, 5, 5]
    assert scores.valid.tolist() == [True, True, False, True]
    others = strength(images)[[0, 1, 3]]
    expected = [(others < s).sum().item() / 2 for s in others]
    assert scores.total[[0, 1, 3]].tolist() == expected
    assert scores.details["win_rate_judge"]["reason"] == ["", "", "all its comparisons failed", ""]


def test_few_calls_of_an_async_comparison_run_at_once_and_none_after_a_failure(images, monkeypatch):
    from flowrl.rewards import combinators

    monkeypatch.setattr(combinators, "PAIRS", 1)
    monkeypatch.setattr(combinators, "CALLS", 2)
    gid = {"group_id": [0] * 4}
    running, most = [], []

    async def judge(a, b, prompts):
        running.append(len(a))
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.pop()
        return [0.5]

    assert win_rate(judge).waits and not win_rate(lambda a, b, p: [0.5]).waits
    assert RewardSet(win_rate(judge)).score(images, PROMPTS, gid).total.tolist() == [0.5] * 4
    assert len(most) == 12 and max(most) == 2

    asked = []

    async def broken(a, b, prompts):
        asked.append(1)
        raise ConnectionError("away")

    async def later(images, prompts):
        await asyncio.sleep(0.05)
        return [0.0] * len(prompts)

    with pytest.raises(RewardError, match="away"):
        RewardSet(win_rate(broken)).score(images, PROMPTS, gid)
    RewardSet(later).score(images, PROMPTS)
    assert len(asked) < 12


@pytest.mark.parametrize("answer", [2.0, -0.1, float("nan")])
def test_a_comparison_must_be_a_probability(images, answer):
    with pytest.raises(RewardError, match=r"must return probabilities in \[0, 1\]"):
        RewardSet(win_rate(lambda a, b, p: [answer] * len(p))).score(images, PROMPTS, GROUPS)


def test_majority():
    texts = ["= 4", "= 5", "so = 4", "?", "= 7", "= 8"]
    gid = {"group_id": [0, 0, 0, 0, 1, 1]}

    def number(text):
        found = re.search(r"= (\d+)", text)
        return found and found[1]

    scores = RewardSet(majority(number)).score(texts, [""] * 6, gid)
    assert scores.total.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]  # a tie: one winner, the first
    nobody = RewardSet(majority(lambda text: None)).score(texts, [""] * 6, gid)
    assert nobody.total.tolist() == [0.0] * 6


def test_a_server_takes_no_reward_that_compares():
    with pytest.raises(ValueError, match="compares the samples of a group, and a request holds parts of groups"):
        RewardServer(ranked(brightness), port=0)


def test_the_documented_file_and_recipe(images, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    (code,) = re.findall(r"```python\n(# my_rewards.py\n.*?)```", page, re.S)
    (text,) = re.findall(r"```yaml\n(rewards:.*?)```", page, re.S)
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe("shapes-flow-grpo", [f"rewards={json.dumps(yaml.safe_load(text)['rewards'])}"])
    rewards = RewardSet(recipe.rewards)
    assert rewards.weights == {
        f"my_rewards:{k}": w for k, w in zip(("checked", "various", "judged", "order"), (1, 0.1, 0.5, 0.5), strict=True)
    }
    images[1] = 0.5  # flat: vetoed
    parts = rewards.score(images, PROMPTS, {"group_id": [0, 0, 1, 1]}).parts
    checked, _, judged, order = parts.values()
    kilobytes = RewardSet("jpeg_compressibility").score(images, PROMPTS).total
    assert torch.allclose(checked, torch.where(torch.arange(4) == 1, -1.0, 0.8 * kilobytes))
    assert order.tolist() == [0.0, 1.0, *sorted([0.0, 1.0], reverse=bool(kilobytes[2] > kilobytes[3]))]
    assert torch.allclose(judged.reshape(2, 2).sum(1), torch.ones(2))
    assert RewardSet("my_rewards:paid").score(images, PROMPTS).total.equal(kilobytes)

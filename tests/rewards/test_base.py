import asyncio
import functools
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.rewards import (
    RewardError,
    RewardOutput,
    RewardSet,
    calling,
    gate,
    names,
    quantise,
    register,
    resolve,
    scaled,
    to_pil,
)
from flowrl.rewards.base import _REGISTRY

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
    await asyncio.sleep(0.05)
    return [float(prompt.split()[1]) for prompt in prompts]


# pixels


def test_quantise_rounds_and_clamps():
    images = torch.tensor([-0.1, 0.4 / 255, 0.6 / 255, 1.1]).reshape(1, 1, 2, 2).expand(1, 3, 2, 2)
    pixels = quantise(images)
    assert pixels.shape == (1, 2, 2, 3) and pixels.dtype == torch.uint8
    assert pixels[0, ..., 0].flatten().tolist() == [0, 0, 1, 255]


def test_every_8_bit_value_survives():
    values = torch.arange(256).float().div(255).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert quantise(values)[0, ..., 1].flatten().tolist() == list(range(256))


def test_to_pil_equals_quantise(images):
    assert np.array_equal(np.stack([np.asarray(i) for i in to_pil(images)]), quantise(images).numpy())
    assert to_pil(images)[0].size == (5, 6)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, 4, 4),
        torch.zeros(1, 4, 4, 3),
        torch.zeros(0, 3, 4, 4),
        torch.zeros(1, 3, 4, 4, dtype=torch.uint8),
        torch.full((1, 3, 4, 4), 255.0),
        torch.full((1, 3, 4, 4), -1.0),
        torch.full((1, 3, 4, 4), torch.nan),
        torch.full((1, 3, 4, 4), torch.inf),
    ],
)
def test_quantise_refuses(bad):
    with pytest.raises(ValueError, match="images must"):
        quantise(bad)


# names


def test_registry():
    assert {"jpeg_compressibility", "jpeg_incompressibility"} <= set(names())
    with pytest.raises(ValueError, match="did you mean 'jpeg_compressibility'"):
        resolve("jpeg_compresibility")
    with pytest.raises(ValueError, match=r"known: .*jpeg_compressibility"):
        resolve("zzz")
    with pytest.raises(ValueError, match="taken"):
        register("jpeg_compressibility")(ones)
    with pytest.raises(TypeError, match="a reward is a name or a callable"):
        resolve(3)


def test_register_function_and_class(images):
    try:
        assert register("test_ones")(ones) is ones and register("test_ones")(ones) is ones

        @register("test_class")
        class Two:
            def __call__(self, images, prompts):
                return [2] * len(prompts)

        scores = RewardSet({"test_ones": 1, "test_class": 0.5}).score(images, PROMPTS)
        assert scores.total.tolist() == [2.0] * N and list(scores.parts) == ["test_ones", "test_class"]
    finally:
        _REGISTRY.pop("test_ones", None)
        _REGISTRY.pop("test_class", None)


def test_import_path(images):
    path = "flowrl.rewards.jpeg:jpeg_compressibility"
    scores = RewardSet(path).score(images, PROMPTS)
    assert torch.equal(scores.parts[path], RewardSet("jpeg_compressibility").score(images, PROMPTS).total)
    for bad in ("no_such_module:f", "flowrl.rewards.jpeg:nothing"):
        with pytest.raises(ValueError, match="cannot load reward"):
            resolve(bad)


def test_names_are_unique_and_readable():
    class Scorer:
        name = "my_scorer"

        def __call__(self, images, prompts): ...

        def method(self, images, prompts): ...

    first, second = (lambda i, p: [0.0] * len(p) for _ in range(2))
    partial = functools.partial(lambda i, p, scale: [scale] * len(p), scale=1)
    found = list(RewardSet([first, second, partial, ones, [ones, Scorer()], Scorer().method]).weights)
    assert len(set(found)) == 7
    assert found[0].startswith("lambda_test_base_") and found[1] == found[0] + "_2"
    assert found[2].startswith("lambda_test_base_")
    assert found[3:] == ["ones", "ones_2", "my_scorer", "method"]


def test_what_a_user_may_pass(images):
    assert RewardSet(ones).weights == {"ones": 1.0}
    assert RewardSet([ones, {brightness: 0.5}]).weights == {"ones": 1.0, "brightness": 0.5}
    assert RewardSet({(ones, brightness): 2}).weights == {"ones": 2.0, "brightness": 2.0}
    inner = RewardSet({ones: 2.0, brightness: 1.0})
    scores = RewardSet({inner: 0.5, ones: 0.0}).score(images, PROMPTS)
    assert torch.allclose(scores.total, 1 + 0.5 * images.mean((1, 2, 3)))
    assert set(scores.details["reward_set"]) == {"ones", "brightness"}


@pytest.mark.parametrize("weight", [True, "1", None, float("nan"), float("inf")])
def test_bad_weight(weight):
    with pytest.raises(ValueError, match=r"'ones': the weight must be a finite number"):
        RewardSet({ones: weight})


def test_bad_rewards():
    with pytest.raises(ValueError, match="no reward"):
        RewardSet([])
    with pytest.raises(TypeError, match="must accept"):
        RewardSet(lambda images: [0.0])
    with pytest.raises(TypeError, match="a reward is"):
        RewardSet([None])


# columns


def test_columns_are_passed_by_signature(images):
    seen = {}

    def two(images, prompts, target, weight=(0,)):
        seen["two"] = (target, weight)
        return [0.0] * len(prompts)

    def every(images, prompts, **columns):
        seen["every"] = columns
        return [0.0] * len(prompts)

    columns = {"target": ["a", "b", "c", "d"], "other": [1, 2, 3, 4]}
    RewardSet([two, every, ones]).score(images, PROMPTS, columns)
    assert seen == {"two": (["a", "b", "c", "d"], (0,)), "every": columns}


def test_module_columns_come_from_forward(images):
    class Model(torch.nn.Module):
        def forward(self, images, prompts, *, target):
            return images.mean((1, 2, 3)) + torch.tensor(target)

    rewards = RewardSet(Model())
    with pytest.raises(ValueError, match=r"'Model' needs the prompt columns \['target'\]"):
        rewards.check_columns(["other"])
    rewards.score(images, PROMPTS, {"target": [1, 2, 3, 4], "other": PROMPTS})


def test_missing_and_clashing_columns():
    def needs(images, prompts, target): ...

    rewards = RewardSet([ones, needs])
    with pytest.raises(ValueError, match=r"'needs' needs the prompt columns \['target'\].*\['tag'\]"):
        rewards.check_columns(["tag"])
    rewards.check_columns(["target"])
    with pytest.raises(ValueError, match="hide the reward arguments"):
        rewards.check_columns(["target", "prompts"])
    for outer in (RewardSet(RewardSet(needs)), RewardSet(scaled(needs, 2)), RewardSet(gate(needs, ones))):
        with pytest.raises(ValueError, match="'needs' needs"):
            outer.check_columns([])


# values


@pytest.mark.parametrize(
    "answer",
    [
        [1, 2.0, True, np.float32(4)],
        (1, 2, 1, 4),
        np.array([1, 2, 1, 4]),
        torch.tensor([1, 2, 1, 4], dtype=torch.float16),
        [torch.tensor(1.0), torch.tensor([2]), np.bool_(True), 4],
        RewardOutput(torch.tensor([1.0, 2, 1, 4])),
    ],
)
def test_what_a_reward_may_return(images, answer):
    scores = RewardSet({(lambda i, p: answer): 2}).score(images, PROMPTS)
    assert scores.total.tolist() == [2.0, 4.0, 2.0, 8.0]
    assert scores.total.dtype == torch.float32 and scores.valid.all()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, 2.0], r"shape \[2\] for 4 images"),
        ([], r"shape \[0\] for 4 images"),
        (torch.zeros(4, 1), r"shape \[4, 1\] for 4 images"),
        (0.5, "returned float; return one number per image"),
        (None, "returned NoneType"),
        ({"score": 1}, "returned dict"),
        ("0123", "returned str"),
        (["1", "2", "3", "4"], "returned '1' among its values"),
        ([1.0, None, 1.0, 1.0], "returned None among its values.*valid=False"),
        ([1.0, 1j, 1.0, 1.0], "returned 1j among"),
        (torch.zeros(4, dtype=torch.complex64), "returned Tensor"),
        (np.array(["a"] * 4), "returned ndarray"),
        ([1.0, float("nan"), 1.0, float("-inf")], r"returned \[nan, -inf\] for rows \[1, 3\], 2 of 4"),
        (RewardOutput(torch.zeros(4), torch.ones(4)), "valid of torch.float32"),
        (RewardOutput(torch.zeros(4), torch.ones(3, dtype=torch.bool)), "it must be bool"),
        (RewardOutput(torch.zeros(4), details={"x": [1]}), r"details\['x'\] has 1 entries for 4 images"),
    ],
)
def test_bad_answers_stop_the_step(images, answer, message):
    def culprit(images, prompts):
        return answer

    with pytest.raises(RewardError, match=f"reward 'culprit': .*{message}") as caught:
        RewardSet([ones, culprit]).score(images, PROMPTS)
    assert caught.value.reward == "culprit"


def test_exception_in_a_reward(images):
    def broken(images, prompts):
        raise KeyError("lost")

    async def broken_later(images, prompts):
        raise KeyError("lost")

    for culprit in (broken, broken_later, lambda i, p: broken_later(i, p)):
        with pytest.raises(RewardError, match="raised KeyError: 'lost'") as caught:
            RewardSet([ones, culprit]).score(images, PROMPTS)
        assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="reward 'broken'"):  # named once, by the set that met it
        RewardSet(RewardSet(broken)).score(images, PROMPTS)


def test_bad_input(images):
    rewards = RewardSet(ones)
    with pytest.raises(ValueError, match="4 images for 3 prompts"):
        rewards.score(images, PROMPTS[:3])
    with pytest.raises(ValueError, match="0 images for 0 prompts"):
        rewards.score([], [])
    for column in ([1], "four"):
        with pytest.raises(ValueError, match="column 'tag' must be a list of 4"):
            rewards.score(images, PROMPTS, {"tag": column})
    with pytest.raises(ValueError, match="images must lie in"):
        rewards.score(images * 255, PROMPTS)
    images[2, 0, 0, 0] = torch.nan
    with pytest.raises(RewardError, match=r"images \[2\] hold NaN or inf") as caught:
        rewards.score(images, PROMPTS)
    assert caught.value.rows == [2]


def test_text_is_media_too():
    scores = RewardSet(lambda texts, prompts: [len(text) for text in texts]).score(["a", "bcd"], ["p", "q"])
    assert scores.total.tolist() == [1.0, 3.0]


def test_gradient_reaches_the_pixels(images):
    brightness.differentiable = True
    try:
        rewards = RewardSet({brightness: 2.0, ones: 0.0})
        assert rewards.differentiable and RewardSet(scaled(brightness, 3)).differentiable
        assert not RewardSet([brightness, ones]).differentiable
        images.requires_grad_()
        RewardSet({scaled(brightness, 3): 2.0}).score(images, PROMPTS).total.sum().backward()
        assert torch.allclose(images.grad, torch.full_like(images, 6 / 90))
    finally:
        del brightness.differentiable


# validity


def invalid_rows(*rows, reason="timeout"):
    def flaky(images, prompts):
        valid = torch.tensor([row not in rows for row in range(len(prompts))])
        values = torch.arange(len(prompts)).float().masked_fill(~valid, torch.nan)
        return RewardOutput(values, valid, {"reason": [None if ok else reason for ok in valid.tolist()]})

    return flaky


def test_invalid_rows_are_marked(images):
    scores = RewardSet([ones, invalid_rows(1)]).score(images, PROMPTS)
    assert scores.valid.tolist() == [True, False, True, True]
    assert scores.total.isnan().tolist() == [False, True, False, False]
    assert scores.total[[0, 2, 3]].tolist() == [1.0, 3.0, 4.0]
    assert scores.parts["ones"].tolist() == [1.0] * N
    assert scores.details["flaky"]["reason"] == [None, "timeout", None, None]


def test_a_number_in_an_invalid_row_is_not_used(images):
    answer = RewardOutput(torch.tensor([1.0, 99, 1, 1]), torch.tensor([True, False, True, True]))
    assert RewardSet(lambda i, p: answer).score(images, PROMPTS).total.isnan().tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_too_many_invalid(images):
    assert RewardSet(invalid_rows(0, 1)).score(images, PROMPTS).valid.sum() == 2  # exactly half is allowed
    with pytest.raises(RewardError, match=r"'flaky': 3 of 4 .*max_invalid_share=0.5. Reasons: timeout\. ") as caught:
        RewardSet([ones, invalid_rows(0, 1, 3)]).score(images, PROMPTS)
    assert caught.value.rows == [0, 1, 3]
    with pytest.raises(RewardError, match=r"2 of 4 .*4 by all rewards together"):
        RewardSet([invalid_rows(0, 1), invalid_rows(2, 3)]).score(images, PROMPTS)
    assert not RewardSet(invalid_rows(0, 1, 2, 3), max_invalid_share=1.0).score(images, PROMPTS).valid.any()
    for share in (50, -0.1, float("nan")):
        with pytest.raises(ValueError, match="max_invalid_share is a share, from 0 to 1"):
            RewardSet(ones, max_invalid_share=share)
    with pytest.raises(RewardError, match="1 of 4"):
        RewardSet(invalid_rows(2), max_invalid_share=0.0).score(images, PROMPTS)


def test_saved_sample(images, tmp_path):
    def nan_at_two(images, prompts, target):
        return [1.0, 1.0, float("nan"), 1.0]

    columns = {"target": ["a", "b", {1, 2}, "d"]}  # a set is not JSON
    with pytest.raises(RewardError) as caught:
        RewardSet(nan_at_two).score(images, PROMPTS, columns)
    path = caught.value.save(tmp_path / "deep" / "bad")
    report = json.loads(path.read_text())
    assert report["reward"] == "nan_at_two" and "nan" in report["error"]
    (sample,) = report["samples"]
    assert sample == {
        "row": 2,
        "prompt": "prompt 2",
        "image": "row_00002.png",
        "columns": {"target": "{1, 2}"},
    }
    saved = np.asarray(Image.open(path.parent / "row_00002.png"))
    assert np.array_equal(saved, quantise(images)[2].numpy())
    assert sorted(p.name for p in path.parent.iterdir()) == ["error.json", "row_00002.png"]


def test_saving_broken_images_and_texts(images, tmp_path):
    images[1] = torch.nan
    with pytest.raises(RewardError) as caught:
        RewardSet(ones).score(images, PROMPTS)
    caught.value.save(tmp_path)
    assert np.asarray(Image.open(tmp_path / "row_00001.png")).max() == 0
    with pytest.raises(RewardError) as caught:
        RewardSet(lambda texts, prompts: [1.0]).score(["x", "y"], ["p", "q"])
    samples = json.loads(caught.value.save(tmp_path).read_text())["samples"]
    assert [sample["media"] for sample in samples] == ["x", "y"]


# asynchronous rewards


def test_sync_and_async_together(images):
    class Client:
        async def __call__(self, images, prompts):
            await asyncio.sleep(0.05)
            return torch.full((len(prompts),), 3.0)

    rewards = RewardSet({brightness: 1.0, slow_index: 2.0, Client(): 1.0, (lambda i, p: slow_index(i, p)): 1.0})
    scores = rewards.score(images, PROMPTS)
    assert torch.allclose(scores.total, images.mean((1, 2, 3)) + 3 * torch.arange(4.0) + 3)
    assert list(scores.parts)[:3] == ["brightness", "slow_index", "Client"]

    async def inside():
        return rewards.score(images, PROMPTS)

    assert torch.equal(asyncio.run(inside()).total, scores.total)


def test_async_rewards_overlap_each_other_and_the_sync_ones(images):
    async_started, sync_started = threading.Event(), threading.Event()

    async def remote(images, prompts):
        async_started.set()
        while not sync_started.is_set():  # would wait for ever if the sync reward came after
            await asyncio.sleep(0.001)
        return [1.0] * len(prompts)

    def local(images, prompts):
        sync_started.set()
        assert async_started.wait(10)
        return [1.0] * len(prompts)

    assert RewardSet([local, remote]).score(images, PROMPTS).total.tolist() == [2.0] * N


def test_one_loop_for_every_step(images):
    loops = []

    async def remember(images, prompts):
        loops.append(asyncio.get_running_loop())
        assert not torch.is_grad_enabled()
        return [1.0] * len(prompts)

    for _ in range(2):
        RewardSet(remember).score(images, PROMPTS)
    assert loops[0] is loops[1] and not loops[0].is_closed()


def test_a_failure_cancels_what_still_runs(images):
    cancelled = threading.Event()

    async def endless(images, prompts):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def broken(images, prompts):
        time.sleep(0.05)  # let the other one start
        raise ValueError("no")

    with pytest.raises(RewardError, match="'broken'"):
        RewardSet([endless, broken]).score(images, PROMPTS)
    assert cancelled.wait(10)


def test_a_set_inside_an_async_reward_is_refused_instead_of_hanging(images):
    async def nested(images, prompts):
        return RewardSet(slow_index).score(images, prompts).total

    with pytest.raises(RewardError, match="await the inner reward"):
        RewardSet(nested).score(images, PROMPTS)


def test_a_set_in_a_set_waits_beside_the_others(images):
    computed = threading.Event()

    async def patient(images, prompts):
        while not computed.is_set():
            await asyncio.sleep(0.001)
        return [2.0] * len(prompts)

    def local(images, prompts):
        computed.set()
        return images.mean((1, 2, 3))

    local.differentiable = True
    images.requires_grad_()
    inner = RewardSet({brightness: 3.0, patient: 0.5})
    scores = RewardSet([inner, local]).score(images, PROMPTS)
    assert torch.allclose(scores.total, 4 * brightness(images, None) + 1)
    assert torch.allclose(scores.details["reward_set"]["patient"], torch.full((N,), 2.0))
    scores.total.sum().backward()  # what was computed here keeps its graph
    assert torch.allclose(images.grad, torch.full_like(images, 4 / 90))
    out = asyncio.run(inner(images, PROMPTS))  # a set with such rewards is one itself
    assert torch.allclose(out.values, 3 * brightness(images, None) + 1)


def test_the_loop_is_made_once_and_anew_after_a_fork(images):
    threads = [threading.Thread(target=RewardSet(slow_index).score, args=(images, PROMPTS)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(thread.name == "flowrl-rewards" for thread in threading.enumerate()) == 1
    if not hasattr(os, "fork"):
        return
    if not (child := os.fork()):
        signal.alarm(30)  # ends a child that hangs
        fine = False
        try:
            fine = RewardSet(slow_index).score(images, PROMPTS).total.tolist() == [0.0, 1.0, 2.0, 3.0]
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(calling._runners) == 1


def test_an_async_reward_that_exits_ends_its_caller_and_not_the_loop(images):
    async def leaves(images, prompts):
        await asyncio.sleep(0)
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        RewardSet(leaves).score(images, PROMPTS)
    assert RewardSet(slow_index).score(images, PROMPTS).total.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_many_blocking_rewards_wait_at_once(images):
    everybody = threading.Barrier(40)

    def blocking(images, prompts):
        everybody.wait(20)
        return [1.0] * len(prompts)

    blocking.remote = True
    assert RewardSet([blocking] * 40).score(images, PROMPTS).total.tolist() == [40.0] * N


# what a reward says of itself


def bounded(low, high, *values):
    def bounded(images, prompts):
        return list(values)

    bounded.range = (low, high)
    return bounded


def test_a_value_outside_the_declared_range_stops_the_step(images):
    fine = bounded(0, 1, 0.0, 1.0, 1.000001, -1e-6)  # what rounding adds is forgiven
    assert RewardSet(fine).score(images, PROMPTS).valid.all()
    with pytest.raises(
        RewardError, match=r"returned \[-0.5, 2.0\] for rows \[1, 3\], outside .* \(0.0, 1.0\)"
    ) as caught:
        RewardSet([ones, bounded(0, 1, 0.0, -0.5, 1.0, 2.0)]).score(images, PROMPTS)
    assert caught.value.rows == [1, 3]
    assert RewardSet(bounded(0, float("inf"), 0, 1, 2, 1e9)).score(images, PROMPTS).valid.all()
    out = RewardOutput(torch.tensor([9.0, 1, 1, 1]), torch.tensor([False, True, True, True]))

    def invalid_beyond(images, prompts):
        return out  # an invalid row's number is nobody's value

    invalid_beyond.range = (0, 1)
    assert RewardSet(invalid_beyond).score(images, PROMPTS).valid.tolist() == [False, True, True, True]


@pytest.mark.parametrize("bad", [(1, 0), (0, 0), 1.0, (0, 1, 2), "ab", (0, float("nan")), (0, None)])
def test_bad_range(bad):
    reward = bounded(0, 1)
    reward.range = bad
    with pytest.raises(ValueError, match="'bounded': range must be"):
        RewardSet(reward)


def test_the_range_of_a_sum():
    one, minus = bounded(0, 1), bounded(-1, 3)
    assert RewardSet({one: 2.0, minus: -1.0, ones: 0.0}).range == (-3.0, 3.0)
    assert RewardSet([one, ones]).range is None
    assert RewardSet({RewardSet({one: 2.0}): 0.5}).range == (0.0, 1.0)
    rewards = RewardSet({minus: 0.25})
    rewards.check_range(-0.25, 1, "who")
    with pytest.raises(ValueError, match=r"who needs rewards in \[0, 1\], and these lie in \[-0.25, 0.75\]"):
        rewards.check_range(0, 1, "who")
    RewardSet(ones).check_range(0, 1, "who")  # nothing declared, nothing known


def test_groupwise_rewards_get_the_groups_and_others_do_not(images):
    seen = {}

    def by_name(images, prompts, group_id):
        seen["by_name"] = group_id
        return [0.0] * len(prompts)

    class ByAttribute:
        groupwise = True

        def __call__(self, images, prompts, **columns):
            seen["by_attribute"] = columns
            return [0.0] * len(prompts)

    def pointwise(images, prompts, **columns):
        seen["pointwise"] = columns
        return [0.0] * len(prompts)

    rewards = RewardSet([by_name, ByAttribute(), pointwise])
    assert rewards.groupwise and not RewardSet(pointwise).groupwise
    assert RewardSet(RewardSet(by_name)).groupwise  # a set says it too
    columns = {"tag": ["a", "b", "c", "d"], "group_id": [7, 7, 9, 9]}
    rewards.score(images, PROMPTS, columns)
    assert seen["by_name"] == [7, 7, 9, 9] and seen["by_attribute"] == columns
    assert seen["pointwise"] == {"tag": columns["tag"]}
    with pytest.raises(ValueError, match=r"'by_name' compares the samples of a group .*'group_id', which training"):
        rewards.check_columns(["tag"])
    rewards.check_columns(["tag"], supplied=["group_id"])
    with pytest.raises(ValueError, match=r"\['group_id'\] hide"):
        rewards.check_columns(["tag", "group_id"], supplied=["group_id"])

    def deaf(images, prompts): ...

    deaf.groupwise = True
    with pytest.raises(TypeError, match="'deaf' says it is groupwise: it must have a parameter 'group_id'"):
        RewardSet(deaf)


def test_a_blocking_remote_reward_waits_beside_the_others(images):
    asked, computed = threading.Event(), threading.Event()

    class Server:
        remote = True
        name = "server"

        def __call__(self, images, prompts, tag):
            asked.set()
            assert computed.wait(10) and not torch.is_grad_enabled()
            return [float(t) for t in tag]

        def known_pair(self):
            computed.set()
            return torch.zeros(2, 3, 4, 4), ["", ""], {"tag": [1, 0]}

    def local(images, prompts):
        assert asked.wait(10)
        computed.set()
        return [1.0] * len(prompts)

    scores = RewardSet([local, Server()]).score(images, PROMPTS, {"tag": [1, 2, 3, 4]})
    assert scores.total.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert RewardSet(Server()).self_test() == {"server": (1.0, 0.0)}
    with pytest.raises(ValueError, match="'server' needs the prompt columns"):
        RewardSet(Server()).check_columns([])
    Server.differentiable = True
    with pytest.raises(TypeError, match="'server' says it is remote and differentiable"):
        RewardSet(Server())


def test_identity_is_the_fingerprint_where_there_is_one():
    class Model:
        name, fingerprint = "model", "rev1"

        def __call__(self, images, prompts): ...

    class NotYet(Model):
        name, fingerprint = "server", None  # it has not answered yet

    assert RewardSet({ones: 1.0, Model(): 0.5, NotYet(): 2.0}).identity == {
        "ones": 1.0,
        "model rev1": 0.5,
        "server": 2.0,
    }
    assert RewardSet([Model(), Model()]).identity == {"model rev1": 2.0}
    nested = {RewardSet({ones: 2.0, Model(): 1.0}): 0.5, ones: 1.0}
    assert RewardSet(nested).identity == {"ones": 2.0, "model rev1": 0.5}


def test_a_self_test_that_could_not_score_says_why():
    def known():
        return torch.zeros(2, 3, 4, 4), ["", ""], {}

    down = invalid_rows(1, reason="ConnectError")
    down.known_pair = known
    with pytest.raises(RewardError, match=r"self-test failed: it could not score its known samples: ConnectError\."):
        RewardSet(down).self_test()

    def backwards(images, prompts):
        return [0.25, 0.5]

    backwards.known_pair = known
    with pytest.raises(RewardError, match=r"0.25 for a good sample, 0.5 for a bad one; its weights"):
        RewardSet(backwards).self_test()


def test_reasons_come_through_nested_sets(images):
    rewards = RewardSet(RewardSet([invalid_rows(1), invalid_rows(1, 2, reason="no network"), ones], 1.0), 0.0)
    with pytest.raises(RewardError, match=r"Reasons: timeout; no network; no network\. "):
        rewards.score(images, PROMPTS)


def test_a_reward_that_is_only_logged_takes_no_sample_from_the_training():
    def sometimes(images, prompts):
        return RewardOutput(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]), {"reason": ["", "flat"]})

    scores = RewardSet({brightness: 1.0, sometimes: 0.0}).score(torch.rand(2, 3, 4, 4), ["a", "b"])
    assert scores.valid.tolist() == [True, True] and torch.isfinite(scores.total).all()
    assert scores.parts["sometimes"].isnan().tolist() == [False, True]
    with pytest.raises(RewardError, match=r"1 of 2 samples could not be scored .*flat"):  # it is still watched
        RewardSet({brightness: 1.0, sometimes: 0.0}, max_invalid_share=0.2).score(torch.rand(2, 3, 4, 4), ["a", "b"])

"""Rewards are called on a batch of samples while the next is sampled, and nothing else changes."""

import asyncio
import json
import threading

import pytest
import torch

from flowrl import FlowGRPO, FlowSDE
from flowrl.rewards import RewardError, RewardOutput, RewardSet
from flowrl.rollout import Prompt
from flowrl.samplers import SingleShift, Window
from flowrl.training.scoring import Scoring

SECONDS = 20  # how long a test waits for another thread; it is set off by an event, so this is never spent


def brightness(images, prompts):
    return images.flatten(1).mean(1)


def scoring_threads():
    return [t for t in threading.enumerate() if t.name == "flowrl-scoring"]


@pytest.fixture
def images():
    return torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))


both = pytest.mark.parametrize("thread", [True, False], ids=["thread", "no-thread"])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Rewards get a thread of their own, as when the generator is on a GPU."""
    monkeypatch.setattr("flowrl.training.trainer.Scoring", lambda *args, **kw: Scoring(*args, **kw | {"thread": True}))


def scored(rewards, images, size, prompts=None, thread=True):
    """`images` in chunks of `size` through a `Scoring`."""
    rewards = rewards if isinstance(rewards, RewardSet) else RewardSet(rewards)
    prompts = prompts or [Prompt(i, f"prompt {i}", {"row": i}) for i in range(len(images))]
    with Scoring(rewards, prompts, ["row"], thread=thread) as scoring:
        for chunk in images.split(size):
            scoring.add(chunk)
        return scoring.result()


# ------------------------------------------------------------------------------------------------- it overlaps


def count_forwards(trainer, then):
    """Calls `then(number of batches begun)` before every forward of the transformer."""
    steps, calls = trainer.sampler.steps, []

    def hook(module, args):
        calls.append(1)
        then(-(-len(calls) // steps))

    trainer.policy.module.register_forward_pre_hook(hook)


def test_a_batch_is_scored_while_the_next_is_sampled(make_trainer, as_on_a_gpu, tmp_path):
    third, order, begun = threading.Event(), [], []

    def patient(images, prompts):
        """Returns from the first batch of the second rollout only when its third is being sampled."""
        order.append((len(prompts), max(begun), threading.current_thread().name, torch.is_grad_enabled()))
        if max(begun) > 3:
            assert third.wait(SECONDS), "the third batch waited for the scores of the first"
        return brightness(images, prompts)

    def sampling(batch):
        if batch == 2 and batch not in begun:  # of the first rollout: models may be loading, nothing runs beside it
            assert [n for n, *_ in order] == [3]
        begun.append(batch)
        if batch == 6:
            third.set()

    trainer = make_trainer(tmp_path, rewards=patient, sample_batch_size=3)
    count_forwards(trainer, sampling)
    trainer.rollout(0)
    rollout, batch, *_ = trainer.rollout(1)
    assert [n for n, *_ in order] == [3, 3, 2] * 2 and {last for *_, last in order} == {False}
    assert {name for _, _, name, _ in order} == {"flowrl-scoring"}
    rows = torch.tensor(trainer.plan.rows(3, 1, 0)).argsort()
    assert torch.equal(batch.reward, brightness(rollout.media, None)[rows])
    assert not scoring_threads()


@both
def test_rewards_that_wait_do_so_together_while_others_compute(images, thread):
    """All three batches' requests are open before one is answered; beside them a reward computes."""
    opened, computed = asyncio.Event(), []
    waiting = 0

    async def server(images, prompts):
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            opened.set()
        await asyncio.wait_for(opened.wait(), SECONDS)
        return brightness(images, prompts)

    def local(images, prompts):
        computed.append(len(prompts))
        return brightness(images, prompts)

    scores = scored({server: 1.0, local: 0.5}, images, 5, thread=thread)
    assert computed == [5, 5, 2]
    assert torch.equal(scores.total, 1.5 * brightness(images, None))


# --------------------------------------------------------------------------------------------- nothing changes


def test_an_async_reward_answers_while_the_next_batch_is_sampled(make_trainer, tmp_path):
    third = threading.Event()

    async def server(images, prompts):
        assert await asyncio.to_thread(third.wait, SECONDS), "the third batch waited for the scores of the first"
        return brightness(images, prompts)

    trainer = make_trainer(tmp_path, rewards=server, sample_batch_size=3)
    count_forwards(trainer, lambda begun: third.set() if begun == 3 else None)
    rollout, batch, *_ = trainer.rollout(0)
    rows = torch.tensor(trainer.plan.rows(3, 0, 0)).argsort()
    assert torch.equal(batch.reward, brightness(rollout.media, None)[rows])


def test_on_the_cpu_nothing_computes_beside_the_sampling(make_trainer, tmp_path):
    threads = []

    def local(images, prompts):
        threads.append((threading.current_thread(), torch.is_grad_enabled()))
        return brightness(images, prompts)

    trainer = make_trainer(tmp_path, rewards=local, sample_batch_size=3)
    trainer.rollout(0)
    assert threads == [(threading.main_thread(), False)] * 3
    assert trainer.phase is None and trainer.seconds["reward"] > 0


@pytest.mark.parametrize("plan", [None, Window(2, (0, 3), scope="sample")], ids=["one-path", "several-paths"])
def test_images_and_scores_are_those_of_one_call(make_trainer, as_on_a_gpu, tmp_path, plan):
    async def red(images, prompts, tag):
        await asyncio.sleep(0)
        return images[:, 0].flatten(1).mean(1) + torch.tensor([t == "count" for t in tag])

    def partly(images, prompts):
        values = brightness(images, prompts)
        return RewardOutput(values, (255 * values).int() % 2 == 0)

    rewards = RewardSet({red: 2.0, partly: 1.0, "jpeg_compressibility": 0.5}, 1.0)
    sampler = FlowSDE(steps=4, noise_level=0.7, schedule=SingleShift(1.5), **({"plan": plan} if plan else {}))
    trainer = make_trainer(
        tmp_path, FlowGRPO(), rewards=rewards, sampler=sampler, sample_batch_size=3, max_invalid_share=1.0
    )
    rollout, batch, *_ = trainer.rollout(1)
    # As before there was an overlap: everything sampled, then decoded in batches of rows, then scored in one call.
    media = torch.cat([trainer.policy.decode(x) for x in rollout.latents.split(3)])
    assert torch.equal(rollout.media, media)
    texts, tags = [p.text for p in rollout.prompts], [p.metadata["tag"] for p in rollout.prompts]
    scores = rewards.score(media, texts, {"tag": tags})
    rows = torch.tensor(trainer.plan.rows(3, 1, 0)).argsort()
    assert 0 < scores.valid.sum() < 8
    assert torch.equal(batch.valid, scores.valid[rows])
    assert torch.equal(batch.reward.nan_to_num(), scores.total[rows].nan_to_num())


@both
def test_details_are_joined_and_missing_ones_are_none(images, thread):
    def judge(images, prompts, row):
        details = {"row": torch.tensor(row)} | ({"reason": [f"slow {i}" for i in row]} if 0 in row else {})
        return RewardOutput(brightness(images, prompts), torch.tensor([i != 1 for i in row]), details)

    found = scored(judge, images, 6, thread=thread).details["judge"]
    assert [int(i) for i in found["row"]] == list(range(12))
    assert found["reason"] == [f"slow {i}" for i in range(6)] + [None] * 6


# -------------------------------------------------------------------------------------------------- it fails


def bad_rows(answer):
    """A reward whose `answer` is given for rows 5 and 6."""

    def judge(images, prompts, row):
        values = brightness(images, prompts)
        valid = torch.ones(len(prompts), dtype=torch.bool)
        for i in {5, 6} & set(row):
            values, valid = answer(values, valid, row.index(i))
        return RewardOutput(values, valid)

    return judge


def nan(values, valid, i):
    values[i] = torch.nan
    return values, valid


def short(values, valid, i):
    return values[:3], valid


def raises(values, valid, i):
    raise ConnectionError("the judge is away")


def invalid(values, valid, i):
    return values, torch.zeros_like(valid)


@pytest.mark.parametrize(
    ("answer", "share", "message", "rows"),
    [
        (nan, 0.5, r"rows \[5, 6\], 2 of 12", [5, 6]),
        (short, 0.5, r"shape \[3\] for 4 images", [4, 5, 6, 7]),
        (raises, 0.5, "ConnectionError: the judge is away", [4, 5, 6, 7]),
        (invalid, 0.3, "4 of 12 samples could not be scored", [4, 5, 6, 7]),
    ],
)
@both
def test_errors_count_the_rows_of_the_whole_rollout(images, tmp_path, answer, share, message, rows, thread):
    with pytest.raises(RewardError, match=message) as failure:
        scored(RewardSet(bad_rows(answer), share), images, 4, thread=thread)
    assert failure.value.rows == rows and torch.equal(failure.value.images[rows], images[rows])
    saved = json.loads(failure.value.save(tmp_path).read_text())["samples"]
    assert [(s["row"], s["prompt"], s["columns"]) for s in saved] == [(i, f"prompt {i}", {"row": i}) for i in rows]
    assert not scoring_threads()


def test_the_invalid_share_is_of_the_whole_rollout(images):
    """A batch without a valid row is no error if the rollout has enough of them."""
    scores = scored(RewardSet(bad_rows(invalid), 0.5), images, 4)
    assert scores.valid.tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_broken_images_are_named_by_their_row(images):
    images[7, 1, 2, 3] = torch.inf
    with pytest.raises(RewardError, match=r"images \[7\] hold NaN or inf") as failure:
        scored(brightness, images, 4)
    assert failure.value.rows == [7] and failure.value.reward == "(input)"


def test_a_failed_reward_ends_the_sampling_and_saves_its_batch(make_trainer, as_on_a_gpu, tmp_path):
    failed, begun = threading.Event(), []

    def judge(images, prompts):
        if max(begun) <= 4:
            return brightness(images, prompts)
        failed.set()
        raise ConnectionError("the judge is away")

    def sampling(batch):
        begun.append(batch)
        if batch == 6:  # the second of the second rollout
            assert failed.wait(SECONDS)
            for thread in scoring_threads():
                thread.join(SECONDS)

    trainer = make_trainer(tmp_path, rewards=judge, sample_batch_size=2)
    count_forwards(trainer, sampling)
    trainer.rollout(0)
    with pytest.raises(RewardError, match="the judge is away"):
        trainer.rollout(1)
    assert max(begun) == 6 and not scoring_threads()  # of eight
    saved = json.loads((tmp_path / "failed" / "iteration-000001-0" / "error.json").read_text())
    assert [s["row"] for s in saved["samples"]] == [0, 1]


@both
def test_what_still_waits_is_given_up_with_the_first_failure(images, thread):
    cancelled = threading.Event()

    async def judge(images, prompts, row):
        if 0 in row:
            raise ConnectionError("the judge is away")
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with pytest.raises(RewardError, match="the judge is away") as failure:
        scored(judge, images, 4, thread=thread)
    assert failure.value.rows == [0, 1, 2, 3]
    assert cancelled.wait(SECONDS)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_error_of_the_sampling_leaves_no_thread_behind(images, error):
    """After an error the running call is awaited; after Ctrl-C it is not, for it may take long."""
    running, release, calls = threading.Event(), threading.Event(), []

    def judge(images, prompts):
        calls.append(len(prompts))
        running.set()
        assert release.wait(SECONDS)
        return brightness(images, prompts)

    with pytest.raises(error), Scoring(RewardSet(judge), [Prompt(0, "a")] * 12, [], thread=True) as scoring:
        for chunk in images.split(4):
            scoring.add(chunk)
        assert running.wait(SECONDS)
        if error is Stop:
            release.set()
        raise error
    if error is Stop:
        assert not scoring_threads()
    (thread,) = scoring_threads() or [None]
    release.set()
    if thread is not None:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert calls == [4] or error is Stop  # after Ctrl-C no further batch was begun


def test_phases_within_phases_are_timed_once(make_trainer, tmp_path, monkeypatch):
    trainer, now = make_trainer(tmp_path), iter(range(100))
    monkeypatch.setattr("flowrl.training.trainer.time.perf_counter", lambda: next(now))
    with trainer._timed("rollout"):  # 0
        with trainer._timed("decode"):  # 1 to 2
            assert trainer.phase == "decode"
        assert trainer.phase == "rollout"
    assert trainer.seconds == {"decode": 1, "rollout": 2}  # 3 in all

"""The world "glyphs": reader against renderer, split, shipped model, a short run with the real reader."""

import json

import numpy as np
import pytest
import torch

from flowrl.miniature.glyphs import WEIGHTS, pretrain, world
from flowrl.miniature.glyphs.reward import glyphs, glyphs_exact
from flowrl.rewards.ocr import strict_score
from flowrl.training.prompts import WORLDS, PromptSet
from flowrl.training.recipe import ModelConfig, build_trainer, load_recipe

pytest.importorskip("rapidocr", reason="needs the extra ocr")


def _drawn(count, seed):
    """Random words of all lengths, their images [count, 3, 24, 48] and prompts."""
    rng = np.random.default_rng(seed)
    words = []
    for _ in range(count):
        some = world.words(int(rng.choice(list(world.TAGS))))
        words.append(some[rng.integers(len(some))])
    images = torch.from_numpy(np.stack([world.render(w, rng) for w in words])).permute(0, 3, 1, 2) / 255
    return words, images, [world.caption(w) for w in words]


def test_the_reader_agrees_with_the_renderer():
    words, images, prompts = _drawn(80, seed=2)
    out = glyphs_exact(images, prompts)
    assert out.values.mean() >= 0.98
    assert out.details["text"][0] == words[0].lower()


def test_rewards_of_wrong_words_follow_the_edit_distance():
    image = torch.from_numpy(world.render("CAB", np.random.default_rng(0))).permute(2, 0, 1)[None] / 255
    for word, value in (("CAB", 1), ("CAN", 2 / 3), ("CABS", 3 / 4), ("HEN", 0)):
        prompts = [world.caption(word)]
        assert glyphs(image, prompts).values.item() == pytest.approx(value)
        assert glyphs_exact(image, prompts).values.item() == (word == "CAB")
    blank = torch.ones_like(image)
    assert glyphs(blank, [world.caption("CAB")]).values.item() == 0


def test_held_out_words_are_in_neither_the_rl_prompts_nor_the_pretraining():
    train, test = world.train_prompts(), world.held_out_prompts()
    held_out = {p["prompt"] for p in test}
    assert len(held_out) == len(test) == sum(world.HELD_OUT.values())
    assert held_out.isdisjoint(p["prompt"] for p in train)
    for length in world.TAGS:
        others = world.words(length)
        assert len(set(others)) == len(others) == len(world.LETTERS) ** length - world.HELD_OUT[length]
        assert held_out.isdisjoint(world.caption(w) for w in others)
    _, captions = pretrain.scenes(300, 5, 0)
    assert held_out.isdisjoint(captions)


def test_prompts_carry_their_length_and_every_length_is_drawn_equally_often():
    prompts = PromptSet("glyphs/train")
    shares = {tag: sum(p.weight for p in prompts if p.metadata["tag"] == tag) for tag in world.TAGS.values()}
    assert all(s == pytest.approx(1) for s in shares.values())
    for p in [*prompts, *PromptSet("glyphs/test")]:
        assert world.TAGS[len(p.text.split('"')[1])] == p.metadata["tag"]


def test_a_word_too_long_for_the_canvas_is_refused():
    with pytest.raises(ValueError, match="'CABEN' does not fit on 48 pixels: at most 4 letters"):
        world.render("CABEN", np.random.default_rng(0))


def test_the_tokenizer_gives_the_letters_in_order():
    vocabulary = pretrain.tokenizer()
    for entry in world.train_prompts() + world.held_out_prompts():
        *first, last = entry["prompt"].split('"')[1].lower()
        tokens = vocabulary.tokenize(entry["prompt"])
        assert tokens == ["the</w>", "word</w>", '"</w>', *first, f"{last}</w>", '"</w>']
        assert len(tokens) + 2 <= vocabulary.model_max_length


def test_a_bare_name_brings_the_canvas():
    model = ModelConfig.of("glyphs")
    assert (model.height, model.width) == (world.HEIGHT, world.WIDTH)
    assert model.location == str(WEIGHTS)
    for name in ("glyphs-nft", "glyphs-flow-grpo"):
        assert load_recipe(name).model == model
    assert WORLDS["glyphs"]["max_sequence_length"] == 0


def test_shipped_model_is_small_stock_and_draws_on_white():
    from diffusers import StableDiffusion3Pipeline

    assert sum(f.stat().st_size for f in WEIGHTS.rglob("*") if f.is_file()) <= 15e6
    pipe = StableDiffusion3Pipeline.from_pretrained(WEIGHTS, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        'the word "CAB"',
        height=world.HEIGHT,
        width=world.WIDTH,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images[0]
    assert image.shape == (24, 48, 3)
    assert image[0, 0].min() > 0.9 and image[-1, -1].min() > 0.9
    assert image.min() < 0.6  # ink


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run of two iterations with the real reader, and whether its weights moved."""
    folder = tmp_path_factory.mktemp("run")
    small = ["iterations=2", "prompts_per_iteration=2", "group_size=4", "sample_batch_size=8", "micro_batch_size=8"]
    small += ["eval_every=0", "eval_images_per_prompt=1", "log_images_every=0", f"output_dir={folder}"]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in world.held_out_prompts()[::2]))
    overrides = [f"eval_prompts={prompts}", *(f"training.{s}" for s in small)]
    trainer = build_trainer(load_recipe("glyphs-nft", overrides))
    before = {n: p.detach().clone() for n, p in trainer.policy.trainable().items()}
    trainer.train()
    return folder, any((p != before[n]).any() for n, p in trainer.policy.trainable().items())


def test_a_short_run_with_the_real_reader_trains_and_reports_every_length(run):
    folder, moved = run
    assert moved
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    after = json.loads((folder / "after.json").read_text())
    assert set(after["per_task"]) == set(world.TAGS.values())
    assert set(after["rewards"]) == {"glyphs", "glyphs_exact"}


def test_the_base_reads_better_than_chance_on_held_out_words(run):
    before = json.loads((run[0] / "before.json").read_text())
    words = [
        [p["prompt"].split('"')[1] for p in world.held_out_prompts() if p["tag"] == t] for t in world.TAGS.values()
    ]
    chance = np.mean([strict_score(a, b) for some in words for a, b in zip(some, some[1:] + some[:1], strict=True)])
    assert chance < 0.3
    assert 0.5 < before["rewards"]["glyphs"] < 0.95  # and leaves room for RL
    assert before["rewards"]["glyphs_exact"] > 0.15

import builtins
import logging
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrl import FlowGRPO, FlowSDE, Trainer, TrainingArguments
from flowrl.rewards import OCRReward, RewardSet, gate, scaled
from flowrl.rewards.ocr import _reader, flowgrpo_score, quoted, read, read_line, strict_score
from flowrl.training.prompts import PromptSet

pytest.importorskip("rapidocr", reason="needs the extra ocr")

FONT = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"  # has accents, unlike Pillow's default
LINE = OCRReward(single_line=True)


def draw(*lines, width=64, height=32, size=20, ink="black", paper="white"):
    image = Image.new("RGB", (width, height), paper)
    for i, line in enumerate(lines):
        middle = (width / 2, height * (i + 0.5) / len(lines))
        ImageDraw.Draw(image).text(middle, line, ink, ImageFont.truetype(FONT, size), anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def sign(text):
    return f'a sign that says "{text}"'


# scoring


@pytest.mark.parametrize(
    ("text", "target", "flowgrpo", "strict"),
    [
        ("open", "open", 1, 1),
        ("opened", "open", 1, 4 / 6),  # junk beside it is free only in Flow-GRPO's
        ("openopen", "open", 1, 0.5),
        ("opwn", "open", 0.75, 0.75),
        ("op", "open", 0.5, 0.5),
        ("", "open", 0, 0),
        ("xopwnyzzzz", "open", 0, 0.3),  # 7 edits, capped at the target's 4
        ("café", "cafe", 0.75, 0.75),
    ],
)
def test_known_scores(text, target, flowgrpo, strict):
    assert flowgrpo_score(text, target) == pytest.approx(flowgrpo)
    assert strict_score(text, target) == pytest.approx(strict)


def test_target_is_the_first_quoted_text_without_spaces_in_lower_case():
    assert quoted('a shop "Hello  Big\u3000World" and "other"') == "hellobigworld"
    assert quoted('a sign "CAFE\u0301"') == quoted('a sign "café"') == "café"  # one letter, however it is encoded


@pytest.mark.parametrize("prompt", ["a cat", 'a "cat', 'a sign ""', 'a sign "  "', "a “cat”"])
def test_prompts_without_a_text_are_refused_before_training(prompt):
    prompts = [p.text for p in PromptSet([sign("OK"), prompt])]
    for reward in ("ocr", "ocr@strict", OCRReward(), scaled("ocr", 2.0), gate("ocr", OCRReward()), [RewardSet("ocr")]):
        RewardSet(reward).check_prompts(prompts[:1])
        with pytest.raises(ValueError, match="double quotes") as error:
            RewardSet(reward).check_prompts(prompts)
        assert prompt in str(error.value)
    with pytest.raises(ValueError, match="double quotes"):
        LINE(draw("CAT")[None], [prompt])


@pytest.mark.parametrize("prompts", [([sign("OK"), "a cat"], None), ([sign("OK")], ["a cat"])])
def test_the_trainer_refuses_them_before_it_loads_a_model(monkeypatch, tmp_path, prompts):
    monkeypatch.setattr("flowrl.training.trainer.load_pipeline", lambda *a, **kw: pytest.fail("a model was loaded"))
    args = TrainingArguments(output_dir=str(tmp_path / "run"), prompts_per_iteration=1)
    with pytest.raises(ValueError, match=r"double quotes.*'a cat'"):
        Trainer("no/model", FlowGRPO(), FlowSDE(), LINE, prompts[0], eval_prompts=prompts[1], args=args)


# reading


@pytest.mark.parametrize("single_line", [True, False])
def test_right_word_wrong_word_and_blank(single_line):
    images = torch.stack([draw("CAT"), draw("CAR"), draw("DOG"), draw("")])
    out = OCRReward(single_line=single_line)(images, [sign("CAT")] * 4)
    assert out.details["text"] == ["cat", "car", "dog", ""]
    assert out.values.tolist() == pytest.approx([1, 2 / 3, 0, 0])
    strict = OCRReward(strict=True, single_line=single_line)(images, [sign("Cat")] * 4)
    assert strict.values.tolist() == pytest.approx([1, 2 / 3, 0, 0])


@pytest.mark.parametrize("name", ["ocr", "ocr@strict"])
def test_self_test_by_name(name):
    assert RewardSet(name).self_test() == {name: (1.0, 0.0)}
    assert RewardSet(name).range == (0.0, 1.0)


def test_self_test_of_a_single_line():
    assert RewardSet(LINE).self_test() == {"ocr": (1.0, 0.0)}


def test_lines_are_joined_in_reading_order_and_strict_sees_the_rest():
    image = draw("Grand", "OPENING", "today", width=160, height=150, size=28)[None]
    assert OCRReward()(image, [sign("grand opening")]).values.item() == 1
    assert OCRReward(strict=True)(image, [sign("grand opening")]).values.item() == pytest.approx(12 / 17)
    assert OCRReward(strict=True)(image, [sign("grand opening today")]).values.item() == 1


@pytest.mark.parametrize(("reward", "shares"), [(OCRReward(), (0, 0.5, 0.6)), (LINE, (0, 0.74, 1))])
def test_the_value_falls_with_noise(reward, shares):
    prompts = [sign(word) for word in ("FLOW", "JUMP", "KEY", "SUN")]
    clean = torch.stack([draw(quoted(prompt).upper()) for prompt in prompts])
    noise = torch.rand(clean.shape, generator=torch.Generator().manual_seed(0))
    first, middle, last = (reward(clean.lerp(noise, share), prompts).values.mean().item() for share in shares)
    assert first == 1 > middle > last == 0


def test_values_do_not_depend_on_the_batch():
    words = ["A", "OX", "CAT", "JUMPS", "", "QUIZ"]
    images = torch.stack([draw(word) for word in words])
    noisy = (images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    for reader in (read, read_line):
        together = reader(noisy)
        assert together == [reader(image[None])[0] for image in noisy]
        assert together[::-1] == reader(noisy.flip(0))


@pytest.mark.parametrize(("width", "height", "size"), [(96, 32, 22), (64, 24, 16), (400, 32, 24), (300, 96, 60)])
def test_other_sizes(width, height, size):
    assert read_line(draw("HELLO", width=width, height=height, size=size)[None]) == ["HELLO"]


def test_extreme_shapes_are_read_as_nothing():
    assert read_line(torch.ones(1, 3, 64, 1)) == [""]
    assert read(torch.ones(1, 3, 1, 1)) == read(torch.zeros(1, 3, 700, 20)) == [""]


@pytest.mark.parametrize(("ink", "paper"), [("#888", "#ccc"), ("white", "black"), ("#c00", "#fe0"), ("blue", "white")])
def test_colours_and_grey(ink, paper):
    image = draw("OPEN", width=96, size=24, ink=ink, paper=paper)[None]
    assert read(image) == read_line(image) == ["OPEN"]


def test_accents_are_read():
    image = draw("Café Über", width=200, height=48, size=32)[None]
    assert OCRReward(strict=True)(image, [sign("CAFÉ ÜBER")]).values.item() == 1


def test_other_dtypes_and_bad_images():
    assert read_line(draw("CAT")[None].bfloat16()) == ["CAT"]
    with pytest.raises(ValueError, match="images must be"):
        LINE(torch.ones(1, 1, 32, 64), [sign("CAT")])


def test_missing_package_names_the_extra(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "rapidocr":
            raise ModuleNotFoundError("No module named 'rapidocr'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'flowrl-align\[ocr\]'"):
        _reader.__wrapped__(True)


def test_fingerprint_names_the_package_and_logging_is_left_alone():
    assert OCRReward().fingerprint.startswith("rapidocr 3.")
    assert LINE.fingerprint != OCRReward().fingerprint
    level = logging.getLogger().level
    read(torch.ones(1, 3, 32, 32))
    assert logging.getLogger().level == level

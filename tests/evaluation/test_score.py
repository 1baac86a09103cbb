"""`flowrl score`: a folder of images in, numbers out."""

import csv
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flowrl.cli import _rewards, main
from flowrl.evaluation import score
from flowrl.evaluation.score import read_folder, read_image, rewards_for, score_images, summary
from flowrl.rewards import RewardError, RewardOutput, jpeg_compressibility

RNG = np.random.default_rng(0)


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def matches(images, prompts, target):
    """1 where the column and the prompt agree; a column that is None cannot be judged."""
    values = [float(t in p) if t else 0.0 for p, t in zip(prompts, target, strict=True)]
    return RewardOutput(
        [*values], [t is not None for t in target], {"reason": ["" if t else "no target" for t in target]}
    )


def write(path, pixels=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(noise() if pixels is None else pixels)
    image.save(path, **options)
    return path


def noise(height=8, width=6, channels=3):
    return RNG.integers(0, 256, (height, width, channels), dtype=np.uint8)


def lines(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# ------------------------------------------------------------------------------------------------------- folders


def test_an_image_folder_with_metadata(tmp_path, caplog):
    for name in ("b.png", "a.jpg", "sub/c.webp", "extra.png"):
        write(tmp_path / name)
    lines(
        tmp_path / "metadata.jsonl",
        {"file_name": "sub/c.webp", "prompt": "third", "tag": 3},
        {"file_name": "b.png", "prompt": "second"},
        {"file_name": "a.jpg", "prompt": "first"},
    )
    with caplog.at_level(logging.WARNING):
        found = read_folder(tmp_path)
    assert [(f.file, f.prompt.text) for f in found] == [
        ("sub/c.webp", "third"),
        ("b.png", "second"),
        ("a.jpg", "first"),
    ]
    assert found[0].prompt.metadata["tag"] == 3
    assert "1 images in" in caplog.text and "extra.png" in caplog.text
    elsewhere = lines(tmp_path / "other.jsonl", {"file_name": "extra.png", "prompt": "fourth"})
    assert [f.prompt.text for f in read_folder(tmp_path, prompts=elsewhere)] == ["fourth"]
    assert [f.file for f in read_folder(tmp_path, prompt="x")] == ["a.jpg", "b.png", "extra.png", "sub/c.webp"]


def test_the_layout_of_geneval(tmp_path):
    for i, text in enumerate(("a photo of a cat", "a photo of two dogs")):
        for j in range(2):
            write(tmp_path / f"{i:05d}/samples/{j:05d}.png")
        lines(
            tmp_path / f"{i:05d}/metadata.jsonl", {"tag": "t", "prompt": text, "include": [{"class": "x", "count": 1}]}
        )
    found = read_folder(tmp_path)
    assert [f.file for f in found] == [f"{i:05d}/samples/{j:05d}.png" for i in range(2) for j in range(2)]
    assert [f.prompt.text for f in found[1:3]] == ["a photo of a cat", "a photo of two dogs"]
    assert found[3].prompt.metadata["include"] == [{"class": "x", "count": 1}]


def test_folders_that_cannot_be_scored(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no metadata.jsonl with a line .* give one --prompt"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match="no images in"):
        read_folder(tmp_path, prompt="x")
    lines(tmp_path / "metadata.jsonl", {"file_name": "a.png", "prompt": "x"})
    with pytest.raises(FileNotFoundError, match=r"1 of 1 images are not there, such as .*a.png"):
        read_folder(tmp_path)
    lines(tmp_path / "metadata.jsonl", {"file_name": "a.png"})
    with pytest.raises(ValueError, match=r'metadata.jsonl, line 1: a prompt is .* the key "prompt"'):
        read_folder(tmp_path)
    lines(tmp_path / "metadata.jsonl", {"prompt": "x"})
    with pytest.raises(ValueError, match=r"'x' has no file_name, and there are no images in .*samples"):
        read_folder(tmp_path)


def test_rewards_are_checked_before_anything_is_read(tmp_path):
    from flowrl.rewards import ranked

    write(tmp_path / "a.png")
    images = read_folder(tmp_path, prompt="x")
    with pytest.raises(ValueError, match=r"'matches' needs the prompt columns \['target'\]"):
        rewards_for(matches, images)
    lines(tmp_path / "metadata.jsonl", {"file_name": "a.png", "prompt": "x", "group_id": 1})
    with pytest.raises(ValueError, match="compares the samples of a group"):
        rewards_for(ranked(brightness), read_folder(tmp_path))


# --------------------------------------------------------------------------------------------------------- pixels


def test_what_becomes_rgb(tmp_path):
    rgb = noise()
    opaque = np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])
    grey = rgb[..., 0]
    for image, expected in (
        (Image.fromarray(rgb), rgb),
        (Image.fromarray(opaque), rgb),
        (Image.fromarray(grey), np.dstack([grey] * 3)),
        (Image.fromarray(grey).convert("1"), None),
        (Image.fromarray(rgb).convert("P"), np.asarray(Image.fromarray(rgb).convert("P").convert("RGB"))),
    ):
        pixels = read_image(write(tmp_path / "x.png", image))
        assert pixels.dtype == np.uint8 and pixels.shape == (8, 6, 3)
        assert expected is None or np.array_equal(pixels, expected)
    assert read_image(write(tmp_path / "x.jpg", Image.fromarray(rgb).convert("CMYK"))).shape == (8, 6, 3)
    turned = Image.Exif()
    turned[0x0112] = 6  # stored lying down
    assert np.array_equal(read_image(write(tmp_path / "y.png", rgb, exif=turned)), np.rot90(rgb, -1))


def test_what_is_refused(tmp_path):
    clear = np.dstack([noise(), np.full((8, 6), 254, np.uint8)])
    paletted = Image.fromarray(noise()).convert("P")
    for name, image, options, reason in (
        ("alpha.png", clear, {}, "transparent pixels"),
        ("palette.png", paletted, {"transparency": int(paletted.getpixel((0, 0)))}, "transparent pixels"),
        ("deep.png", Image.fromarray(np.zeros((4, 4), np.uint16)), {}, "mode I;16 has no 8-bit RGB"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_image(write(tmp_path / name, image, **options))
    whole = write(tmp_path / "cut.png", noise(64, 64)).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no image"):
        (tmp_path / "cut.png").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            read_image(tmp_path / "cut.png")


# -------------------------------------------------------------------------------------------------------- scores


@pytest.fixture
def folder(tmp_path):
    """Images of two sizes, one broken, one that a reward cannot judge."""
    entries = []
    for i, (height, target) in enumerate([(8, "cat"), (12, "dog"), (8, "cat"), (8, None), (12, "cat")]):
        write(tmp_path / f"in/{i}.png", noise(height))
        entries.append({"file_name": f"{i}.png", "prompt": f"a cat, number {i}", "target": target})
    (tmp_path / "in/2.png").write_bytes(b"broken")
    lines(tmp_path / "in/metadata.jsonl", *entries)
    return tmp_path / "in"


def test_rows_summary_and_files(folder, tmp_path):
    seen = []

    def remember(images, prompts):
        seen.append((tuple(images.shape), list(prompts)))
        return brightness(images, prompts)

    images = read_folder(folder)
    rewards = rewards_for([remember, matches], images)
    rows = score_images(images, rewards, tmp_path / "out/rows.jsonl", batch_size=2, device="cpu")
    # Batches of one size, in the order of the folder.
    assert [(shape[0], shape[2]) for shape, _ in seen] == [(2, 8), (2, 12)]
    assert seen[0][1] == ["a cat, number 0", "a cat, number 3"]
    assert [row["file_name"] for row in rows] == [f"{i}.png" for i in range(5)]
    pixels = np.asarray(Image.open(folder / "0.png"), np.float32) / 255
    assert rows[0]["remember"] == pytest.approx(pixels.mean(), abs=1e-6)
    assert [row["matches"] for row in rows] == [1.0, 0.0, None, None, 1.0]
    assert rows[2]["remember"] is None and rows[2]["reason"].startswith("cannot be read")
    assert rows[3]["remember"] is not None and rows[3]["reason"] == "matches: no target"
    written = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert sorted(written, key=lambda row: row["file_name"]) == rows
    bright, judged = summary(rows, rewards)
    values = np.array([row["remember"] for row in rows if row["remember"] is not None])
    assert (bright["images"], bright["invalid"]) == (4, 1) and (judged["images"], judged["invalid"]) == (3, 2)
    assert [bright[k] for k in ("mean", "std", "min", "max")] == pytest.approx(
        [values.mean(), values.std(), values.min(), values.max()]
    )
    assert judged["mean"] == pytest.approx(2 / 3)


def test_what_was_scored_before_a_failure_is_kept(folder, tmp_path):
    def fails_on_large(images, prompts):
        if images.shape[2] > 8:
            raise OSError("gone")
        return brightness(images, prompts)

    images = read_folder(folder)
    with pytest.raises(RewardError, match="raised OSError: gone"):
        score_images(images, rewards_for(fails_on_large, images), tmp_path / "rows.csv", batch_size=2, device="cpu")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["file_name"] for row in rows] == ["2.png", "0.png", "3.png"]
    assert rows[0]["fails_on_large"] == "" and float(rows[1]["fails_on_large"]) > 0


def test_images_of_many_sizes_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(score, "WAITING", 2)
    heights = [8, 9, 9, 10, 11, 12, 13]
    for i, height in enumerate(heights):
        write(tmp_path / f"{i}.png", noise(height))
    batches = [[index for index, _ in batch] for batch in score._batches(read_folder(tmp_path, prompt="x"), 2, None)]
    assert batches == [[1, 2], [0], [3], [4], [5], [6]]


def test_a_broken_reward_is_found_by_its_self_test(folder, tmp_path):
    class Broken:
        name = "broken"

        def __call__(self, images, prompts):
            return [0.0] * len(prompts)

        def known_pair(self):
            import torch

            return torch.zeros(2, 3, 4, 4), ["", ""], {}

    images = read_folder(folder)
    (tmp_path / "rows.csv").write_text("of an earlier run")
    with pytest.raises(RewardError, match="self-test failed"):
        score_images(images, rewards_for(Broken(), images), tmp_path / "rows.csv", device="cpu")
    assert (tmp_path / "rows.csv").read_text() == "of an earlier run"


def test_command(folder, tmp_path, capsys):
    names = "jpeg_compressibility,jpeg_incompressibility"
    output = tmp_path / "rows.csv"
    assert main(["score", str(folder), "--rewards", names, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split() == ["reward", "images", "invalid", "mean", "std", "min", "max"]
    assert "1 of 5 images were not scored by all, such as: cannot be read" in shown.err
    assert main(["score", str(folder), "--rewards", names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 5 and found["rewards"][0]["invalid"] == 1
    import torch

    image = torch.from_numpy(np.array(Image.open(folder / "1.png"))).permute(2, 0, 1)[None] / 255
    rows = {row["file_name"]: row for row in csv.DictReader(output.open())}
    assert float(rows["1.png"]["jpeg_compressibility"]) == pytest.approx(jpeg_compressibility(image, [""])[0])
    assert found["rewards"][0]["min"] == pytest.approx(
        min(float(r["jpeg_compressibility"]) for r in rows.values() if r["jpeg_compressibility"])
    )


def test_command_errors(folder, tmp_path, capsys, monkeypatch):
    for arguments, message in (
        ([str(folder), "--rewards", "jpeg_compresibility"], "did you mean 'jpeg_compressibility'"),
        ([str(tmp_path / "no"), "--rewards", "jpeg_compressibility"], "no folder"),
        ([str(folder), "--rewards", "jpeg_compressibility", "--output", "x.txt"], "must be a .jsonl or .csv file"),
    ):
        assert main(["score", *arguments]) == 2
        assert message in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.evaluation.geneval.processes", lambda: SimpleNamespace(num_processes=2))
        assert main(["score", str(folder), "--rewards", "jpeg_compressibility"]) == 2
        assert "works in one process: start it without torchrun" in capsys.readouterr().err
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.png").write_bytes(b"broken")
    assert main(["score", str(tmp_path / "one"), "--rewards", "jpeg_compressibility", "--prompt", ""]) == 1
    assert _rewards("remote@http://a:1,http://b:2, x ,m:f") == ["remote@http://a:1,http://b:2", "x", "m:f"]

import io

import pytest
import torch

from flowrl.rewards import RewardSet, jpeg_compressibility, jpeg_incompressibility, to_pil


def test_size_is_that_of_the_file():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    buffer = io.BytesIO()
    to_pil(images)[1].save(buffer, format="JPEG", quality=95)
    assert jpeg_compressibility(images, ["", ""])[1] == pytest.approx(-len(buffer.getvalue()) / 1000 / 500)


def test_flat_images_compress_better_and_the_two_are_opposite():
    noise = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    images = torch.cat([torch.full_like(noise, 0.5), noise])
    flat, noisy = jpeg_compressibility(images, ["", ""])
    assert noisy < flat < 0
    assert jpeg_incompressibility(images, ["", ""]) == [-flat, -noisy]
    scores = RewardSet({"jpeg_compressibility": 1.0, "jpeg_incompressibility": 1.0}).score(images, ["", ""])
    assert scores.total.tolist() == [0.0, 0.0]


def test_self_tests():
    report = RewardSet(["jpeg_compressibility", "jpeg_incompressibility"]).self_test()
    (flat, noise), (large, small) = report.values()
    assert flat > noise and (large, small) == (-noise, -flat)

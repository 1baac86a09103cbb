import io
import sys
import urllib.error

import numpy as np
import pytest
import torch
from scipy.ndimage import correlate
from scipy.special import gamma

from flowrl.rewards import RewardSet, to_pil
from flowrl.rewards.quality import BrisqueReward

pytest.importorskip("piq", reason="the BRISQUE reward is piq's, in the extra `quality`")

# The least and greatest value of each of the 36 features in BRISQUE's training set, from its release.
LOW = """0.338 0.017204 0.236 -0.123884 0.000155 0.001122 0.244 -0.123586 0.000152 0.000975 0.249 -0.135687 0.000174
0.000913 0.258 -0.143408 0.000179 0.000888 0.471 0.012809 0.218 -0.094876 1.5e-5 0.001272 0.222 -0.115772 1.6e-5
0.001374 0.227 -0.117188 3e-5 0.001122 0.228 -0.12243 2.8e-5 0.001118"""
HIGH = """10 0.806612 1.642 0.20293 0.712298 0.470257 1.641 0.179083 0.710456 0.470984 1.555 0.100858 0.684173 0.534174
1.561 0.100486 0.685696 0.536508 3.264 0.703171 1.046 0.187459 0.442057 0.40803 1.042 0.162604 0.444362 0.40243 0.996
0.098323 0.531903 0.369589 0.99 0.098658 0.530092 0.370399"""


# An independent reading of Mittal et al. (2012), with the choices of the authors' MATLAB release.


def half(n):
    """The matrix [n // 2, n] of MATLAB's bicubic imresize: antialiased, mirrored at the ends."""
    matrix = np.zeros((n // 2, n))
    for row in range(n // 2):
        centre = 2 * row + 0.5
        taps = np.arange(2 * row - 4, 2 * row + 6)
        x = np.abs(taps - centre) / 2
        near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        weights = np.where(x <= 1, near, np.where(x <= 2, far, 0))
        mirrored = np.where(taps < 0, -taps - 1, np.where(taps >= n, 2 * n - 1 - taps, taps))
        np.add.at(matrix[row], mirrored, weights / weights.sum())
    return matrix


def features(grey):
    """The 18 features of one scale."""
    x = np.arange(-3, 4)
    window = np.exp(-(x[:, None] ** 2 + x**2) / (2 * (7 / 6) ** 2))
    window /= window.sum()
    mean = correlate(grey, window, mode="constant")
    spread = np.sqrt(np.abs(correlate(grey**2, window, mode="constant") - mean**2))
    mscn = (grey - mean) / (spread + 1)
    shapes = np.arange(0.2, 10.0005, 0.001)
    ratios = gamma(2 / shapes) ** 2 / (gamma(1 / shapes) * gamma(3 / shapes))
    symmetric = np.abs(mscn).mean() ** 2 / (mscn**2).mean()
    found = [shapes[np.abs(1 / ratios - 1 / symmetric).argmin()], (mscn**2).mean()]
    for down, right in ((0, 1), (1, 0), (1, 1), (-1, 1)):
        pair = mscn * np.roll(mscn, (down, right), (0, 1))
        left, right = (np.sqrt((side**2).mean()) for side in (pair[pair < 0], pair[pair > 0]))
        g = left / right
        ratio = np.abs(pair).mean() ** 2 / (pair**2).mean() * (g**3 + 1) * (g + 1) / (g**2 + 1) ** 2
        shape = shapes[np.abs(ratios - ratio).argmin()]
        mean = (right - left) * gamma(2 / shape) / np.sqrt(gamma(1 / shape) * gamma(3 / shape))
        found += [shape, mean, left**2, right**2]
    return found


def brisque(image, coefficients, vectors):
    """The score of an image [3, H, W] in [0, 1]."""
    pixels = np.asarray(to_pil(image[None])[0], dtype=float)
    grey = np.round(pixels @ [0.299, 0.587, 0.114])
    small = half(grey.shape[0]) @ grey @ half(grey.shape[1]).T
    low, high = (np.array(text.split(), dtype=float) for text in (LOW, HIGH))
    scaled = 2 * (np.array(features(grey) + features(small)) - low) / (high - low) - 1
    return coefficients.numpy() @ np.exp(-0.05 * ((scaled - vectors.numpy()) ** 2).sum(1)) + 153.591


@pytest.fixture
def vectors():
    """Random support vectors around the middle of the features."""
    generator = torch.Generator().manual_seed(0)
    vectors = 0.5 * torch.randn(12, 36, generator=generator)
    return 100 * torch.randn(12, generator=generator), vectors


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder in which `torch.hub` keeps checkpoints."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def weights(home, vectors):
    path = home / "brisque_svm_weights.pt"
    torch.save(vectors, path)
    return path


@pytest.fixture
def images():
    """Clouds, clouds with noise, coarse static, fine static; 40 x 52."""
    generator = torch.Generator().manual_seed(0)
    clouds = BrisqueReward().known_pair()[0][0, :, :40, :52]
    noise = torch.randn(3, 40, 52, generator=generator)
    coarse = torch.rand(3, 10, 13, generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    return torch.stack([clouds, (clouds + 0.1 * noise).clamp(0, 1), coarse, (0.5 + 0.1 * noise).clamp(0, 1)])


def test_the_value_is_minus_a_hundredth_of_an_independent_brisque(weights, vectors, images):
    found = RewardSet("brisque").score(images, [""] * 4)
    expected = torch.tensor([-brisque(image, *vectors) / 100 for image in images]).float()
    assert expected.std() > 0.1
    assert torch.allclose(found.total, expected, atol=5e-4)  # a grey level of exactly .5 may round either way
    assert found.valid.all() and not RewardSet("brisque").differentiable


def test_flat_images_are_invalid_and_others_keep_their_value(weights, images):
    alone = BrisqueReward()(images, [""] * 4).values
    flat = torch.full((1, 3, 40, 52), 0.5)
    out = BrisqueReward()(torch.cat([images[:2], flat, images[2:]]), [""] * 5)
    assert out.valid.tolist() == [True, True, False, True, True] and torch.equal(out.values[out.valid], alone)
    assert "BRISQUE cannot score it: Expected" in out.details["reason"][2] and out.details["reason"][0] == ""


def test_gradients_are_not_promised(weights, images):
    values = BrisqueReward()(images.requires_grad_(), [""] * 4).values
    assert not values.requires_grad


def test_weights_are_downloaded_once(home, vectors, images, monkeypatch):
    asked = []

    def download(url, path, progress):
        asked.append(url)
        torch.save(vectors, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    for _ in range(2):
        assert torch.isfinite(BrisqueReward()(images[:1], [""]).values).all()
    assert asked == ["https://github.com/photosynthesis-team/piq/releases/download/v0.4.0/brisque_svm_weights.pt"]


def test_without_a_network_the_file_and_its_command_are_named(home, images, monkeypatch):
    def offline(url, path, progress):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    expected = r"hub/checkpoints/brisque_svm_weights.pt are absent .*`curl -LO https://github.*weights.pt`.*no route"
    with pytest.raises(FileNotFoundError, match=expected):
        BrisqueReward()(images, [""] * 4)


def test_other_files_are_refused_before_piq_unpickles_them(weights, images):
    def fails(stored, match):
        torch.save(stored, weights)
        with pytest.raises(ValueError, match=match):
            BrisqueReward()(images, [""] * 4)

    fails((torch.zeros(3), torch.zeros(3, 18)), r"holds vectors \[3, 18\], BRISQUE has 36 features")
    fails({"a": torch.zeros(2)}, "does not hold BRISQUE's support vectors")
    fails((io.StringIO, 1), "does not hold BRISQUE's support vectors")  # a class: what weights_only refuses
    weights.write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="does not hold BRISQUE's support vectors"):
        BrisqueReward()(images, [""] * 4)


def test_piq_is_asked_for(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "piq", None)
    with pytest.raises(ImportError, match=r"pip install 'flowrl-align\[quality\]'"):
        BrisqueReward()(images, [""] * 4)


def test_the_known_pair_is_clouds_before_static():
    images, prompts, columns = BrisqueReward().known_pair()
    roughness = (images[..., 1:] - images[..., :-1]).abs().mean((1, 2, 3))
    assert images.shape == (2, 3, 224, 224) and len(prompts) == 2 and not columns
    assert images.min() >= 0 and images.max() <= 1 and 0 < roughness[0] < 0.4 * roughness[1]

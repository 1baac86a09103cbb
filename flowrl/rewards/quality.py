"""No-reference quality: do the pixels have the statistics of an undistorted photograph? BRISQUE, computed by piq."""

import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrl.rewards.base import RewardOutput, quantise, register

_URL = "https://github.com/photosynthesis-team/piq/releases/download/v0.4.0/brisque_svm_weights.pt"


@register("brisque")
class BrisqueReward:
    """-BRISQUE / 100, about -1 (distorted) to 0 (a clean photograph); the prompts are ignored (Mittal et al. 2012).

    BRISQUE was trained on photographs with blur, noise and compression. Drawings and flat images get poor scores too,
    and a generator can raise it without looking better: log it with weight 0, or keep its weight small.

    It is computed image by image in float64, since in float32 large flat areas move the score. No gradient: piq rounds
    the grey levels. An image that is flat, or nearly, has no score and is invalid, with `details["reason"]`.
    The support vectors are a file of piq's, looked for where `torch.hub` keeps checkpoints and downloaded if absent.
    They have not been loaded by the authors of this module; the 36 features were checked against independent code.
    Raises ImportError without piq, FileNotFoundError or ValueError when the file is absent or another one, and as
    `quantise` does.
    """

    name = "brisque"

    @functools.cached_property
    def _brisque(self) -> Callable[..., Tensor]:
        try:
            from piq import brisque
        except ImportError as error:
            raise ImportError(f"the BRISQUE reward needs pip install 'flowrl-align[quality]' ({error})") from error
        path = Path(torch.hub.get_dir(), "checkpoints", Path(_URL).name)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.hub.download_url_to_file(_URL, str(path), progress=False)
            except OSError as error:
                raise FileNotFoundError(
                    f"the weights {path} are absent and cannot be downloaded. Where there is a network run "
                    f"`curl -LO {_URL}`, and copy the file there. ({error})"
                ) from error
        try:  # piq itself would unpickle anything
            coefficients, vectors = torch.load(path, map_location="cpu", weights_only=True)
            fits = vectors.shape == (len(coefficients), 36)
        except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not hold BRISQUE's support vectors ({error}); get {_URL}") from error
        if not fits:
            raise ValueError(f"{path} holds vectors {list(vectors.shape)}, BRISQUE has 36 features; get {_URL}")
        return brisque

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> RewardOutput:
        pixels = quantise(images).permute(0, 3, 1, 2)
        values, reasons = torch.full((len(pixels),), torch.nan), [""] * len(pixels)
        for row, image in enumerate(pixels):
            try:  # one by one: piq refuses the whole batch for a flat image
                values[row] = -self._brisque(image[None].double() / 255, reduction="none").item() / 100
            except AssertionError as error:
                reasons[row] = f"BRISQUE cannot score it: {error}"
        return RewardOutput(values, torch.isfinite(values), {"reason": reasons})

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """Clouds with the power spectrum of photographs before static: expected of piq's weights, not verified."""
        noise = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))
        y, x = torch.fft.fftfreq(224)[:, None], torch.fft.rfftfreq(224)
        clouds = torch.fft.irfft2(torch.fft.rfft2(noise) / torch.hypot(x, y).clamp(min=1 / 224), s=(224, 224))
        static = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0))
        return torch.stack([(0.5 + 0.2 * clouds / clouds.std()).clamp(0, 1), static]), [""] * 2, {}

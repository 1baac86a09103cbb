"""Rewards on CLIP-like towers: CLIPScore, PickScore, HPSv2.1, aesthetic heads. All are differentiable in the pixels.

`open_clip` is imported, and weights are read, when a reward is first called. Images are rounded to 8 bits, then resized
as tensors: with or without a gradient the values are the same. Pillow, which the released scorers of CLIPScore and
PickScore use, rounds again while resizing; its pixels differ from these by up to 1.5/255. No released checkpoint has
been loaded by the authors of this module: the towers were checked with random weights, the scales come from the papers
and the released code.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flowrl.rewards.base import quantise, register
from flowrl.rewards.combinators import scaled
from flowrl.rewards.towers import Tower, load, locate, read


def rounded(images: Tensor) -> Tensor:
    """`quantise`d images as float `[N, 3, H, W]` in [0, 1]; the gradient passes the rounding unchanged."""
    exact = quantise(images).permute(0, 3, 1, 2).float() / 255
    if not images.requires_grad:
        return exact
    inside = images.float().clamp(0, 1)
    return inside + (exact - inside).detach()


class _TowerReward:
    """Rounds the pixels, goes through the batch in chunks, embeds and calls `value`.

    model, weights: see `load`; None, None: the released ones. Weights alone go into the released architecture.
    batch_size: of a chunk; values do not depend on it.
    """

    differentiable = True
    released: tuple[str, str]
    resize: str | None = None  # None: as the tower's own preprocessing says
    clamp = True

    def __init__(self, model: str | None = None, weights: str | None = None, batch_size: int = 16):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = str(model or self.released[0])
        self.weights = str(weights) if weights else self.released[1] if model is None else None
        self.batch_size = batch_size

    @property
    def tower(self) -> Tower:
        return load(self.model, self.weights)

    def value(self, image: Tensor, prompts: Sequence[str]) -> Tensor:
        """[N] from unit image embeddings [N, D]; here their cosine with the prompts'."""
        return (image * self.tower.texts(prompts, image.device)).sum(-1)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels, n = rounded(images), self.batch_size
        with torch.autocast(pixels.device.type, enabled=False):  # half precision moves scores by 1e-3
            embedded = [self.tower.images(chunk, self.resize, self.clamp) for chunk in pixels.split(n)]
            return torch.cat([self.value(x, prompts[i * n : i * n + len(x)]) for i, x in enumerate(embedded)])

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """A red disc before a blue one, both called red."""
        y, x = torch.meshgrid(*2 * [torch.linspace(-1, 1, 224)], indexing="ij")
        disc = (x**2 + y**2 < 0.36).float()
        red, blue = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.1, 0.9]])[..., None, None]
        images = torch.stack([1 - disc + disc * colour for colour in (red, blue)])
        return images, ["a red circle on a white background"] * 2, {}


@register("clipscore")
class CLIPScore(_TowerReward):
    """cos(image, prompt), about 0.1 to 0.4 for CLIP (Hessel et al. 2021, without its factor and prefix).

    Any tower: `CLIPScore("hf-hub:apple/DFN5B-CLIP-ViT-H-14-384")`, `CLIPScore("ViT-B-16", "laion2b_s34b_b88k")`.
    Values [N] carry the gradient to `images`. Raises as `load` and `quantise` do.
    """

    name = "clipscore"
    released = ("ViT-L-14-quickgelu", "openai")


@register("clipscore@paper")
class PaperCLIPScore(CLIPScore):
    """2.5 max(cos(image, "A photo depicts " + prompt), 0) with OpenAI's ViT-B/32 (Hessel et al. 2021, eq. 1).

    Its gradient is 0 where the cosine is negative.
    """

    name = "clipscore@paper"
    released = ("ViT-B-32-quickgelu", "openai")

    def value(self, image: Tensor, prompts: Sequence[str]) -> Tensor:
        return 2.5 * super().value(image, [f"A photo depicts {prompt}" for prompt in prompts]).clamp(min=0)


class CLIPLogit(CLIPScore):
    """exp(logit_scale) cos(image, prompt); the factor is 100 for CLIP."""

    name = "clip_logit"

    def value(self, image: Tensor, prompts: Sequence[str]) -> Tensor:
        return super().value(image, prompts) * self.tower.model.logit_scale.exp()  # ty: ignore


@register("pickscore")
class PickScore(CLIPLogit):
    """exp(logit_scale) cos(image, prompt), about 18 to 24 (Kirstain et al. 2023, Pick-a-Pic).

    The released weights are a transformers checkpoint, renamed for open_clip's ViT-H-14 on loading.
    """

    name = "pickscore"
    released = ("ViT-H-14", "hf-hub:yuvalkirstain/PickScore_v1/model.safetensors")


@register("hpsv2_1")
class HPSv21(_TowerReward):
    """cos(image, prompt) without logit scale, about 0.2 to 0.37 (Wu et al. 2023, HPS v2; checkpoint v2.1).

    The long side is brought to 224, zeros fill the square before normalising, and the resize is not clamped: the
    released code works on float tensors. Antialiasing is on (torchvision's default since 0.17).
    """

    name = "hpsv2_1"
    released = ("ViT-H-14", "hf-hub:xswu/HPSv2/HPS_v2.1_compressed.pt")
    resize = "longest"
    clamp = False


def linear_head(path: Path) -> nn.Sequential:
    """The linear layers of a state dict, in the order of their numbers, ending in one output.

    LAION's and Aesthetic v2.5's predictors are such stacks (dropout apart). Raises ValueError on another shape.
    """
    state = read(path)
    numbered = sorted((int(m[1]), key[: -len("weight")]) for key in state if (m := re.search(r"(\d+)\.weight$", key)))
    layers = []
    for _, key in numbered:
        weight = state[f"{key}weight"]
        layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0])  # draws no numbers
        layer.load_state_dict({"weight": weight, "bias": state[f"{key}bias"]})
        layers.append(layer)
    if not layers or layers[-1].out_features != 1:
        raise ValueError(f"{path} is not a stack of linear layers with one output; give the head as a module instead")
    return nn.Sequential(*layers)


@register("laion_aesthetic")
class AestheticReward(_TowerReward):
    """head(unit image embedding), for LAION's predictor about 1 to 10; the prompts are ignored (Schuhmann 2022).

    head: a module or function from embeddings [N, D] to [N] or [N, 1], or the weights of a linear stack (see `locate`,
        `linear_head`). The default is the copy in TRL's repository of `sac+logos+ava1-l14-linearMSE.pth` (not verified
        to be equal).
    Any other predictor plugs in here. SigLIP's (Aesthetic v2.5, AGPL-3.0, so neither bundled nor fetched):
    `AestheticReward("ViT-SO400M-14-SigLIP-384", "webli", head="/path/to/its/state_dict.pth")`.
    """

    name = "laion_aesthetic"
    released = ("ViT-L-14-quickgelu", "openai")

    def __init__(
        self,
        model: str | None = None,
        weights: str | None = None,
        head: str | Path | Callable[[Tensor], Tensor] = "hf-hub:trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth",
        batch_size: int = 16,
    ):
        super().__init__(model, weights, batch_size)
        self._head = head

    @functools.cached_property
    def head(self) -> Callable[[Tensor], Tensor]:
        head = linear_head(locate(self._head, "head")) if isinstance(self._head, str | Path) else self._head
        return head.requires_grad_(False).eval() if isinstance(head, nn.Module) else head

    def value(self, image: Tensor, prompts: Sequence[str]) -> Tensor:
        if isinstance(self.head, nn.Module):
            self.head.to(image.device)
        return self.head(image).reshape(len(image))

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """A sunset over the sea before static: expected of the released head, not verified. Override it for a head that
        judges something else."""
        y, x = torch.meshgrid(torch.linspace(0, 1, 224), torch.linspace(-1, 1, 224), indexing="ij")
        sky = torch.stack([0.35 + 0.6 * y, 0.25 + 0.35 * y, 0.55 - 0.35 * y])
        sea = sky.flip(1) * 0.55
        sunset = torch.where(y < 0.6, sky, sea)
        sunset = torch.where(x**2 + (2 * (y - 0.5)) ** 2 < 0.03, torch.tensor([1.0, 0.85, 0.5])[:, None, None], sunset)
        static = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0))
        return torch.stack([sunset, static]), [""] * 2, {}


# Published scalings: Flow-GRPO (and UniRL for CLIPScore), DiffusionNFT, MixGRPO.
register("clipscore@flowgrpo")(scaled(CLIPLogit(), 1 / 30))
register("clipscore@diffusionnft")(scaled(CLIPLogit(), 1 / 100))
register("pickscore@flowgrpo")(scaled(PickScore(), 1 / 26))
register("pickscore@mixgrpo")(scaled(PickScore(), 1 / 8, -18 / 8))

"""GenEval's colour classifier: zero-shot CLIP on the cut-out objects, on open_clip alone."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from flowrl.rewards.base import to_pil
from flowrl.rewards.geneval import COLORS, Detection
from flowrl.rewards.towers import load

TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
BACKGROUND = "#999"


def crop(image: Image.Image, found: Detection) -> Image.Image:
    """The object alone: grey outside its mask, where it has one, cut to its box (Pillow rounds the corners).

    Raises ValueError on a mask of another size and on a box without pixels.
    """
    if found.mask is not None:
        if found.mask.shape != (image.height, image.width):
            raise ValueError(f"mask of {found.mask.shape} for an image of {(image.height, image.width)}")
        grey = Image.new("RGB", image.size, BACKGROUND)
        image = Image.composite(image, grey, Image.fromarray(found.mask.astype(bool)))
    cut = image.crop(found.box)
    if not all(cut.size):
        raise ValueError(f"a detection without pixels: box {found.box}")
    return cut


class CLIPColors:
    """A `ColorClassifier`: of ten colours, the one whose texts lie nearest to the crop.

    Three templates per colour and class are embedded, normalised, averaged and normalised again, once per class. Crops
    go through CLIP's own preprocessing in Pillow (short side 224, bicubic, centre crop: long objects lose their ends),
    as in the benchmark; the tower is float32 where the benchmark uses half precision on CUDA.
    model, weights: see `towers.load`; the default is the benchmark's OpenAI ViT-L/14 (MIT), whose weights need
    QuickGELU. Another model alone means a folder or hub id with weights. Raises as `load` and `crop` do. Not verified
    on the released weights.
    """

    def __init__(self, model: str | None = None, weights: str | None = None):
        released = ("ViT-L-14-quickgelu", "openai")
        self.tower = load(*((model, weights) if model else released))
        self._texts: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: Tensor, detections: Sequence[Detection], class_name: str) -> list[str]:
        if not detections:
            return []
        from open_clip.transform import PreprocessCfg, image_transform_v2

        transform = image_transform_v2(PreprocessCfg(**self.tower.preprocess), is_train=False)
        (picture,) = to_pil(image[None])
        crops = torch.stack([transform(crop(picture, found)) for found in detections]).to(image.device)
        with torch.autocast(image.device.type, enabled=False):
            model = self.tower.model.to(image.device)
            embedding = model.encode_image(crops, normalize=True)  # ty: ignore
            nearest = (embedding @ self._colors(class_name, image.device).T).argmax(-1)
        return [COLORS[i] for i in nearest.tolist()]

    def _colors(self, name: str, device: torch.device) -> Tensor:
        """Unit embeddings of the colours of a class, [10, D]."""
        if name not in self._texts:
            prompts = [template.format(color=color, name=name) for color in COLORS for template in TEMPLATES]
            single = self.tower.texts(prompts, device).unflatten(0, (len(COLORS), len(TEMPLATES)))
            self._texts[name] = F.normalize(single.mean(1), dim=-1)
        return self._texts[name].to(device)

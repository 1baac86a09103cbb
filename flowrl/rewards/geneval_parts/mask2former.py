"""Mask2Former (Cheng et al. 2022) as GenEval's detector, on transformers instead of mmdet.

The benchmark runs mmdet's checkpoint of the Swin-S model (`mmdet_weights` converts it). The default is Meta's own
training of the same architecture, under CC-BY-NC-4.0: mask AP 46.3 instead of 46.1, other scores, so results of the two
do not belong into one table. Neither checkpoint has been loaded by the authors of this module.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl.rewards.base import quantise
from flowrl.rewards.geneval import GENEVAL_CLASSES, SCORE_THRESHOLD, Detection
from flowrl.rewards.geneval_parts.pretrained import coco_classes, folder_of, pretrained

SHORT_EDGE, LONG_EDGE, DIVISOR = 800, 1333, 32
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
PADDING = 128.0
MAX_INSTANCES = 100

Size = tuple[int, int]


def prepare(pixels: Tensor) -> tuple[Tensor, Size]:
    """An image as mmdet feeds it to the model.

    pixels: [3, H, W] in 0..255. The short edge becomes 800 unless the long one would exceed 1333; bilinear without
    antialiasing and rounded, as OpenCV does on 8-bit images; grey padding below and at the right up to multiples of 32;
    ImageNet's mean and deviation. Returns the input [1, 3, h', w'] and the size (h, w) without padding.
    """
    height, width = pixels.shape[-2:]
    scale = min(SHORT_EDGE / min(height, width), LONG_EDGE / max(height, width))
    h, w = int(height * scale + 0.5), int(width * scale + 0.5)
    x = F.interpolate(pixels[None], (h, w), mode="bilinear", align_corners=False).round()
    x = F.pad(x, (0, -w % DIVISOR, 0, -h % DIVISOR), value=PADDING)
    mean, std = (x.new_tensor(v).reshape(3, 1, 1) for v in (MEAN, STD))
    return (x - mean) / std, (h, w)


def instances(class_logits: Tensor, mask_logits: Tensor, padded: Size, inside: Size, size: Size, threshold: float):
    """Detections from the logits of one image, as mmdet computes them (best class probability first).

    class_logits: [Q, C+1], the last class being "no object". mask_logits: [Q, h, w]. padded: the size of the input;
    inside: its part that is not padding; size: of the image. The 100 best pairs of query and class are instances. A
    mask is brought to `padded`, cut to `inside`, brought to `size`, and is where its logit is above 0; the score is
    the class probability times the mean sigmoid in the mask; the box is the mask's. Left out are empty masks and, since
    no score exceeds it, class probabilities up to `threshold`.
    """
    probability = class_logits.float().softmax(-1)[:, :-1]
    best = probability.flatten().topk(min(MAX_INSTANCES, probability.numel()))
    found = []
    for p, pair in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if p <= threshold:
            break
        query, index = divmod(pair, probability.shape[1])
        # One mask at a time: a hundred at 1024 x 1024 are 0.4 GB.
        logit = F.interpolate(mask_logits[None, None, query].float(), padded, mode="bilinear", align_corners=False)
        logit = F.interpolate(logit[..., : inside[0], : inside[1]], size, mode="bilinear", align_corners=False)[0, 0]
        mask = logit > 0
        rows, columns = (mask.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        if not rows:
            continue
        score = p * float((logit.sigmoid() * mask).sum() / (mask.sum() + 1e-6))
        box = (float(columns[0]), float(rows[0]), columns[-1] + 1.0, rows[-1] + 1.0)
        found.append(Detection(index, score, box, mask.cpu().numpy()))
    return found


class Mask2Former:
    """A `Detector` with masks, one image at a time.

    model: a folder or hub id of a transformers `Mask2FormerForUniversalSegmentation` for COCO instances. threshold: see
    `instances`; at its default nothing is left out that GenEval would count. Raises ValueError on other classes than
    COCO's 80 and on incomplete weights, FileNotFoundError when they are not at hand.
    """

    classes = GENEVAL_CLASSES

    def __init__(
        self, model: str = "facebook/mask2former-swin-small-coco-instance", threshold: float = SCORE_THRESHOLD
    ):
        folder = folder_of(model)  # before the slow import
        from transformers import Mask2FormerForUniversalSegmentation

        self.model = pretrained(Mask2FormerForUniversalSegmentation, folder)
        if coco_classes(self.model.config.id2label, model) != {i: i for i in range(80)}:
            raise ValueError(f"{model} knows COCO's 91 ids; give a Mask2Former with COCO's 80 instance classes")
        self.threshold = threshold

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        self.model.to(images.device)
        with torch.autocast(images.device.type, enabled=False):  # half precision would move scores over the threshold
            return [self._detect(pixels) for pixels in quantise(images).permute(0, 3, 1, 2).float()]

    def _detect(self, pixels: Tensor) -> list[Detection]:
        x, inside = prepare(pixels)
        out = self.model(pixel_values=x)
        padded, size = (x.shape[-2], x.shape[-1]), (pixels.shape[-2], pixels.shape[-1])
        classes, masks = out.class_queries_logits[0], out.masks_queries_logits[0]
        return instances(classes, masks, padded, inside, size, self.threshold)

"""Detectors of boxes from transformers, as judges independent of the benchmark's own.

They have no masks, so colours are judged on crops with background, and their scores mean something else than
Mask2Former's while GenEval's limits (0.3, counting 0.9) stay: report such results under the detector's name. No
released checkpoint has been loaded by the authors of this module.
"""

import torch
from torch import Tensor

from flowrl.rewards.base import to_pil
from flowrl.rewards.geneval import GENEVAL_CLASSES, SCORE_THRESHOLD, Box, Detection
from flowrl.rewards.geneval_parts.pretrained import coco_classes, folder_of, pretrained


def detections(scores: Tensor, indices: Tensor, boxes: Tensor, size: tuple[int, int]) -> list[Detection]:
    """Detections from scores [K], class indices [K] and boxes [K, 4] as x1, y1, x2, y2; boxes are cut to the image of
    `size` (height, width), and those outside it are dropped."""
    height, width = size
    found = []
    for score, index, box in zip(scores.tolist(), indices.tolist(), boxes.tolist(), strict=True):
        x1, y1, x2, y2 = (min(max(v, 0.0), limit) for v, limit in zip(box, (width, height) * 2, strict=True))
        inside: Box = (x1, y1, x2, y2)
        if x2 > x1 and y2 > y1:
            found.append(Detection(index, score, inside))
    return found


class ObjectDetection:
    """A `Detector` from any model of transformers' `AutoModelForObjectDetection` trained on COCO.

    model: a folder or hub id, with its image processor; RT-DETR knows COCO's 80 classes, DETR and its kin the 91 ids.
    threshold: scores up to it are left out. Raises ValueError on other classes and on incomplete weights,
    FileNotFoundError when they are not at hand.
    """

    classes = GENEVAL_CLASSES

    def __init__(self, model: str = "PekingU/rtdetr_r50vd", threshold: float = SCORE_THRESHOLD):
        folder = folder_of(model, "preprocessor_config.json")  # before the slow import
        from transformers import AutoImageProcessor, AutoModelForObjectDetection

        self.model = pretrained(AutoModelForObjectDetection, folder)
        self.index = coco_classes(self.model.config.id2label, model)
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.threshold = threshold

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        self.model.to(images.device)
        size = (images.shape[-2], images.shape[-1])
        found = []
        with torch.autocast(images.device.type, enabled=False):
            for image in to_pil(images):
                out = self.model(**self.processor(images=image, return_tensors="pt").to(images.device))
                (best,) = self.processor.post_process_object_detection(out, self.threshold, [size])
                labels = best["labels"].tolist()
                rows = [row for row, label in enumerate(labels) if label in self.index]
                index = torch.tensor([self.index[labels[row]] for row in rows])
                found.append(detections(best["scores"][rows], index, best["boxes"][rows], size))
        return found


class GroundingDino:
    """A `Detector` that is told the 80 class names in one prompt (Liu et al. 2023, Grounding DINO).

    The score of a class is the mean over its tokens, as in the released evaluation on COCO; the 300 best pairs of query
    and class count. Scores are low: few reach the 0.9 that GenEval asks for in counting.
    model: a folder or hub id, with image processor and tokenizer. threshold: scores up to it are left out.
    Raises as `ObjectDetection` does.
    """

    classes = GENEVAL_CLASSES

    def __init__(self, model: str = "IDEA-Research/grounding-dino-base", threshold: float = SCORE_THRESHOLD):
        folder = folder_of(model, "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json")
        from transformers import AutoImageProcessor, AutoModelForZeroShotObjectDetection, AutoTokenizer

        self.model = pretrained(AutoModelForZeroShotObjectDetection, folder)
        if not self.model.config.model_type.endswith("grounding-dino"):
            raise ValueError(f"{model} is a {self.model.config.model_type}; give a Grounding DINO")
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.tokens, self.spans = self._prompt(AutoTokenizer.from_pretrained(folder))
        if (longest := self.model.config.max_text_len) < len(self.tokens):
            raise ValueError(f"the class names take {len(self.tokens)} tokens, {model} reads {longest}")
        self.threshold = threshold

    def _prompt(self, tokenizer) -> tuple[list[int], Tensor]:
        """The tokens of "[CLS] person . bicycle . ... [SEP]" and each token's share of each class, [80, tokens]."""
        tokens, spans = [tokenizer.cls_token_id], []
        (stop,) = tokenizer.encode(".", add_special_tokens=False)
        for name in self.classes:
            words = tokenizer.encode(name, add_special_tokens=False)
            spans.append(range(len(tokens), len(tokens) + len(words)))
            tokens += [*words, stop]
        tokens.append(tokenizer.sep_token_id)
        share = torch.zeros(len(spans), len(tokens))
        for row, span in zip(share, spans, strict=True):
            row[span.start : span.stop] = 1 / len(span)
        return tokens, share

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        self.model.to(images.device)
        height, width = images.shape[-2:]
        text = torch.tensor([self.tokens], device=images.device)
        found = []
        with torch.autocast(images.device.type, enabled=False):
            for image in to_pil(images):
                pixels = self.processor(images=image, return_tensors="pt").to(images.device)
                out = self.model(**pixels, input_ids=text, attention_mask=torch.ones_like(text))
                token = out.logits[0, :, : len(self.tokens)].sigmoid().cpu()  # [queries, tokens]
                score = token @ self.spans.T
                best = score.flatten().topk(min(300, score.numel()))
                kept = best.indices[best.values > self.threshold]
                query, index = kept // len(self.classes), kept % len(self.classes)
                x, y, w, h = (out.pred_boxes[0].cpu()[query] * torch.tensor([width, height] * 2)).unbind(-1)
                boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
                found.append(detections(score[query, index], index, boxes, (height, width)))
        return found

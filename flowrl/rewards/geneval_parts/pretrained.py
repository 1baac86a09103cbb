"""Models of transformers for detectors: where they are looked for, and which classes they know."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.rewards.geneval import GENEVAL_CLASSES
from flowrl.rewards.towers import fetch

# COCO numbers its 80 things from 1 to 90; ten numbers are free.
COCO_IDS = tuple(i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
# Other spellings of COCO's names than the benchmark's, without spaces: COCO's own and Darknet's.
_SPELLINGS = {
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "tv": "tvmonitor",
    "computermouse": "mouse",
    "tvremote": "remote",
    "computerkeyboard": "keyboard",
    "hairdrier": "hairdryer",
}


def coco_classes(labels: Mapping[int, str], name: str) -> dict[int, int]:
    """A model's class index -> index into `GENEVAL_CLASSES`.

    labels: a transformers `id2label`; COCO's 80 things in COCO order, or under COCO's own ids (91 labels, as in DETR).
    The names are compared, but only as a check: the map is by index.
    Raises ValueError naming the first class that differs.
    """

    def plain(text: str) -> str:
        return re.sub("[^a-z]", "", text.lower())

    labels = {int(index): label for index, label in labels.items()}
    ids = COCO_IDS if len(labels) in (90, 91) else range(80)
    if len(labels) not in (80, 90, 91):
        raise ValueError(f"{name} knows {len(labels)} classes; GenEval needs COCO's 80 (or 91 ids), in COCO order")
    for index, wanted in zip(ids, GENEVAL_CLASSES, strict=True):
        label = labels.get(index, "nothing")
        if plain(label) not in (plain(wanted), _SPELLINGS.get(plain(wanted))):
            raise ValueError(f"class {index} of {name} is {label!r}, not {wanted!r}: its classes are not in COCO order")
    return {index: i for i, index in enumerate(ids)}


def folder_of(model: str, *more: str) -> Path:
    """The folder of a model: `model` itself, or its place in the hub's cache, downloaded where it can be.

    more: files beside `config.json` and the weights. Raises FileNotFoundError naming the first that is missing.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        for file in ("config.json", *more):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{folder} has no {file}; give a folder that `save_pretrained` wrote")
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise FileNotFoundError(f"{model!r} is neither a folder nor a hub id like 'owner/model'")
    ask = functools.partial(fetch, model, instead="name a folder that `save_pretrained` wrote: NAME@FOLDER")
    for file in more:
        ask(file)
    ask("model.safetensors", "pytorch_model.bin")
    return ask("config.json").parent


def unfilled(model: torch.nn.Module, report: Mapping[str, Any]) -> list[str]:
    """The parameters that a checkpoint did not have, from the `output_loading_info` of `from_pretrained`.

    Constants in buffers do not count, nor does the last norm of a Swin backbone, which only a classifier uses: released
    checkpoints lack both.
    """
    parameters = {name for name, _ in model.named_parameters()}
    return sorted(key for key in report["missing_keys"] if key in parameters and ".swin.layernorm." not in key)


def pretrained(kind: Any, folder: Path) -> Any:
    """A frozen float32 model of the transformers class `kind`, from a folder.

    Raises ValueError when the folder holds another model, or not all of its weights (which transformers would draw at
    random).
    """
    with torch.random.fork_rng(devices=[]):  # loading late must not move the run's generator
        try:
            model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"{folder} does not load as {kind.__name__}: {error}") from error
    if missing := unfilled(model, report):
        raise ValueError(f"{folder} lacks {len(missing)} weights of {kind.__name__}: {', '.join(missing[:5])}")
    return model.requires_grad_(False).eval()

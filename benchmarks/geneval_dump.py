"""Write what the original GenEval computes, for `flowrl eval parity --dump` (levels 1 to 3).

Run it in the original's own environment (mmdet 2.x with mmcv-full built for the GPU, open_clip, clip_benchmark; flowrl
is not needed):

    python geneval_dump.py CHECKOUT IMAGES OUT --model-path FOLDER [--count 50]

CHECKOUT is a clone of the GenEval repository, IMAGES a folder in its layout, FOLDER holds the Mask2Former checkpoint.
OUT receives one .npz per image (logits, sizes, detections; some 20 MB) and colors.jsonl with crops/.
Written after mmdet 2.x's source and never run: no such environment was at hand.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args()
    geneval = load(args.checkout, args.model_path)
    (args.out / "crops").mkdir(parents=True, exist_ok=True)
    logits = watch(geneval.object_detector)
    files = sorted(args.images.glob("*/samples/*.png"))
    chosen = files[:: max(len(files) // args.count, 1)][: args.count]
    with (args.out / "colors.jsonl").open("w") as colors:
        for number, path in enumerate(chosen):
            boxes, masks = geneval.inference_detector(geneval.object_detector, str(path))
            image = Image.open(path).convert("RGB")
            save(args.out / f"{number:05}.npz", path.relative_to(args.images), image, logits, boxes, masks)
            for name, rows, shapes in zip(geneval.classnames, boxes, masks):  # noqa: B905 (Python 3.8)
                found = [(row, shape) for row, shape in zip(rows, shapes) if row[4] > 0.3]  # noqa: B905
                if found:
                    write_crops(args.out, colors, geneval, image, name, found)


def load(checkout, model_path):
    """The original's module with its models; its main block is not run, so its globals are set here."""
    sys.path.insert(0, str(checkout / "evaluation"))
    import evaluate_images as geneval

    sys.argv = ["evaluate_images.py", "-", "--model-path", model_path]
    geneval.args = geneval.parse_args()
    models = geneval.load_models(geneval.args)
    geneval.object_detector, (geneval.clip_model, geneval.transform, geneval.tokenizer), geneval.classnames = models
    return geneval


def watch(detector):
    """A dict that holds the logits and sizes of the newest image."""
    newest = {}

    def keep_logits(module, inputs, output):
        classes, masks = output
        newest["class_logits"], newest["mask_logits"] = (x[-1][0].float().cpu().numpy() for x in (classes, masks))

    inner = detector.panoptic_fusion_head.simple_test

    def keep_sizes(mask_cls_results, mask_pred_results, img_metas, **kwargs):
        newest["padded"] = np.array(img_metas[0]["batch_input_shape"])
        newest["inside"] = np.array(img_metas[0]["img_shape"][:2])
        return inner(mask_cls_results, mask_pred_results, img_metas, **kwargs)

    detector.panoptic_head.register_forward_hook(keep_logits)
    detector.panoptic_fusion_head.simple_test = keep_sizes
    return newest


def save(path, file, image, logits, boxes, masks):
    """boxes, masks: per class the arrays [n, 5] and lists of bool [H, W] that mmdet returns."""
    labels = np.repeat(np.arange(len(boxes)), [len(rows) for rows in boxes])
    rows = np.concatenate(boxes)
    size = (image.height, image.width)
    flat = np.array([mask for shapes in masks for mask in shapes], bool).reshape(len(rows), -1)
    np.savez_compressed(
        path,
        image=str(file),
        size=np.array(size),
        boxes=rows[:, :4],
        scores=rows[:, 4],
        labels=labels,
        masks=np.packbits(flat, axis=1),
        **logits,
    )


def write_crops(out, colors, geneval, image, name, found):
    """The crops the original classifies, as pictures, and the colours it gives them."""
    grey = Image.new("RGB", image.size, "#999")
    for (row, mask), color in zip(found, geneval.color_classification(image, found, name)):  # noqa: B905
        crop = f"crops/{len(list((out / 'crops').iterdir())):06}.png"
        Image.composite(image, grey, Image.fromarray(np.asarray(mask, bool))).crop(tuple(row[:4])).save(out / crop)
        colors.write(json.dumps({"crop": crop, "class": name, "color": color}) + "\n")


if __name__ == "__main__":
    main()

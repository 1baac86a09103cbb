"""Convert mmdet's Mask2Former checkpoint, the one GenEval was published with, for transformers.

    python -m flowrl.rewards.geneval_parts.mmdet_weights \\
        mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco_20220504_001756-743b7d99.pth FOLDER

then name the detector `mask2former@FOLDER`. The names are those of mmdet 2.x. Not verified on the released checkpoint
(Apache-2.0, like mmdet), only on random weights under mmdet's names; every key must be used and every weight of the
model filled, else this stops and lists them.
"""

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.geneval import GENEVAL_CLASSES
from flowrl.rewards.geneval_parts.pretrained import coco_classes, unfilled


def swin_s() -> Any:
    """The `Mask2FormerConfig` of the benchmark's model: Swin-S, window 7, 100 queries, 80 classes."""
    import transformers

    swin: Any = transformers.SwinConfig
    backbone = swin(
        embed_dim=96,
        depths=[2, 2, 18, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    kind: Any = transformers.Mask2FormerConfig
    return kind(backbone_config=backbone, num_labels=len(GENEVAL_CLASSES))


# ---------------------------------------------------------------------------------------- values


def unfold_to_swin(weight: Tensor) -> Tensor:
    """Patch merging's input channels [..., 4C] in Swin's order instead of mmdet's.

    mmdet merges with `nn.Unfold`: channel c of the pixel (row, column) of a 2x2 patch is input 4c + 2 row + column.
    Swin stacks the pixels (0,0), (1,0), (0,1), (1,1), each with all its channels.
    """
    pixels = weight.unflatten(-1, (-1, 2, 2))  # channel, row, column
    return pixels.movedim((-1, -2, -3), (-3, -2, -1)).flatten(-3)


def swin_index(window: int) -> Tensor:
    """Swin's row in the table of relative positions for each pair of pixels of a window, [window^2, window^2]."""
    y, x = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    dy, dx = (v.flatten()[:, None] - v.flatten() + window - 1 for v in (y, x))
    return dy * (2 * window - 1) + dx


# ---------------------------------------------------------------------------------------- names

# mmdet's name (after its prefix) and the name in transformers' checkpoints (after its own). "#" is a number, kept in
# order; ".weight" and ".bias" are kept too; braces name the parts of a fused matrix.
_TABLE = {
    ("backbone.", "model.pixel_level_module.encoder."): """
        patch_embed.projection              embeddings.patch_embeddings.projection
        patch_embed.norm                    embeddings.norm
        stages.#.blocks.#.norm1             encoder.layers.#.blocks.#.layernorm_before
        stages.#.blocks.#.attn.w_msa.qkv    encoder.layers.#.blocks.#.attention.self.{query,key,value}
        stages.#.blocks.#.attn.w_msa.proj   encoder.layers.#.blocks.#.attention.output.dense
        stages.#.blocks.#.attn.w_msa.relative_position_bias_table \
            encoder.layers.#.blocks.#.attention.self.relative_position_bias_table
        stages.#.blocks.#.norm2             encoder.layers.#.blocks.#.layernorm_after
        stages.#.blocks.#.ffn.layers.0.0    encoder.layers.#.blocks.#.intermediate.dense
        stages.#.blocks.#.ffn.layers.1      encoder.layers.#.blocks.#.output.dense
        stages.#.downsample.norm            encoder.layers.#.downsample.norm
        stages.#.downsample.reduction       encoder.layers.#.downsample.reduction
        norm0                               hidden_states_norms.stage1
        norm1                               hidden_states_norms.stage2
        norm2                               hidden_states_norms.stage3
        norm3                               hidden_states_norms.stage4
    """,
    ("panoptic_head.pixel_decoder.", "model.pixel_level_module.decoder."): """
        input_convs.#.conv                                      input_projections.#.0
        input_convs.#.gn                                        input_projections.#.1
        level_encoding.weight                                   level_embed
        encoder.layers.#.attentions.0.sampling_offsets          encoder.layers.#.self_attn.sampling_offsets
        encoder.layers.#.attentions.0.attention_weights         encoder.layers.#.self_attn.attention_weights
        encoder.layers.#.attentions.0.value_proj                encoder.layers.#.self_attn.value_proj
        encoder.layers.#.attentions.0.output_proj               encoder.layers.#.self_attn.output_proj
        encoder.layers.#.norms.0                                encoder.layers.#.self_attn_layer_norm
        encoder.layers.#.ffns.0.layers.0.0                      encoder.layers.#.fc1
        encoder.layers.#.ffns.0.layers.1                        encoder.layers.#.fc2
        encoder.layers.#.norms.1                                encoder.layers.#.final_layer_norm
        lateral_convs.0.conv                                    adapter_1.0
        lateral_convs.0.gn                                      adapter_1.1
        output_convs.0.conv                                     layer_1.0
        output_convs.0.gn                                       layer_1.1
        mask_feature                                            mask_projection
    """,
    ("panoptic_head.", "model.transformer_module."): """
        query_embed                                             queries_embedder
        query_feat                                              queries_features
        level_embed                                             level_embed
        transformer_decoder.layers.#.attentions.0.attn.in_proj_weight   decoder.layers.#.cross_attn.in_proj_weight
        transformer_decoder.layers.#.attentions.0.attn.in_proj_bias     decoder.layers.#.cross_attn.in_proj_bias
        transformer_decoder.layers.#.attentions.0.attn.out_proj         decoder.layers.#.cross_attn.out_proj
        transformer_decoder.layers.#.norms.0                    decoder.layers.#.cross_attn_layer_norm
        transformer_decoder.layers.#.attentions.1.attn.in_proj_weight   decoder.layers.#.self_attn.{q,k,v}_proj.weight
        transformer_decoder.layers.#.attentions.1.attn.in_proj_bias     decoder.layers.#.self_attn.{q,k,v}_proj.bias
        transformer_decoder.layers.#.attentions.1.attn.out_proj         decoder.layers.#.self_attn.out_proj
        transformer_decoder.layers.#.norms.1                    decoder.layers.#.self_attn_layer_norm
        transformer_decoder.layers.#.ffns.0.layers.0.0          decoder.layers.#.fc1
        transformer_decoder.layers.#.ffns.0.layers.1            decoder.layers.#.fc2
        transformer_decoder.layers.#.norms.2                    decoder.layers.#.final_layer_norm
        transformer_decoder.post_norm                           decoder.layernorm
        mask_embed.0                                            decoder.mask_predictor.mask_embedder.0.0
        mask_embed.2                                            decoder.mask_predictor.mask_embedder.1.0
        mask_embed.4                                            decoder.mask_predictor.mask_embedder.2.0
    """,
    ("panoptic_head.", ""): """
        cls_embed                                               class_predictor
    """,
}


def _rules() -> list[tuple[re.Pattern, str]]:
    rules = []
    for (theirs, ours), lines in _TABLE.items():
        words = lines.split()
        for old, new in zip(words[::2], words[1::2], strict=True):
            pattern = re.escape(theirs + old).replace(r"\#", r"(\d+)") + r"(\.weight|\.bias)?"
            rules.append((re.compile(pattern), ours + new))
    return rules


def _renamed(key: str, rules: list[tuple[re.Pattern, str]]) -> list[str]:
    """The names that `key` goes to: none, one, or the three parts of a fused matrix."""
    for pattern, new in rules:
        if match := pattern.fullmatch(key):
            *numbers, suffix = match.groups("")
            for number in numbers:
                new = new.replace("#", number, 1)
            parts = re.search(r"\{(.*)\}", new)
            names = [new.replace(parts[0], part) for part in parts[1].split(",")] if parts else [new]
            return [name + suffix for name in names]
    return []


# ---------------------------------------------------------------------------------------- conversion


def convert(state: Mapping[str, Tensor], window: int = 7) -> dict[str, Tensor]:
    """mmdet's weights under the names of transformers' checkpoints.

    window: of the Swin backbone, to check that both count relative positions alike. Raises ValueError listing the keys
    it does not know.
    """
    rules, renamed, unknown = _rules(), {}, []
    for key, value in state.items():
        if key.endswith("relative_position_index"):
            if not torch.equal(value, swin_index(window)):
                raise ValueError(f"{key} counts relative positions in another order than Swin with window {window}")
            continue
        names = _renamed(key, rules)
        if not names:
            unknown.append(key)
        elif ".downsample." in key:
            renamed[names[0]] = unfold_to_swin(value)
        else:
            renamed |= zip(names, value.chunk(len(names)), strict=True)
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(state)} keys are not those of mmdet 2.x's Mask2Former with a Swin backbone: "
            f"{', '.join(unknown[:8])}"
        )
    return renamed


def load(path: Path) -> dict[str, Tensor]:
    """The state dict of an mmdet checkpoint, read without running code of its own.

    Raises ValueError when the file holds other objects than weights and plain data, or classes other than COCO's.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of weights and plain data ({str(error).splitlines()[0]}). If it is mmdet's "
            "and you trust it, write its weights alone, where it loads: `torch.save({'state_dict': "
            "torch.load(PATH, weights_only=False)['state_dict']}, NEW)`, and convert that file"
        ) from error
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not state:
        raise ValueError(f"{path} has no 'state_dict'; give the .pth file that mmdet publishes")
    if classes := (checkpoint.get("meta") or {}).get("CLASSES"):
        coco_classes(dict(enumerate(classes)), str(path))
    return state


def save(state: Mapping[str, Tensor], folder: Path, config: Any) -> Any:
    """Write mmdet's weights as a transformers model of this configuration; returns the model.

    Raises ValueError listing the weights that are absent, superfluous or of another shape.
    """
    import transformers

    kind: Any = transformers.Mask2FormerForUniversalSegmentation
    config.id2label = dict(enumerate(GENEVAL_CLASSES))
    config.label2id = {name: i for i, name in enumerate(GENEVAL_CLASSES)}
    weights = convert(state, config.backbone_config.window_size)
    weights["criterion.empty_weight"] = torch.ones(len(GENEVAL_CLASSES) + 1)  # a constant of the training loss
    weights["criterion.empty_weight"][-1] = config.no_object_weight
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit the model: {error}") from error
    missing, superfluous = unfilled(model, report), sorted(report["unexpected_keys"])
    if missing or superfluous:
        raise ValueError(f"weights without a value: {missing}; superfluous: {superfluous}")
    model.save_pretrained(folder)
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", type=Path, help="the .pth file of mmdet's Mask2Former with Swin-S, COCO instances"
    )
    parser.add_argument("folder", type=Path, help="where to write config.json and model.safetensors")
    arguments = parser.parse_args(argv)
    save(load(arguments.checkpoint), arguments.folder, swin_s())
    print(f"wrote {arguments.folder}; name it as mask2former@{arguments.folder}")


if __name__ == "__main__":
    main()

import re

import pytest
import torch
from torch import nn

from flowrl.rewards.geneval import GENEVAL_CLASSES
from flowrl.rewards.geneval_parts import load_detector, mask2former, mmdet_weights
from flowrl.rewards.geneval_parts.mmdet_weights import convert, load, main, save, swin_index, unfold_to_swin

DEPTHS, HEADS, WIDTH, WINDOW, DIM = (1, 2, 1, 1), (1, 2, 3, 3), 12, 4, 32


def tiny_config():
    from transformers import Mask2FormerConfig, SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = SwinConfig(
        embed_dim=WIDTH, depths=list(DEPTHS), num_heads=list(HEADS), window_size=WINDOW, out_features=stages
    )
    sizes = {"feature_size": DIM, "mask_feature_size": DIM, "hidden_dim": DIM, "num_attention_heads": 4}
    sizes |= {"encoder_layers": 2, "decoder_layers": 3, "encoder_feedforward_dim": 24, "dim_feedforward": 40}
    return Mask2FormerConfig(backbone_config=swin, num_labels=80, num_queries=10, **sizes)


def mmdet_index(window):
    """As mmdet counts relative positions: the sum of two sequences of steps, the second reversed."""
    rows, columns = torch.arange(0, (2 * window - 1) * window, 2 * window - 1), torch.arange(window)
    steps = (rows[:, None] + columns).reshape(1, -1)
    return (steps + steps.T).flip(1)


def mmdet_checkpoint(model, folder):
    """The weights of a transformers model under the names of mmdet 2.x, written down layer by layer."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    ours = load_file(folder / "model.safetensors")
    theirs = {}

    def copy(target, source, kinds=("weight", "bias")):
        for kind in kinds:
            theirs[f"{target}.{kind}"] = ours.pop(f"{source}.{kind}")

    def fuse(target, sources):
        for kind in ("weight", "bias"):
            theirs[f"{target}{kind}"] = torch.cat([ours.pop(f"{source}.{kind}") for source in sources])

    swin = "model.pixel_level_module.encoder."
    copy("backbone.patch_embed.projection", f"{swin}embeddings.patch_embeddings.projection")
    copy("backbone.patch_embed.norm", f"{swin}embeddings.norm")
    for i, depth in enumerate(DEPTHS):
        copy(f"backbone.norm{i}", f"{swin}hidden_states_norms.stage{i + 1}")
        for j in range(depth):
            block, source = f"backbone.stages.{i}.blocks.{j}", f"{swin}encoder.layers.{i}.blocks.{j}"
            copy(f"{block}.norm1", f"{source}.layernorm_before")
            fuse(f"{block}.attn.w_msa.qkv.", [f"{source}.attention.self.{name}" for name in ("query", "key", "value")])
            copy(f"{block}.attn.w_msa.proj", f"{source}.attention.output.dense")
            table = "relative_position_bias_table"
            theirs[f"{block}.attn.w_msa.{table}"] = ours.pop(f"{source}.attention.self.{table}")
            theirs[f"{block}.attn.w_msa.relative_position_index"] = mmdet_index(WINDOW)
            copy(f"{block}.norm2", f"{source}.layernorm_after")
            copy(f"{block}.ffn.layers.0.0", f"{source}.intermediate.dense")
            copy(f"{block}.ffn.layers.1", f"{source}.output.dense")
        if i < 3:
            down = f"backbone.stages.{i}.downsample"
            copy(f"{down}.norm", f"{swin}encoder.layers.{i}.downsample.norm")
            copy(f"{down}.reduction", f"{swin}encoder.layers.{i}.downsample.reduction", ["weight"])
            for name in ("norm.weight", "norm.bias", "reduction.weight"):
                swin_order = theirs[f"{down}.{name}"]
                blocks = swin_order.chunk(4, -1)  # pixels (0,0), (1,0), (0,1), (1,1)
                unfold = torch.stack([blocks[0], blocks[2], blocks[1], blocks[3]], -1)  # row by row, channel outside
                theirs[f"{down}.{name}"] = unfold.reshape(swin_order.shape)

    pixels, decoder = "panoptic_head.pixel_decoder", "model.pixel_level_module.decoder"
    for i in range(3):
        copy(f"{pixels}.input_convs.{i}.conv", f"{decoder}.input_projections.{i}.0")
        copy(f"{pixels}.input_convs.{i}.gn", f"{decoder}.input_projections.{i}.1")
    theirs[f"{pixels}.level_encoding.weight"] = ours.pop(f"{decoder}.level_embed")
    for i in range(2):
        layer, source = f"{pixels}.encoder.layers.{i}", f"{decoder}.encoder.layers.{i}"
        for name in ("sampling_offsets", "attention_weights", "value_proj", "output_proj"):
            copy(f"{layer}.attentions.0.{name}", f"{source}.self_attn.{name}")
        copy(f"{layer}.norms.0", f"{source}.self_attn_layer_norm")
        copy(f"{layer}.ffns.0.layers.0.0", f"{source}.fc1")
        copy(f"{layer}.ffns.0.layers.1", f"{source}.fc2")
        copy(f"{layer}.norms.1", f"{source}.final_layer_norm")
    for name, source in (("lateral_convs", "adapter_1"), ("output_convs", "layer_1")):
        copy(f"{pixels}.{name}.0.conv", f"{decoder}.{source}.0", ["weight"])
        copy(f"{pixels}.{name}.0.gn", f"{decoder}.{source}.1")
    copy(f"{pixels}.mask_feature", f"{decoder}.mask_projection")

    head = "model.transformer_module"
    names = {"query_embed": "queries_embedder", "query_feat": "queries_features", "level_embed": "level_embed"}
    for name, source in names.items():
        copy(f"panoptic_head.{name}", f"{head}.{source}", ["weight"])
    for i in range(2):
        layer, source = f"panoptic_head.transformer_decoder.layers.{i}", f"{head}.decoder.layers.{i}"
        for kind in ("weight", "bias"):
            theirs[f"{layer}.attentions.0.attn.in_proj_{kind}"] = ours.pop(f"{source}.cross_attn.in_proj_{kind}")
        copy(f"{layer}.attentions.0.attn.out_proj", f"{source}.cross_attn.out_proj")
        copy(f"{layer}.norms.0", f"{source}.cross_attn_layer_norm")
        fuse(f"{layer}.attentions.1.attn.in_proj_", [f"{source}.self_attn.{x}_proj" for x in "qkv"])
        copy(f"{layer}.attentions.1.attn.out_proj", f"{source}.self_attn.out_proj")
        copy(f"{layer}.norms.1", f"{source}.self_attn_layer_norm")
        copy(f"{layer}.ffns.0.layers.0.0", f"{source}.fc1")
        copy(f"{layer}.ffns.0.layers.1", f"{source}.fc2")
        copy(f"{layer}.norms.2", f"{source}.final_layer_norm")
    copy("panoptic_head.transformer_decoder.post_norm", f"{head}.decoder.layernorm")
    for i in range(3):
        copy(f"panoptic_head.mask_embed.{2 * i}", f"{head}.decoder.mask_predictor.mask_embedder.{i}.0")
    copy("panoptic_head.cls_embed", "class_predictor")
    left = {key for key in ours if ".swin.layernorm." not in key}
    assert left == {"criterion.empty_weight"}, left
    return theirs


@pytest.fixture(scope="module")
def model():
    from transformers import Mask2FormerForUniversalSegmentation

    torch.manual_seed(0)
    model = Mask2FormerForUniversalSegmentation(tiny_config()).eval()
    with torch.no_grad():  # norms and biases start at 1 and 0, tables at 0, which would hide a mix-up
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def state(model, tmp_path_factory):
    return mmdet_checkpoint(model, tmp_path_factory.mktemp("hf"))


def test_a_checkpoint_becomes_the_same_model(model, state, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mmdet_weights, "swin_s", tiny_config)
    monkeypatch.setattr(mask2former, "SHORT_EDGE", 64)
    names = [{"computer mouse": "mouse"}.get(name, name) for name in GENEVAL_CLASSES]
    torch.save({"meta": {"CLASSES": tuple(names), "epoch": 50}, "state_dict": state}, tmp_path / "mmdet.pth")
    main([str(tmp_path / "mmdet.pth"), str(tmp_path / "out")])
    assert f"mask2former@{tmp_path / 'out'}" in capsys.readouterr().out
    detector = load_detector(f"mask2former@{tmp_path / 'out'}")
    x = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = detector.model(x), model(x)
    assert torch.allclose(ours.class_queries_logits, theirs.class_queries_logits, atol=1e-5)
    assert torch.allclose(ours.masks_queries_logits, theirs.masks_queries_logits, atol=1e-4)
    assert torch.equal(detector.model.criterion.empty_weight, model.criterion.empty_weight)


def test_patch_merging_is_mmdets(model):
    """Against mmdet's form: nn.Unfold, norm, reduction."""
    from transformers.models.swin.modeling_swin import SwinPatchMerging

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 6, 8, 5, generator=generator)  # [N, H, W, C]
    norm, reduction = nn.LayerNorm(20), nn.Linear(20, 10, bias=False)
    with torch.no_grad():
        for p in (*norm.parameters(), *reduction.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator))
    patches = nn.Unfold(2, stride=2)(x.permute(0, 3, 1, 2)).transpose(1, 2)
    expected = reduction(norm(patches))
    swin = SwinPatchMerging(5)
    weights = {"norm.weight": norm.weight, "norm.bias": norm.bias, "reduction.weight": reduction.weight}
    swin.load_state_dict({key: unfold_to_swin(value) for key, value in weights.items()})
    got = swin(x.reshape(2, 48, 5), (6, 8))
    assert torch.allclose(got, expected, atol=1e-5)


def test_fused_projections_are_split_as_they_are_used(state):
    """mmdet views the product as [tokens, 3, heads, width of a head]."""
    converted = convert(state, WINDOW)
    x = torch.randn(7, 2 * WIDTH, generator=torch.Generator().manual_seed(3))
    fused = "backbone.stages.1.blocks.1.attn.w_msa.qkv."
    product = nn.functional.linear(x, state[f"{fused}weight"], state[f"{fused}bias"]).reshape(7, 3, HEADS[1], -1)
    target = "model.pixel_level_module.encoder.encoder.layers.1.blocks.1.attention.self."
    for i, name in enumerate(("query", "key", "value")):
        single = nn.functional.linear(x, converted[f"{target}{name}.weight"], converted[f"{target}{name}.bias"])
        assert torch.allclose(single.reshape(7, HEADS[1], -1), product[:, i], atol=1e-6)


@pytest.mark.parametrize("window", [2, 4, 7])
def test_relative_positions_are_counted_alike(window):
    assert torch.equal(swin_index(window), mmdet_index(window))


def test_every_key_must_be_used_and_every_weight_filled(state, tmp_path):
    with pytest.raises(ValueError, match=r"1 of \d+ keys are not those of mmdet .*: panoptic_head.extra.weight"):
        convert({**state, "panoptic_head.extra.weight": torch.zeros(1)}, WINDOW)
    index = "backbone.stages.0.blocks.0.attn.w_msa.relative_position_index"
    with pytest.raises(ValueError, match=f"{index} counts relative positions in another order"):
        convert({**state, index: state[index].T}, WINDOW)
    less = {key: value for key, value in state.items() if key != "panoptic_head.cls_embed.bias"}
    with pytest.raises(ValueError, match=r"without a value: \['class_predictor.bias'\]"):
        save(less, tmp_path / "less", tiny_config())
    more = {**state, "panoptic_head.mask_embed.4.weight": torch.zeros(3, DIM)}
    with pytest.raises(ValueError, match=r"the weights do not fit the model"):
        save(more, tmp_path / "more", tiny_config())
    deeper = {re.sub(r"decoder.layers.1", "decoder.layers.2", key): value for key, value in state.items()}
    with pytest.raises(ValueError, match=r"superfluous: \['model.transformer_module.decoder.layers.2"):
        save({**state, **deeper}, tmp_path / "deeper", tiny_config())
    assert not (tmp_path / "less").exists()


class Foreign:
    pass


def test_only_weights_and_plain_data_are_read(state, tmp_path):
    torch.save({"meta": {"hooks": Foreign()}, "state_dict": state}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match=r"not a checkpoint of weights and plain data .*'state_dict'\]\}, NEW\)"):
        load(tmp_path / "foreign.pth")
    torch.save(state, tmp_path / "bare.pth")
    with pytest.raises(ValueError, match="has no 'state_dict'"):
        load(tmp_path / "bare.pth")
    torch.save({"meta": {"CLASSES": ("cat",) * 80}, "state_dict": state}, tmp_path / "cats.pth")
    with pytest.raises(ValueError, match=r"class 0 of .* is 'cat', not 'person'"):
        load(tmp_path / "cats.pth")


def test_the_released_model_is_swin_s():
    from transformers import Mask2FormerForUniversalSegmentation

    config = mmdet_weights.swin_s()
    with torch.device("meta"):
        model = Mask2FormerForUniversalSegmentation(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(68.7e6, rel=1e-3)
    swin = config.backbone_config
    assert (swin.embed_dim, swin.depths, swin.num_heads, swin.window_size) == (96, [2, 2, 18, 2], [3, 6, 12, 24], 7)
    assert (config.num_labels, config.num_queries, config.decoder_layers - 1, config.encoder_layers) == (80, 100, 9, 6)
    assert (config.dim_feedforward, config.encoder_feedforward_dim, config.hidden_dim) == (2048, 1024, 256)
    assert config.num_attention_heads == 8 and not config.enforce_input_projection

"""Shared by all tests: no network, one thread, and tiny random pipelines built from config objects.

Fixtures (pytest runs with `--import-mode=importlib`, so helpers are shared as fixtures, not imports):

    sd3_folder         path of a saved tiny StableDiffusion3Pipeline (two CLIP encoders, no T5); read only.
    make_sd3_pipe      (dtype=torch.float32) -> a fresh StableDiffusion3Pipeline: 16x16 px, latents [4, 8, 8].
    make_flux_pipe     (dtype=torch.float32, shift="dynamic") -> a fresh FluxPipeline (CLIP + T5, guidance embedded):
                       latents [16, 16] at 16x16 px. shift="static" gives it a scheduler like FLUX.1-schnell's.
    make_sd3_policy    (peft=None, *, dtype=torch.float32, pipe=None, **kw) -> a fresh DiffusersPolicy.
    make_flux_policy   the same for FLUX. `peft`: None trains all weights, True takes a small LoraConfig
                       (r=4, alpha=8), a LoraConfig is taken as it is. `kw` goes to DiffusersPolicy.
    perturb            (policy, scale=0.05, seed=0) -> adds noise to the trained weights, so that nothing is zero by
                       initialisation (LoRA's B is).
    give_copies        (policy, *names) -> WeightCopies of the current weights, plugged into `policy.use`.
    make_rows          (groups=2, size=2) -> (prompts, members): groups x size samples, as `policy.sample` takes them.

Fresh objects have the same weights every time and cost a few milliseconds: transformer and scheduler are copied, the
frozen parts (VAE, text encoders, tokenizers) are shared by all fp32 pipelines. Do not change those; remove your hooks.
"""

import copy
import os
import string

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before everything else
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # spinning OpenMP threads stall when anything else runs

TEXT_TOKENS = 20
WORDS = ("red square", "two blue circles", "a green cat", "nine dots")


def _clip_tokenizer():
    from transformers import CLIPTokenizer

    symbols = string.ascii_letters + string.digits + string.punctuation
    tokens = [*symbols, *(s + "</w>" for s in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=TEXT_TOKENS)


def _clip_config(tokenizer, width: int):
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(width: int):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((c, -4.0) for c in string.printable[:95]), ("▁", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_TOKENS,
    )
    config = T5Config(vocab_size=len(pieces), d_model=width, d_kv=width // 2, d_ff=2 * width, num_layers=1, num_heads=2)
    return tokenizer, T5EncoderModel(config)


def _vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.3,  # not neutral, or a forgotten factor would not be seen
        shift_factor=0.1,
    )


def _lively(transformer):
    """Larger random weights: outputs of order one that depend on text, time and position."""
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            if p.ndim > 1:
                p.normal_(std=(0.6 if "proj_out" in name else 1.0) / p.shape[1] ** 0.5)
            elif name.endswith("bias"):
                p.normal_(std=0.05)
    return transformer


@pytest.fixture(scope="session")
def _sd3_parts():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection

    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = _clip_tokenizer()
        encoders = [CLIPTextModelWithProjection(_clip_config(tokenizer, 16)) for _ in range(2)]
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
        )
        return {
            "transformer": _lively(transformer),
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
            "vae": _vae(),
            "text_encoder": encoders[0],
            "tokenizer": tokenizer,
            "text_encoder_2": encoders[1],
            "tokenizer_2": tokenizer,
            "text_encoder_3": None,
            "tokenizer_3": None,
        }


@pytest.fixture(scope="session")
def _flux_parts():
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel

    with torch.random.fork_rng():
        torch.manual_seed(1)
        tokenizer = _clip_tokenizer()
        tokenizer_2, t5 = _t5(24)
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
        return {
            "transformer": _lively(transformer),
            "scheduler": FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=8, max_image_seq_len=64
            ),
            "vae": _vae(),
            "text_encoder": CLIPTextModel(_clip_config(tokenizer, 16)),
            "tokenizer": tokenizer,
            "text_encoder_2": t5,
            "tokenizer_2": tokenizer_2,
        }


def _fresh(cls, parts, dtype):
    trained = ("transformer", "scheduler")
    frozen = () if dtype == torch.float32 else ("vae", "text_encoder", "text_encoder_2")
    pipe = cls(**{k: copy.deepcopy(v) if k in (*trained, *frozen) else v for k, v in parts.items()})
    pipe.set_progress_bar_config(disable=True)
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval()  # as from_pretrained does: T5 has dropout
    return pipe if dtype == torch.float32 else pipe.to(dtype)


@pytest.fixture(scope="session")
def make_sd3_pipe(_sd3_parts):
    from diffusers import StableDiffusion3Pipeline

    def make(dtype=torch.float32):
        return _fresh(StableDiffusion3Pipeline, _sd3_parts, dtype)

    return make


@pytest.fixture(scope="session")
def make_flux_pipe(_flux_parts):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    def make(dtype=torch.float32, shift="dynamic"):
        pipe = _fresh(FluxPipeline, _flux_parts, dtype)
        if shift == "static":
            pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
        return pipe

    return make


@pytest.fixture(scope="session")
def sd3_folder(make_sd3_pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    make_sd3_pipe().save_pretrained(folder, safe_serialization=True)
    return folder


def _policy_maker(make_pipe):
    def make(peft=None, *, dtype=torch.float32, pipe=None, **kw):
        from peft import LoraConfig

        from flowrl import DiffusersPolicy

        if peft is True:
            peft = LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian")
        options = {"height": 16, "width": 16, "max_sequence_length": TEXT_TOKENS} | kw
        with torch.random.fork_rng():
            torch.manual_seed(2)  # the adapter's first weights
            return DiffusersPolicy(make_pipe(dtype) if pipe is None else pipe, peft, **options)

    return make


@pytest.fixture(scope="session")
def make_sd3_policy(make_sd3_pipe):
    return _policy_maker(make_sd3_pipe)


@pytest.fixture(scope="session")
def make_flux_policy(make_flux_pipe):
    return _policy_maker(make_flux_pipe)


@pytest.fixture(scope="session")
def perturb():
    def change(policy, scale=0.05, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in policy.trainable().values():
                p.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))
        return policy

    return change


@pytest.fixture(scope="session")
def give_copies():
    def give(policy, *names):
        from flowrl.training.weights import WeightCopies

        copies = WeightCopies(policy.trainable(), names)
        policy.copies = copies
        return copies

    return give


@pytest.fixture(scope="session")
def make_rows():
    def make(groups=2, size=2):
        from flowrl.rollout import Prompt

        # Indices far from 0..n-1: a group's identity is not its place.
        prompts = [Prompt(10 + 3 * g, WORDS[g % len(WORDS)]) for g in range(groups)]
        return [p for p in prompts for _ in range(size)], list(range(size)) * groups

    return make

import torch
from flowrl import noise, FlowSDE
from flowrl.training.trainer import EVALUATION
def test_dbg(make_trainer, make_sd3_pipe, tmp_path):
    sampler = FlowSDE.from_config(make_sd3_pipe().scheduler.config, steps=4, noise_level=0.7)
    prompts=["red","a cat"]
    tr = make_trainer(tmp_path, sampler=sampler, eval_prompts=prompts, iterations=3, learning_rate=2e-2); tr.train()
    def img(pipe):
        pipe.set_progress_bar_config(disable=True)
        return pipe(prompts, latents=noise.batch_normal((4, 8, 8), 3, EVALUATION, [0, 1], [0, 0], noise.INITIAL), num_inference_steps=4, guidance_scale=1.0, height=16, width=16, max_sequence_length=10, output_type="pt").images
    g = {w: tr.evaluate(weights=w).grid for w in ("policy","ema","reference")}
    a = img(make_sd3_pipe())
    p = make_sd3_pipe(); p.load_lora_weights(tmp_path/"final", weight_name="pytorch_lora_weights.safetensors", use_safetensors=True)
    b = img(p)
    print("DBG active", p.get_active_adapters(), {k: v for k, v in p.transformer.peft_config.items()})
    print("DBG lora keys", len([n for n,_ in p.transformer.named_parameters() if "lora" in n]))
    for w in g: print("DBG", w, "base", (a-g[w]).abs().max().item(), "lora", (b-g[w]).abs().max().item())
    print("DBG cfg", tr.policy.peft_config)
    sd = dict(p.transformer.named_parameters())
    with tr.policy.use("ema"):
        for n,q in tr.policy.trainable().items():
            m = n.replace(".default.", ".default_0.")
            if m not in sd or not torch.equal(sd[m], q): print("DBG diff", n, m in sd)
        for n,q in tr.policy.module.named_parameters():
            m = n.replace(".default.", ".default_0.")
            if not torch.equal(sd[m], q): print("DBG diffbase", n)

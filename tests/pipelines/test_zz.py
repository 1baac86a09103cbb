import torch
def test_a(generator, perturb, make_rows, tmp_path):
    policy, rows = perturb(generator.policy(True, dtype=torch.bfloat16)), make_rows()
    ours = generator.stock(policy.pipe, rows)
    policy.save_pretrained(tmp_path)
    fresh=generator.pipe(torch.bfloat16)
    base=generator.stock(fresh,rows)
    fresh.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    print("DT", {p.dtype for n,p in fresh.transformer.named_parameters() if "lora" in n}, (generator.stock(fresh,rows)-ours).abs().max(), (base-ours).abs().max())

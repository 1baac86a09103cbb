import torch
def test_a(generator, make_rows):
    p=generator.policy(dtype=torch.bfloat16)
    try: print("SD", p.stock_difference(*make_rows(), generator.sampler(steps=10), seed=1))
    except Exception as e: print("EXC", e)
    p=generator.policy(True, dtype=torch.bfloat16)
    try: print("SD", p.stock_difference(*make_rows(), generator.sampler(steps=10), seed=1))
    except Exception as e: print("EXC", e)

import torch

from flowrl.core import Algorithm, Draw, Request, run_sampler, stateless_rng


def test_fixed_group_size():
    def serve(requests):
        return [Draw(request, sample=i, reward=float(i)) for request in requests for i in range(request.n)]

    draws, generated = run_sampler(Algorithm("grpo", group_size=3).sampler(["cat", "dog", "cat"]), serve)
    assert generated == 9
    assert [draw.request.group for draw in draws] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [draw.request.prompt for draw in draws[::3]] == ["cat", "dog", "cat"]


def test_a_sampler_may_ask_again():
    def until_solved(prompts):
        draws = yield [Request(prompt, 2, group) for group, prompt in enumerate(prompts)]
        solved = {draw.request.group for draw in draws if draw.reward > 0}
        return draws + (yield [draws[2 * group].request for group in (0, 1) if group not in solved])

    def serve(requests):
        return [Draw(r, None, float(r.prompt == "easy")) for r in requests for _ in range(r.n)]

    draws, generated = run_sampler(until_solved(["easy", "hard"]), serve)
    assert (len(draws), generated) == (6, 6)


def test_stateless_rng_is_a_function_of_its_key():
    def draw(*key):
        return torch.rand(4, generator=stateless_rng(*key))

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1), (1, 1, 0), (0, 2**40, 0)]
    values = torch.stack([draw(*key) for key in keys])
    assert len(values.unique(dim=0)) == len(keys)

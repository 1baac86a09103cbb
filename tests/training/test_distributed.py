"""Two processes (gloo) run the same experiment as one, each with the whole model (DDP) or with a shard (FSDP2)."""

import copy
import os

import pytest
import torch
from accelerate import debug_launcher
from safetensors.torch import load_file

from flowrl.samplers import FlowSDE, Window

FIELDS = ("latents", "log_prob", "media")
SETTINGS = {
    "iterations": 2,
    "micro_batch_size": 2,
    "updates_per_iteration": 2,
    # Steps in proportion to the gradients: Adam's division would blow rounding up where gradients are tiny.
    "adam_epsilon": 1e-2,
    "eval_prompts": ["red", "a cat", "moon"],
    "save_every": 1,
}


def brightness(images, prompts):
    return images.flatten(1).mean(1)


def _forget_the_parents_accelerator():
    """A forked child inherits accelerate's global state, which says there is one process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def whole(p):
    """A parameter, or all shards of it; every process calls it."""
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def experiment(make_trainer, folder, objective, peft):
    """Everything this process saw, by sample number."""
    trainer = make_trainer(folder / "run", objective, peft, rewards=brightness, **SETTINGS)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    rollouts = []
    inner = trainer.rollout

    def watched(iteration):
        out = inner(iteration)
        numbers = trainer.plan.rows(trainer.args.seed, iteration, rank)
        mine = {n: {f: getattr(out[0], f)[i].clone() for f in FIELDS} for i, n in enumerate(numbers)}
        kept = {"samples": mine, "reward": out[1].reward, "advantage": out[2].adv, "metrics": dict(out[3])}
        rollouts.append(copy.deepcopy(kept))
        return out

    trainer.rollout = watched
    summary = trainer.train()
    # After training, on all processes: what the README does.
    trainer.save_pretrained(folder / "out")
    overall = trainer.evaluate().overall
    weights = {n: whole(p) for n, p in trainer.policy.trainable().items()}
    copies = {}
    for name in trainer.copies.names:
        with trainer.copies.swapped(name):
            copies |= {f"{name} {n}": whole(p) for n, p in trainer.copies.parameters.items()}
    result = {
        "world": world,
        "kind": str(trainer.accelerator.distributed_type.value),
        "folder": folder,
        "rollouts": rollouts,
        "weights": weights,
        "copies": copies,
        "overall": overall,
        "before": summary["before"]["overall"],
    }
    torch.save(result, folder / f"result-{rank}.pt")


def child(make_trainer, folder, objective, peft):
    _forget_the_parents_accelerator()
    experiment(make_trainer, folder, objective, peft)


def _shard_on_cpu(**settings):
    """What `accelerate launch --use_fsdp --fsdp_version 2` sets. accelerate has FSDP for accelerators only: say that
    the CPU is one."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "JointTransformerBlock",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    } | settings
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_HPU


def sharded_child(make_trainer, folder, objective, peft, keep_whole):
    _forget_the_parents_accelerator()
    # Weights that stay whole after a forward must not outlive a swap.
    _shard_on_cpu(FSDP_RESHARD_AFTER_FORWARD=str(not keep_whole).lower())
    experiment(make_trainer, folder, objective, peft)


def results(folder, world):
    return [torch.load(folder / f"result-{r}.pt", weights_only=False) for r in range(world)]


@pytest.fixture(scope="module")
def runs(make_trainer, tmp_path_factory):
    """(objective, peft) -> ([result of the single process], [results of the two]); each pair is run once."""
    made = {}

    def get(objective, peft):
        if (objective, peft) not in made:
            one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
            experiment(make_trainer, one, objective, peft)
            debug_launcher(child, (make_trainer, two, objective, peft), num_processes=2)
            made[objective, peft] = one, two
        one, two = made[objective, peft]
        return results(one, 1), results(two, 2)

    return get


kinds = pytest.mark.parametrize(
    ("objective", "peft"),
    [
        ("grpo", True),
        ("nft", False),
        pytest.param("grpo", False, marks=pytest.mark.slow),
        pytest.param("nft", True, marks=pytest.mark.slow),
    ],
)


@kinds
def test_two_processes_share_the_samples_and_draw_the_same_images(runs, objective, peft):
    (one,), two = runs(objective, peft)
    assert one["world"] == 1 and [r["world"] for r in two] == [2, 2]
    # Iteration 0 starts from equal weights: the images are the same to rounding.
    whole = one["rollouts"][0]["samples"]
    halves = [r["rollouts"][0]["samples"] for r in two]
    assert [len(h) for h in halves] == [4, 4] and not halves[0].keys() & halves[1].keys()
    both = halves[0] | halves[1]
    assert both.keys() == whole.keys()
    for number, sample in whole.items():
        for field in FIELDS:
            torch.testing.assert_close(both[number][field], sample[field], rtol=1e-5, atol=1e-5)


@kinds
def test_rewards_and_advantages_are_gathered_in_the_order_of_the_samples(runs, objective, peft):
    (one,), two = runs(objective, peft)
    a, b, c = (r["rollouts"][0] for r in (one, *two))
    assert torch.equal(b["reward"], c["reward"]) and torch.equal(b["advantage"], c["advantage"])
    torch.testing.assert_close(b["reward"], a["reward"], rtol=0, atol=1e-6)
    # Rewards spread over .004, so that rounding of 1e-7 is 1e-4 of an advantage.
    torch.testing.assert_close(b["advantage"], a["advantage"], rtol=0, atol=1e-3)
    assert b["metrics"] == c["metrics"]
    for key, value in a["metrics"].items():
        assert b["metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


@kinds
def test_weights_after_two_iterations_agree(runs, make_trainer, tmp_path, objective, peft):
    (one,), two = runs(objective, peft)
    start = dict(make_trainer(tmp_path, objective, peft).policy.trainable())
    moved = max((one["weights"][n] - p).abs().max().item() for n, p in start.items())
    assert moved > 1e-5
    for name, expected in one["weights"].items():
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name
        torch.testing.assert_close(two[0]["weights"][name], expected, rtol=0, atol=1e-2 * moved)
    for name, expected in one["copies"].items():
        assert torch.equal(two[0]["copies"][name], two[1]["copies"][name]), name
        torch.testing.assert_close(two[0]["copies"][name], expected, rtol=0, atol=1e-2 * moved)


@kinds
def test_evaluations_agree(runs, objective, peft):
    (one,), two = runs(objective, peft)
    assert two[0]["overall"] == two[1]["overall"]
    for key in ("before", "overall"):
        assert two[0][key] == pytest.approx(one[key], abs=1e-5)


def test_images_and_sample_sizes_are_measured_over_all_processes(runs, rows_of):
    (one,), two = runs("grpo", True)
    a, b = (rows_of(folder / "run") for folder in (one["folder"], two[0]["folder"]))
    names = [k for k in a[0] if k.startswith("images/") or k == "train/effective_sample_size"]
    assert len(names) == 9
    for name in names:  # of the first iteration, which starts from equal weights
        assert b[0][name] == pytest.approx(a[0][name], rel=1e-4, abs=1e-6), name


def test_what_two_processes_save_is_complete_and_loads_in_one(runs, make_trainer, rows_of, tmp_path):
    _, two = runs("grpo", True)
    folder = two[0]["folder"]
    assert (folder / "out" / "pytorch_lora_weights.safetensors").is_file()
    rows = rows_of(folder / "run")
    assert [r["iteration"] for r in rows] == [0, 1]
    newest = folder / "run" / "checkpoints" / "iteration-000002"
    assert {"rng-0.pt", "rng-1.pt", "model.safetensors"} <= {p.name for p in newest.iterdir()}
    single = make_trainer(tmp_path, rewards=brightness, **SETTINGS)
    single.load_checkpoint(newest)
    for name, p in single.policy.trainable().items():
        assert torch.equal(p.detach(), two[0]["weights"][name])
    assert single.iteration == 2 and single.updates == 4


# ---------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(("objective", "peft", "keep_whole"), [("nft", False, True), ("grpo", True, False)])
def test_a_sharded_model_trains_saves_and_resumes_the_same_run(
    runs, make_trainer, rows_of, tmp_path, objective, peft, keep_whole
):
    (one,), ddp = runs(objective, peft)
    debug_launcher(sharded_child, (make_trainer, tmp_path, objective, peft, keep_whole), num_processes=2)
    two = results(tmp_path, 2)
    assert [r["kind"] for r in two] == ["FSDP", "FSDP"] and ddp[0]["kind"] == "MULTI_CPU"
    a, b = (rows_of(folder / "run") for folder in (ddp[0]["folder"], tmp_path))
    for key in ("train/loss", "train/grad_norm", "reward/mean"):
        assert [r[key] for r in b] == pytest.approx([r[key] for r in a], rel=1e-2), key
    assert two[0]["overall"] == two[1]["overall"] == pytest.approx(one["overall"], abs=1e-5)
    start = dict(make_trainer(tmp_path / "start", objective, peft).policy.trainable())
    moved = max((one["weights"][n] - p).abs().max().item() for n, p in start.items())
    for name, expected in (one["weights"] | one["copies"]).items():
        found = (two[0]["weights"] | two[0]["copies"])[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 * moved)
    # Checkpoint and final weights are whole, in one process too.
    single = make_trainer(tmp_path / "single", objective, peft, rewards=brightness, **SETTINGS)
    single.load_checkpoint(tmp_path / "run" / "checkpoints" / "iteration-000002")
    for name, p in single.policy.trainable().items():
        assert torch.equal(p.detach(), two[0]["weights"][name]), name
    single.save_pretrained(tmp_path / "again")
    part = "" if peft else "transformer"
    saved, again = (
        {k: v for f in (tmp_path / d / part).glob("*.safetensors") for k, v in load_file(f).items()}
        for d in ("out", "again")
    )
    assert saved.keys() == again.keys() and len(saved) > 1
    assert all(torch.equal(v, again[k]) for k, v in saved.items())


def refuse_shards(make_trainer, folder):
    windows = FlowSDE(steps=4, plan=Window(size=1, start_range=(0, 3), scope="sample"))
    messages = []
    for version, sampler in (("1", None), ("2", windows)):
        _forget_the_parents_accelerator()
        _shard_on_cpu(FSDP_VERSION=version)
        try:
            make_trainer(folder / "run", sampler=sampler)
        except ValueError as error:
            messages.append(str(error))
    torch.save(messages, folder / f"refused-{torch.distributed.get_rank()}")


def test_what_shards_cannot_do_is_refused(make_trainer, tmp_path):
    debug_launcher(refuse_shards, (make_trainer, tmp_path), num_processes=2)
    for rank in range(2):
        version, windows = torch.load(tmp_path / f"refused-{rank}")
        assert "not by FSDP1: start it with `--fsdp_version 2`" in version
        assert "would wait for ever" in windows


def encode(make_trainer, pipeline, folder):
    _forget_the_parents_accelerator()
    _shard_on_cpu()
    trainer = make_trainer(folder / "run", policy=pipeline)
    rows = trainer.policy.encode(trainer.prompts[:2]).arguments
    torch.save(rows, folder / f"rows-{trainer.accelerator.process_index}")


def test_every_process_has_the_text_encoders(make_trainer, make_sd3_policy, sd3_folder, tmp_path):
    """The launcher's default is to load on the first process only, what FSDP will hand out: these it does not."""
    debug_launcher(encode, (make_trainer, str(sd3_folder), tmp_path), num_processes=2)
    expected = make_sd3_policy(max_sequence_length=128).encode(make_trainer(tmp_path / "one").prompts[:2]).arguments
    for rank in range(2):
        rows = torch.load(tmp_path / f"rows-{rank}")
        assert rows.keys() == expected.keys() and all(torch.equal(rows[k], v) for k, v in expected.items())


# ---------------------------------------------------------------------------------------------- half precision


def halves(make_trainer, policy, folder, objective):
    """Two iterations in bfloat16, then the second of them again from a checkpoint: what this process saw."""
    settings = SETTINGS | {"eval_prompts": None, "mixed_precision": "bf16"}
    trainer = make_trainer(folder / "run", objective, policy=policy(), rewards=brightness, **settings)
    module, rank = trainer.policy.module, trainer.accelerator.process_index
    seen = {"times": [], "computed": set(), "gathered": set(), "ratio": [], "samples": []}
    module.time_text_embed.register_forward_pre_hook(lambda m, a: seen["times"].append(a[0].unique().tolist()))
    attention = module.transformer_blocks[0].attn
    attention.to_q.register_forward_hook(lambda m, a, out: seen["computed"].add(out.dtype))
    attention.norm_q.register_forward_hook(lambda m, a, out: seen["gathered"].add(m.weight.dtype))
    inner = trainer.rollout

    def watched(iteration):
        out = inner(iteration)
        seen["ratio"].append(trainer.check_ratio(out[0]))
        numbers = trainer.plan.rows(trainer.args.seed, iteration, rank)
        seen["samples"].append({n: out[0].latents[i].clone() for i, n in enumerate(numbers)})
        return out

    trainer.rollout = watched
    trainer.train()
    trainer.save_pretrained(folder / "out")
    again = make_trainer(folder / "again", objective, policy=policy(), rewards=brightness, **settings)
    again.train(resume=folder / "run" / "checkpoints" / "iteration-000001")
    state = state_in(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    torch.save(
        seen
        | {
            "kind": str(trainer.accelerator.distributed_type.value),
            "state": state,
            "summed": plugin and plugin.mixed_precision_policy.reduce_dtype,  # micro-batches and processes
            "different": [k for k, v in state_in(again).items() if not torch.equal(v, state[k])],
        },
        folder / f"result-{rank}.pt",
    )


def state_in(trainer):
    """Weights, copies and moments, whole."""
    live = trainer.policy.trainable()
    state = {f"policy {n}": whole(p) for n, p in live.items()}
    for name in trainer.copies.names:
        with trainer.copies.swapped(name):
            state |= {f"{name} {n}": whole(p) for n, p in live.items()}
    moments = trainer._plain_optimizer().state
    state |= {f"{k} {n}": whole(torch.as_tensor(v)) for n, p in live.items() for k, v in moments[p].items()}
    assert all(torch.equal(whole(p), state[f"policy {n}"]) for n, p in live.items()), "a swap changed the policy"
    return state


def halves_of_shards(make_trainer, policy, folder, objective):
    _forget_the_parents_accelerator()
    _shard_on_cpu()
    halves(make_trainer, policy, folder, objective)


@pytest.mark.parametrize(("objective", "peft", "dtype"), [("nft", None, "float32"), ("grpo", True, "bfloat16")])
def test_a_sharded_model_trains_in_half_precision_as_a_whole_one(
    make_trainer, make_sd3_policy, make_sd3_pipe, rows_of, tmp_path, objective, peft, dtype
):
    def policy():
        return make_sd3_policy(peft, dtype=getattr(torch, dtype))

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    halves(make_trainer, policy, tmp_path / "one", objective)
    debug_launcher(halves_of_shards, (make_trainer, policy, tmp_path / "two", objective), num_processes=2)
    (one,), two = results(tmp_path / "one", 1), results(tmp_path / "two", 2)
    assert [r["kind"] for r in two] == ["FSDP", "FSDP"]
    for r in (one, *two):
        assert r["computed"] == {torch.bfloat16} and r["times"] and r["different"] == []
        assert max(r["ratio"]) <= 1e-2
        assert {v.dtype for v in r["state"].values()} == {torch.float32}
    assert {d for r in two for d in r["gathered"]} == {torch.bfloat16}
    assert [r["summed"] for r in two] == [torch.float32, torch.float32]
    assert two[0]["state"].keys() == one["state"].keys()
    assert all(torch.equal(v, two[1]["state"][k]) for k, v in two[0]["state"].items())
    # What enters and leaves the network is not rounded: the very same times, latents equal to a bfloat16 of their size.
    assert {t for times in two[0]["times"] for t in times} == {t for times in one["times"] for t in times}
    latents, expected = two[0]["samples"][0] | two[1]["samples"][0], one["samples"][0]
    for number, x in expected.items():
        assert x.dtype == latents[number].dtype == torch.float32
        torch.testing.assert_close(latents[number], x, rtol=0, atol=2**-8 * x.abs().max().item())
    # A bfloat16 keeps 8 bits: a rounding is up to 2^-9, and those of an update's passes largely cancel in its sums. An
    # update follows others that were rounded differently, which moves a gradient by a few times that (two processes
    # with whole models differ by 0.9 % from one). The loss of Flow-GRPO is a sum of about 1 that cancels to zero.
    a, b = (rows_of(tmp_path / name / "run") for name in ("one", "two"))
    for key, rel, absolute in (("grad_norm", 2e-2, 0), ("loss", 2e-3, 1e-4)):
        name = f"train/{key}"
        assert [r[name] for r in b] == pytest.approx([r[name] for r in a], rel=rel, abs=absolute), key
    assert [r["reward/mean"] for r in b] == pytest.approx([r["reward/mean"] for r in a], abs=1e-4)
    start = dict(policy().trainable())
    moved = max((one["state"][f"policy {n}"] - p).abs().max().item() for n, p in start.items())
    assert moved > 1e-4
    for name, expected in one["state"].items():
        if name.split()[0] in ("policy", "old", "ema", "reference"):
            torch.testing.assert_close(two[0]["state"][name], expected, rtol=0, atol=0.1 * moved)
    # Written in float32; stock diffusers loads it, in the dtype that it is asked for.
    saved = {n.removeprefix("ema "): v for n, v in two[0]["state"].items() if n.startswith("ema ")}
    files = (tmp_path / "two" / "out" / ("" if peft else "transformer")).glob("*.safetensors")
    assert {v.dtype for f in files for v in load_file(f).values()} == {torch.float32}
    for asked in (torch.float32, torch.bfloat16):
        if peft:
            pipe = make_sd3_pipe(asked)
            pipe.load_lora_weights(tmp_path / "two" / "out", weight_name="pytorch_lora_weights.safetensors")
        else:
            # The tiny model has no T5; stock diffusers wants to be told so.
            pipe = type(make_sd3_pipe()).from_pretrained(
                tmp_path / "two" / "out", text_encoder_3=None, tokenizer_3=None, torch_dtype=asked
            )
        loaded = {n.replace(".default_0.", ".default."): p for n, p in pipe.transformer.named_parameters()}
        assert saved.keys() <= loaded.keys()
        for name, value in saved.items():
            assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name
            assert loaded[name].dtype in (asked, torch.float32)


def overflow_of_shards(make_trainer, policy, folder):
    """float16 with gradients that overflow in one update, on the second process only."""
    from accelerate import Accelerator

    import flowrl.training.trainer as module

    class Scaled(Accelerator):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")  # accelerate has it for accelerators

    _forget_the_parents_accelerator()
    _shard_on_cpu()
    module.Accelerator = Scaled
    settings = SETTINGS | {"eval_prompts": None, "mixed_precision": "fp16", "iterations": 1}
    trainer = make_trainer(folder / "run", policy=policy(), rewards=brightness, **settings)
    acc, clip, calls = trainer.accelerator, trainer.accelerator.clip_grad_norm_, []
    start = {n: whole(p) for n, p in trainer.policy.trainable().items()}

    def overflow(parameters, limit):
        parameters = list(parameters)
        calls.append({n: torch.equal(whole(p), start[n]) for n, p in trainer.policy.trainable().items()})
        if len(calls) == 1 and acc.process_index == 1:
            gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
            next(g for g in gradients if g.numel())[0] = torch.inf
        return clip(parameters, limit)

    acc.clip_grad_norm_ = overflow
    trainer.train()
    calls.append({n: torch.equal(whole(p), start[n]) for n, p in trainer.policy.trainable().items()})
    result = {"same": [set(c.values()) for c in calls], "updates": trainer.updates, "scale": acc.scaler.get_scale()}
    torch.save(result, folder / f"result-{acc.process_index}.pt")


def test_shards_skip_a_step_together(make_trainer, make_sd3_policy, rows_of, tmp_path):
    debug_launcher(overflow_of_shards, (make_trainer, lambda: make_sd3_policy(True), tmp_path), num_processes=2)
    for result in results(tmp_path, 2):
        assert result["same"][:2] == [{True}, {True}] and False in result["same"][2]
        assert result["updates"] == 1 and result["scale"] == 2.0**15
    assert [r["train/step_skipped"] for r in rows_of(tmp_path / "run")] == [0.5]


# ---------------------------------------------------------------------------------------------- refusals


def refuse(make_trainer, folder):
    _forget_the_parents_accelerator()
    outcomes = []
    for asked in (1, 3, 2):
        try:
            make_trainer(folder / "run", processes=asked)
            outcomes.append("accepted")
        except ValueError as error:
            outcomes.append(str(error))
    try:
        make_trainer(folder / "run", prompts_per_iteration=3, group_size=3, updates_per_iteration=1)
    except ValueError as error:
        outcomes.append(str(error))
    torch.save(outcomes, folder / f"outcome-{torch.distributed.get_rank()}.pt")


def test_another_number_of_processes_than_asked_for_is_refused(make_trainer, tmp_path):
    debug_launcher(refuse, (make_trainer, tmp_path), num_processes=2)
    for rank in range(2):
        one, three, two, plan = torch.load(tmp_path / f"outcome-{rank}.pt")
        assert "asks for 1 process(es) and the launcher started 2" in one
        assert "asks for 3 process(es) and the launcher started 2" in three and "--nproc_per_node 3" in three
        assert two == "accepted"
        assert "9 do not divide into 1 updates x 2 processes" in plan


def resume_across(make_trainer, folder, start):
    _forget_the_parents_accelerator()
    trainer = make_trainer(folder / "run", rewards=brightness, **SETTINGS)
    trainer.train(resume=start)
    if trainer.accelerator.is_main_process:
        torch.save({n: p.detach() for n, p in trainer.policy.trainable().items()}, folder / "weights.pt")


def test_a_run_may_go_on_with_more_processes(runs, make_trainer, tmp_path):
    """One process saved after an iteration, two go on: the same run to rounding."""
    (one,), _ = runs("grpo", True)
    first = make_trainer(tmp_path / "first", rewards=brightness, **SETTINGS | {"iterations": 1})
    first.train()
    debug_launcher(
        resume_across,
        (make_trainer, tmp_path, tmp_path / "first" / "checkpoints" / "iteration-000001"),
        num_processes=2,
    )
    found = torch.load(tmp_path / "weights.pt")
    start = {n: p.detach() for n, p in first.policy.trainable().items()}
    moved = max((one["weights"][n] - p).abs().max().item() for n, p in start.items())
    for name, expected in one["weights"].items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=2e-2 * moved)

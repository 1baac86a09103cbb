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
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
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


def sharded_windows(make_trainer, folder):
    _forget_the_parents_accelerator()
    _shard_on_cpu()
    plan = Window(size=1, start_range=(0, 3), scope="sample")
    try:
        make_trainer(folder / "run", sampler=FlowSDE(steps=4, plan=plan))
    except ValueError as error:
        (folder / f"refused-{torch.distributed.get_rank()}").write_text(str(error))


def test_a_plan_that_lets_shards_wait_for_one_another_is_refused(make_trainer, tmp_path):
    debug_launcher(sharded_windows, (make_trainer, tmp_path), num_processes=2)
    for rank in range(2):
        assert "would wait for ever" in (tmp_path / f"refused-{rank}").read_text()


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

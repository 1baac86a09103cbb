"""The benchmark: its counting, measures, files and tables; whole runs are a few images on the shipped model."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from flowrl.cli import main
from flowrl.miniature import bench, results
from flowrl.miniature.bench import VARIANTS, Budget, Job
from flowrl.samplers import ODE, FlowSDE, SingleShift

SMALL = ["training.prompts_per_iteration=2", "training.group_size=4", "training.eval_images_per_prompt=1"]


@pytest.fixture(autouse=True)
def _quick_probe(monkeypatch):
    """Two images of two prompts tell that it measures."""
    monkeypatch.setattr(bench.Probe.__init__, "__defaults__", (2, 2))


@pytest.fixture
def prompts(tmp_path):
    from flowrl.miniature.shapes.world import held_out_prompts

    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in held_out_prompts()[::20]))
    return f"eval_prompts={file}"


# ---------------------------------------------------------------------------------------------------- the variants


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_recipe_at_every_setting(name):
    variant = VARIANTS[name]
    *path, last = variant.coefficient.split(".")
    for rate in bench.LEARNING_RATES:
        for value in variant.values:
            setting = {"training.learning_rate": rate, variant.coefficient: value}
            recipe = bench.recipe_of(variant, setting)
            owner = recipe
            for key in path:
                owner = getattr(owner, key)
            assert getattr(owner, last) == value and recipe.training.learning_rate == rate
    sampler = recipe.sampler.with_(schedule=SingleShift(1.5))
    recipe.objective.check(sampler)
    t = recipe.training
    assert t.lr_scheduler == "constant" and t.prompts_per_iteration * t.group_size == 144
    assert t.group_size % sampler.plan.branches == 0 and t.group_size >= 2 * sampler.plan.branches
    sampler.draw_plans(sampler.sigmas(4), 0, 0, [0] * t.group_size, list(range(t.group_size)))  # fits the grid


def test_the_variants_are_the_methods_and_samplers_they_are_named_after():
    kinds = {}
    for name, variant in VARIANTS.items():
        recipe = bench.recipe_of(variant, {})
        kinds[name] = tuple(type(x).__name__ for x in (recipe.objective, recipe.sampler, recipe.sampler.plan))
    assert kinds == {
        "flow-grpo": ("FlowGRPO", "FlowSDE", "AllSteps"),
        "flow-dppo": ("FlowDPPO", "FlowSDE", "AllSteps"),
        "e-grpo": ("EGRPO", "FlowSDE", "Merged"),
        "superflow": ("SuperFlow", "FlowSDE", "AllSteps"),
        "diffusion-nft": ("DiffusionNFT", "ODE", "AllSteps"),
        "cps": ("FlowGRPO", "CPS", "AllSteps"),
        "dance": ("FlowGRPO", "DanceSDE", "AllSteps"),
        "fast": ("FlowGRPO", "FlowSDE", "Window"),
        "mix": ("FlowGRPO", "FlowSDE", "SlidingWindow"),
    }


def test_tuning_leaves_the_held_out_prompts_alone():
    from flowrl.miniature.shapes.world import TASKS, held_out_prompts

    chosen = bench.tuning_prompts()
    assert {p["tag"] for p in chosen} == set(TASKS)
    held_out = {p["prompt"] for p in held_out_prompts() if p["tag"] != "single_object"}
    assert not held_out & {p["prompt"] for p in chosen}
    assert max(sum(p["tag"] == task for p in chosen) for task in TASKS) == 8


# -------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("name", "overrides", "rows"),
    [
        # 7 steps, of which 6 are scored again
        ("flow-grpo", (), (7, 0, 6)),
        # the reference once for each
        ("flow-grpo", ("objective.kl=0.04",), (7, 6, 6)),
        # int(.99 * 7) times with the policy, the old copy and the reference
        ("diffusion-nft", (), (7, 12, 6)),
        # steps 0-2 once for the 12 of a group; then 6, 5 or (step 2 merged with 3) 3 steps each; one is scored again
        ("e-grpo", (), (3 / 12 + (6 + 5 + 3) / 3, 0, 1)),
    ],
)
def test_forwards_are_counted_as_by_hand(name, overrides, rows):
    found = bench.cost(name, ["training.prompts_per_iteration=1", *overrides])
    assert [found[k] for k in ("rollout", "update", "gradient")] == pytest.approx(rows, abs=6e-4)
    assert found["forwards"] == pytest.approx(sum(rows), abs=6e-4)
    assert found["work"] == pytest.approx(sum(rows) + 2 * rows[2], abs=6e-4)


def test_rows_outside_rollout_and_update_do_not_count():
    module = torch.nn.Linear(3, 3)
    trainer = SimpleNamespace(policy=SimpleNamespace(module=module), phase=None)
    forwards = bench.Forwards(trainer)
    for phase in (None, "evaluate", "monitor", "checkpoint"):
        trainer.phase = phase
        module(torch.zeros(5, 3))
    assert forwards.total == forwards.work == 0
    trainer.phase = "rollout"
    module(torch.zeros(2, 3))  # gradients are enabled here too, but nobody will ask for them
    trainer.phase = "update"
    module(torch.zeros(3, 3))
    with torch.no_grad():
        module(torch.zeros(4, 3))
    assert forwards.rows == {"rollout": 2, "update": 4, "gradient": 3}
    assert (forwards.total, forwards.work) == (9, 15)


def test_budget_ends_when_both_are_spent():
    budget = Budget(forwards=100, seconds=10)
    assert budget.spent(50, 9) == 0.5
    assert budget.spent(500, 9) == 0.9
    assert budget.spent(100, 10) == budget.spent(1000, 1000) == 1
    assert Budget(forwards=100, seconds=0).spent(30, 1e9) == 0.3  # the search has no budget of seconds


# ------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def probed(make_sd3_policy, make_rows):
    """A policy as a trainer would hold it, and its probe."""
    policy = make_sd3_policy()
    rows, _ = make_rows(groups=3, size=1)
    trainer = SimpleNamespace(
        policy=policy,
        eval_prompts=rows,
        sampler=FlowSDE(steps=4),
        eval_sampler=ODE(steps=3),
        args=SimpleNamespace(sample_batch_size=8),
        copies=(),
    )
    return policy, bench.Probe(trainer, prompts=3, images=2)


def test_kl_is_0_at_the_base_and_the_closed_form_elsewhere(probed, perturb):
    policy, probe = probed
    assert probe.measure()["kl"] == 0.0
    base, sampler = probe.base, probe.sampler

    @torch.no_grad()
    def velocities():
        return [policy.velocity(base.states[:, u], base.sigmas[u], base).double() for u in range(base.units)]

    before = velocities()
    perturb(policy)
    expected = 0.0
    for u, (one, other) in enumerate(zip(before, velocities(), strict=True)):
        _, C, std = sampler.coefficients(float(base.sigmas[u]), float(base.sigmas[u + 1]), float(base.sigmas[1]))
        expected += (C**2 * (one - other).pow(2).flatten(1).sum(1) / (2 * std**2)).mean()
    assert base.units == 3 and expected > 0
    assert probe.measure()["kl"] == pytest.approx(float(expected), rel=1e-4)


def test_diversity_is_the_rms_distance_within_prompts(probed, monkeypatch):
    policy, probe = probed
    shades = torch.tensor([0.0, 0.5, 0.2, 0.2, 1.0, 0.0])  # three prompts, two images each
    monkeypatch.setattr(policy, "decode", lambda latents: shades[:, None, None, None].expand(-1, 3, 4, 4))
    assert probe.measure()["diversity"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


# --------------------------------------------------------------------------------------------------------- running


def bench_command(tmp_path, prompts, *more):
    return ["bench", "miniature", "--only", "flow-grpo", "--output", str(tmp_path / "out"), *more, *SMALL, prompts]


def test_a_run_leaves_a_record_and_is_not_repeated(tmp_path, prompts, capsys, monkeypatch):
    monkeypatch.setattr(Budget.__init__, "__defaults__", (200_000, 300.0, 1))  # evaluate after every iteration
    # 8 images x 13 forwards; done at the second iteration
    command = bench_command(tmp_path, prompts, "--seeds", "3", "--forwards", "200", "--seconds", "1", "--json")
    monkeypatch.setattr("flowrl.training.trainer.Trainer._timed", _clock)
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    record = json.loads((tmp_path / "out/flow-grpo/seed-3.json").read_text())
    assert record["failure"] is None and record["seed"] == 3 and record["images_per_iteration"] == 8
    first, second, third = record["points"]
    assert [p["forwards"] for p in record["points"]] == [0, 8 * 13, 2 * 8 * 13]
    assert [p["work"] for p in record["points"]] == [0, 8 * 25, 2 * 8 * 25]
    # rollout, decode, reward of its one batch and of all, update
    assert [p["seconds"] for p in record["points"]] == [0, 5, 10]
    assert first["kl"] == 0.0 < second["kl"] < third["kl"]
    assert 0 < third["diversity"] < 1 and 0 <= third["zero_spread_share"] <= 1
    assert first["zero_spread_share"] is None and set(first["per_task"]) <= {"single_object", *third["per_task"]}
    assert printed["forwards"][0]["score"] == second["overall"]  # the third is beyond the budget
    assert printed["seconds"][0]["score"] == first["overall"]
    assert not (tmp_path / "out/flow-grpo/seed-3/checkpoints").exists()
    assert "iteration" in (tmp_path / "out/flow-grpo/seed-3/log.txt").read_text()
    for name in ("results.json", "forwards.png", "seconds.png"):
        assert (tmp_path / "out" / name).stat().st_size > 500

    monkeypatch.setattr(bench, "measured_run", lambda *args: pytest.fail("a finished run was repeated"))
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == printed
    assert main([*command, "--forwards", "201"]) == 2
    assert "was made with another budget or other settings" in capsys.readouterr().err


def _clock(self, phase):
    """`Trainer._timed`, with phases of one second."""
    from contextlib import contextmanager

    @contextmanager
    def timed():
        outer, self.phase = self.phase, phase
        yield
        self.phase = outer
        self.seconds[phase] += 1

    return timed()


def test_a_run_that_breaks_is_recorded_with_what_it_reached(tmp_path, prompts, capsys, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("the loss\nis gone")

    monkeypatch.setattr("flowrl.training.trainer.Trainer.update", broken)
    assert main(bench_command(tmp_path, prompts, "--seeds", "0")) == 0
    captured = capsys.readouterr()
    assert "failed: RuntimeError: the loss is gone" in captured.err and "1 of 1" in captured.out
    record = json.loads((tmp_path / "out/flow-grpo/seed-0.json").read_text())
    assert record["failure"] == "RuntimeError: the loss is gone" and len(record["points"]) == 1
    assert "- flow-grpo, seed 0: RuntimeError" in results.comparison(results.load(tmp_path / "out/results.json"))


def test_an_interrupted_run_leaves_no_record(tmp_path, prompts, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.training.trainer.Trainer._agree_to_stop", lambda self: True)
    assert main(bench_command(tmp_path, prompts, "--seeds", "0")) == 130
    assert not list((tmp_path / "out").rglob("seed-0.json"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "flow-grpo,cp"], "no method 'cp' in the benchmark; did you mean 'cps'?"),
        (["training.sed=1"], "did you mean 'training.seed'?"),
        (["--docs", "nowhere.md"], "nowhere.md"),
    ],
)
def test_bad_requests_run_nothing(argv, message, tmp_path, capsys):
    assert main(["bench", "miniature", "--output", str(tmp_path), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_defaults_in_the_help_are_the_budgets(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"forwards; default {Budget().forwards} " in text
    assert f"seconds; default {Budget().seconds:g} " in text
    with pytest.raises(SystemExit):
        main(["bench", "miniature", "--seeds", "a"])
    assert "must be seeds such as 0,1,2" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- tuning


def _points(*scores, forwards=100, seconds=10.0):
    tasks = {"colors": 0.0, "single_object": 0.0}
    return [
        {
            "iteration": i,
            "forwards": forwards * i,
            "work": 0,
            "seconds": seconds * i,
            "zero_spread_share": 0.1 * i if i else None,
            "kl": float(i),
            "diversity": 0.5,
            "overall": score,
            "per_task": {t: score for t in tasks},
        }
        for i, score in enumerate(scores)
    ]


def test_the_search_is_the_same_for_all_and_its_choice_is_used(tmp_path):
    jobs = bench.search(tmp_path, ["flow-grpo", "diffusion-nft"], Budget(forwards=1600))
    assert len(jobs) == 2 * 6 and len({job.file for job in jobs}) == 12
    assert {job.budget for job in jobs} == {Budget(forwards=400, seconds=0.0)}
    assert all(job.recipe().eval_prompts == "flowrl.miniature.bench:tuning_prompts" for job in jobs)

    # 400 forwards: the points at 200, 300 and 400 count
    curves = [(0.4, 0.9, 0.5, 0.5, 0.5), (0.4, 0.4, 0.6, 0.6, 0.6), (0.4, 0.5, 0.9, 0.9, 0.0)] * 4
    records = [
        {"setting": job.setting, "points": _points(*curve), "failure": "RuntimeError: nan" if i in (1, 4) else None}
        for i, (job, curve) in enumerate(zip(jobs, curves, strict=True))
    ]
    tuning = bench.choose(tmp_path, jobs, records)
    assert [round(t["score"], 9) if t["score"] else None for t in tuning["flow-grpo"]["tried"]] == [
        *(0.5, None, 0.6),
        *(0.5, None, 0.6),
    ]
    assert tuning["flow-grpo"]["chosen"] == jobs[2].setting == {"training.learning_rate": 3e-4, "objective.kl": 0.0}
    assert tuning["diffusion-nft"]["chosen"] == jobs[7].setting
    assert json.loads((tmp_path / "tuning.json").read_text()) == tuning

    (job, sampler, other) = bench.comparison(tmp_path, ["flow-grpo", "cps", "superflow"], [0])
    assert job.recipe().training.learning_rate == 3e-4 and job.setting == tuning["flow-grpo"]["chosen"]
    assert sampler.setting == job.setting  # a sampler of Flow-GRPO that was not searched itself
    assert other.setting == {}  # it was not searched
    assert len(results.search_rows(tuning)) == 12

    # A lead of less than the standard error does not buy a larger learning rate.
    near = [{**records[0], "points": _points(0.4, *[x] * 4)} for x in (0.55, 0.585, 0.6, 0.5, 0.5, 0.5)]
    near = [{**r, "setting": job.setting} for r, job in zip(near, jobs, strict=False)]
    assert bench.choose(tmp_path, jobs[:6], near)["flow-grpo"]["chosen"] == jobs[1].setting
    assert jobs[1].setting["training.learning_rate"] < jobs[2].setting["training.learning_rate"]

    nothing = [{**r, "failure": "RuntimeError: nan"} for r in records[:6]]
    assert bench.choose(tmp_path, jobs[:6], nothing)["flow-grpo"]["chosen"] == {}
    assert json.loads((tmp_path / "tuning.json").read_text())["diffusion-nft"] == tuning["diffusion-nft"]


# --------------------------------------------------------------------------------------------------------- results


@pytest.fixture
def collected(tmp_path):
    """Results of made-up curves: three seeds of Flow-GRPO, one of them cut short, and one of CPS."""
    curves = {
        ("flow-grpo", 0): (_points(0.4, 0.8, 0.95), None),
        ("flow-grpo", 1): (_points(0.5, 0.6, 0.85), None),
        ("flow-grpo", 2): (_points(0.3), "RuntimeError: nan"),
        ("cps", 0): (_points(0.4, 0.5, 0.6, forwards=50, seconds=30.0), None),
    }
    budget = {"forwards": 100, "seconds": 25, "every": 5}
    for (name, seed), (points, failure) in curves.items():
        file = tmp_path / name / f"seed-{seed}.json"
        file.parent.mkdir(exist_ok=True)
        common = {"variant": name, "seed": seed, "setting": {"objective.kl": 0.04}, "budget": budget, "machine": "m"}
        file.write_text(json.dumps({**common, "points": points, "failure": failure}))
    return bench.collect(tmp_path)


def test_tables_by_hand(collected):
    flow, cps = results.rows(collected, "forwards")
    assert flow["score"] == pytest.approx((0.8 + 0.6 + 0.3) / 3) and flow["colors"] == flow["single"] == flow["score"]
    assert (flow["seeds"], flow["failed"], flow["setting"]) == ("0.300 - 0.800", "1 of 3", "kl 0.04")
    assert (flow["to 0.8"], flow["to 0.9"]) == ("150 (2 of 3)", "200 (1 of 3)")
    assert flow["KL"] == pytest.approx(2 / 3) and flow["zero spread"] == pytest.approx(0.1)  # the cut one has none
    assert cps["score"] == 0.6 and cps["to 0.8"] is None
    flow, cps = results.rows(collected, "seconds")
    assert flow["score"] == pytest.approx((0.95 + 0.85 + 0.3) / 3) and flow["to 0.8"] == "15 (2 of 3)"
    assert cps["score"] == 0.4  # its second evaluation came at 30 seconds


def test_runs_of_different_budgets_are_not_collected(collected, tmp_path):
    file = tmp_path / "cps/seed-0.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "budget": asdict(Budget())}))
    with pytest.raises(ValueError, match="different budgets"):
        bench.collect(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no runs"):
        bench.collect(tmp_path / "cps")


def test_the_page_takes_the_results_between_its_markers(collected, tmp_path):
    page = tmp_path / "page.md"
    start, end = results.MARKERS
    page.write_text(f"# Before\n\n{start}\nold\n{end}\n\nafter\n")
    results.write_comparison(page, collected)
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{start}") and text.endswith(f"{end}\n\nafter\n") and "old" not in text
    assert "| flow-grpo | 0.567 | 0.300 - 0.800 |" in text and "RuntimeError: nan" in text
    assert "### 100 transformer forwards" in text and "nothing was tuned" in text
    assert (tmp_path / "comparison-forwards.png").is_file() and (tmp_path / "comparison-seconds.png").is_file()
    results.write_comparison(page, collected)
    assert page.read_text() == text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the lines"):
        results.write_comparison(page, collected)


def test_the_comparison_page_is_up_to_date():
    page = results.RESULTS.parents[2] / "docs/comparison.md"
    start, end = results.MARKERS
    text = page.read_text()
    assert text[text.index(start) : text.index(end)] == f"{start}\n\n{results.comparison(results.load())}\n\n"


def test_a_job_refuses_a_record_of_another(tmp_path):
    job = Job(tmp_path / "r.json", VARIANTS["cps"], 0, {}, Budget())
    (tmp_path / "r.json").write_text(json.dumps({**job.identity, "points": [], "failure": None}))
    assert Job(tmp_path / "r.json", VARIANTS["cps"], 0, {}, Budget()).record()["points"] == []
    for changed in ({"seed": 1}, {"setting": {"objective.kl": 0.04}}, {"overrides": ["training.group_size=24"]}):
        arguments = {"seed": 0, "setting": {}, "overrides": ()} | changed
        with pytest.raises(ValueError, match="another budget or other settings"):
            Job(tmp_path / "r.json", VARIANTS["cps"], budget=Budget(), **arguments)

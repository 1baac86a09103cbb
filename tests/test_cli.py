"""The commands on a tiny pipeline with random weights, through `main`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from flowrl.cli import _table, main

SMALL = [
    "model.max_sequence_length=0",
    "sampler.steps=3",
    "training.iterations=2",
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.updates_per_iteration=1",
    "training.eval_images_per_prompt=1",
    "training.monitor_samples=2",
    "training.ema_every=1",
    "training.learning_rate=3e-3",  # two steps must show
    "rewards={jpeg_compressibility: 1}",  # differs between samples of random weights
    "eval_rewards={jpeg_compressibility: 1}",
]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A pipeline of the miniature's shape with random weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    from flowrl.miniature.pretrain import text_encoder
    from flowrl.miniature.shapes import pretrain

    torch.manual_seed(0)
    vocabulary = pretrain.tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=pretrain.transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5),
        vae=pretrain.autoencoder(),
        text_encoder=text_encoder(vocabulary),
        tokenizer=vocabulary,
        text_encoder_2=text_encoder(vocabulary),
        tokenizer_2=vocabulary,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small(model, tmp_path_factory):
    """Overrides of a quick run, with six prompts."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    from flowrl.miniature.shapes.world import held_out_prompts

    prompts.write_text("".join(json.dumps(p) + "\n" for p in held_out_prompts()[::10]))
    return [f"model.path={model}", *SMALL, f"prompts={prompts}", f"eval_prompts={prompts}"]


@pytest.fixture(scope="session")
def run(small, tmp_path_factory):
    """(folder, what `--json` printed) of a finished Flow-GRPO run with all weights."""
    return _trained(tmp_path_factory.mktemp("run"), small, ["shapes-flow-grpo"])


@pytest.fixture(scope="session")
def adapter_run(small, tmp_path_factory):
    """The same for DiffusionNFT with an adapter."""
    return _trained(tmp_path_factory.mktemp("adapter"), small, ["shapes-nft", "lora.rank=4", "lora.alpha=8"])


def _trained(folder, small, command):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["train", *command, "--json", *small, f"training.output_dir={folder}"])
    assert code == 0
    return folder, json.loads(out.getvalue())


def fails(capsys, *argv, code=2):
    """The one line an unusable command prints."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert "Traceback" not in captured.err and captured.out == ""
    return lines[-1]


# ------------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize(
    "code",
    ["import flowrl", "from flowrl.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"]
    + ["from flowrl.cli import main\nmain(['recipes', '--json'])"],
)
def test_nothing_heavy_is_imported(code):
    check = "\nimport sys\nassert not {'torch', 'diffusers', 'transformers', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "flowrl", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for command in ("train", "check", "eval", "sample", "recipes", "report"):
        assert command in done.stdout


def test_a_function_in_the_working_directory_is_found(tmp_path, monkeypatch, capsys):
    from flowrl.rewards import resolve

    (tmp_path / "rewards_of_mine.py").write_text("def half(images, prompts):\n    return [0.5] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="cannot load reward"):
        resolve("rewards_of_mine:half")
    assert main(["recipes"]) == 0
    assert resolve("rewards_of_mine:half")(None, ["p"]) == [0.5]


def test_recipes(capsys):
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("name ") and "shapes-nft" in text
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name", "description"} == set(listed[0])
    assert main(["recipes", "shapes-nft"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["objective"]["name"] == "DiffusionNFT"
    assert main(["recipes", "shapes-nft", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampler"]["name"] == "ODE"
    assert "did you mean 'shapes-nft'?" in fails(capsys, "recipes", "shapes-nff")


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "shapes-nf"], "flowrl train: no recipe 'shapes-nf'; did you mean 'shapes-nft'?"),
        (["check", "shapes-nft", "traning.seed=1"], "unknown key 'traning'; did you mean 'training'?"),
        (["train", "shapes-nft", "training.seed=x"], "training.seed must be int, got 'x'"),
        (["train", "shapes-flow-grpo", "sampler=ODE"], "FlowGRPO scores stochastic steps, and ODE"),
        (["train", "shapes-nft", "model.path=no/such/dir"], "no model folder no/such/dir"),
        (["train", "shapes-nft", "prompts=shapes/tran"], "no prompt file shapes/tran"),
        (["train", "shapes-nft", "rewards={shaps: 1}"], "unknown reward 'shaps'; did you mean 'shapes'"),
        (["eval", "shapes-nft", "--checkpoint", "nowhere"], "no checkpoint folder nowhere"),
        (["sample", "shapes-nf", "--prompt", "x"], "no recipe 'shapes-nf'; did you mean 'shapes-nft'?"),
        (["report", "nowhere"], "nowhere holds no run"),
    ],
)
def test_bad_input_is_one_clear_line(argv, message, capsys):
    line = fails(capsys, *argv)
    assert message in line and "--traceback" in line


def test_a_missing_recipe_is_all_that_is_missing(capsys):
    with pytest.raises(SystemExit):
        main(["train"])
    assert "required: RECIPE\n" in capsys.readouterr().err


def test_small_numbers_are_not_shown_as_zero():
    rows = [{"name": "a", "score": 0.00012, "change": -0.5}, {"name": "b", "score": 0.0, "change": 0.00034}]
    assert _table(rows).split()[-6:] == ["a", "1.2e-04", "-0.500", "b", "0.000", "+3.4e-04"]


def test_arguments_that_fit_no_command(capsys):
    for argv in (["train", "shapes-nft", "--jsn"], ["recipes", "a", "b=c"], ["eval", "x", "--images-per-prompt", "0"]):
        with pytest.raises(SystemExit) as error:
            main(argv)
        assert error.value.code == 2
    assert "must be an integer of at least 1, not '0'" in capsys.readouterr().err


def test_a_wrong_model_or_batch(small, tmp_path, capsys):
    where = f"training.output_dir={tmp_path / 'run'}"
    line = fails(capsys, "train", "shapes-nft", *small, where, f"model.path={tmp_path}")
    assert "is not a diffusers pipeline: it has no model_index.json" in line
    line = fails(capsys, "train", "shapes-nft", *small, where, "training.updates_per_iteration=3")
    assert "do not divide into 3 updates" in line
    line = fails(capsys, "train", "shapes-nft", *small, where, "training.prompts_per_iteration=100")
    assert "there are only 6 prompts" in line
    assert not (tmp_path / "run").exists()


def broken_reward(images, prompts):
    return [float("nan")] * len(prompts)


def test_a_run_that_fails_exits_with_one(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    command = ["train", "shapes-nft", *small, f"training.output_dir={tmp_path}", "rewards={test_cli:broken_reward: 1}"]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert "flowrl train: reward 'test_cli:broken_reward'" in captured.err
    assert "The samples are in" in captured.err and "Traceback" not in captured.err
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["objective"]["name"] == "DiffusionNFT"
    assert main([*command, "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_that_is_not_ours_keeps_its_traceback(small, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.training.trainer.Trainer.check", lambda self: json.loads("{"))
    assert main(["check", "shapes-nft", *small]) == 1
    assert "Traceback" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- running


def test_train_leaves_everything_behind(run):
    folder, printed = run
    for name in ("metrics.jsonl", "summary.json", "recipe.yaml", "report.html", "final/model_index.json"):
        assert (folder / name).is_file(), name
    assert printed["finished"] and printed["report"] == str(folder / "report.html")
    assert printed["weights"] == str(folder / "final")
    tasks = {row["task"]: row for row in printed["tasks"]}
    assert list(tasks)[-1] == "overall" and tasks["overall"]["images"] == 6
    assert set(tasks["overall"]) == {"task", "prompts", "images", "before", "after", "change"}
    summary = json.loads(Path(printed["summary"]).read_text())
    assert tasks["overall"]["after"] == summary["after"]["overall"]
    report = (folder / "report.html").read_text()
    assert "finished, 2 iterations" in report and report.count("<figure><div><img") == 6


def test_the_recipe_it_wrote_runs_again(run, tmp_path, capsys):
    folder, printed = run
    again = tmp_path / "again"
    assert main(["train", str(folder / "recipe.yaml"), f"training.output_dir={again}"]) == 0
    text = capsys.readouterr().out
    ours, theirs = (yaml.safe_load((f / "recipe.yaml").read_text()) for f in (folder, again))
    assert theirs["training"].pop("output_dir") == str(again) and ours["training"].pop("output_dir")
    assert ours == theirs
    assert json.loads((again / "summary.json").read_text())["after"]["overall"] == printed["tasks"][-1]["after"]

    # What it prints last loads the result in stock diffusers.
    table, _, code = text.partition("\nfrom diffusers import")
    assert "\noverall " in table and f"report   {again / 'report.html'}" in table
    scope: dict = {}
    exec("from diffusers import" + code, scope)
    assert len(code.strip().splitlines()) == 3
    assert scope["image"].size == (32, 32)


def test_an_interrupted_run_is_resumed(run, small, tmp_path, capsys, monkeypatch):
    _, printed = run
    where = f"training.output_dir={tmp_path}"
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.training.trainer.Trainer._agree_to_stop", lambda self: True)
        assert main(["train", "shapes-flow-grpo", *small, where]) == 130
    assert "stopped after iteration 1; continue with" in capsys.readouterr().out
    assert "unfinished, 1 of 2 iterations" in (tmp_path / "report.html").read_text()
    recipe = (tmp_path / "recipe.yaml").read_text()
    line = fails(capsys, "train", "shapes-flow-grpo", *small, where)
    assert "holds a run (checkpoint iteration-000001). Continue it with resume='auto' (CLI: --resume auto)" in line
    line = fails(capsys, "train", "shapes-flow-grpo", *small, where, "resume=auto", "training.learning_rate=1")
    assert "belongs to another run" in line
    line = fails(capsys, "train", "shapes-flow-grpo", *small, where, "--resume", str(tmp_path / "checkpoints"))
    assert "is not a checkpoint" in line
    assert (tmp_path / "recipe.yaml").read_text() == recipe  # a refused command touches nothing

    assert main(["train", "shapes-flow-grpo", *small, where, "resume=auto", "--json"]) == 0
    captured = capsys.readouterr()
    assert "resumed from" in captured.err
    assert json.loads(captured.out)["tasks"] == printed["tasks"]  # as without the interruption


def test_eval_takes_every_kind_of_checkpoint(run, adapter_run, small, capsys):
    for name, (folder, printed), more in (
        ("shapes-flow-grpo", run, []),
        ("shapes-nft", adapter_run, ["lora.rank=4", "lora.alpha=8"]),
    ):
        overall = printed["tasks"][-1]
        for checkpoint, expected in (
            (None, overall["before"]),
            (folder / "final", overall["after"]),
            (folder / "checkpoints" / "iteration-000002", overall["after"]),
        ):
            options = [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
            assert main(["eval", name, *options, "--json", *small, *more]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["overall"] == pytest.approx(expected, abs=1e-7), (name, checkpoint)
            assert [t["task"] for t in found["tasks"]] == [t["task"] for t in printed["tasks"]]
        assert overall["before"] != overall["after"]
    line = fails(capsys, "eval", "shapes-nft", *small, "--checkpoint", str(folder))
    assert f"is a whole run: pass {folder / 'final'}" in line
    assert "add eval_prompts=NAME" in fails(capsys, "eval", "shapes-nft", *small, "eval_prompts=null")


def test_eval_prints_a_table(small, capsys):
    assert main(["eval", "shapes-nft", *small, "--images-per-prompt", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "prompts", "images", "score"]
    assert lines[-1].split()[:3] == ["overall", "6", "12"]


def test_check(small, capsys):
    assert main(["check", "shapes-flow-grpo", *small]) == 0
    assert "check passed" in capsys.readouterr().out
    assert main(["check", "shapes-flow-grpo", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_abs_log_ratio"] == 0.0


def test_sample(model, run, adapter_run, tmp_path, capsys):
    out = tmp_path / "pictures" / "grid.png"

    def sample(*argv, prompts=("a photo of a circle",)):
        options = [x for text in prompts for x in ("--prompt", text)]
        assert main(["sample", *argv, *options, "--count", "2", "--output", str(out)]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        return np.asarray(Image.open(out)).astype(int)

    stock = sample(str(model))  # with the stock pipeline's steps and guidance
    assert stock.shape == (100, 2 * 100, 3)
    for folder, _ in (run, adapter_run):
        recipe = str(folder / "recipe.yaml")
        saved = sample(recipe, "--checkpoint", str(folder / "final"))
        trained = sample(recipe, "--checkpoint", str(folder / "checkpoints" / "iteration-000002"))
        assert abs(saved - trained).max() <= 1
    base = sample(recipe, prompts=("a photo of a circle", "a photo of a cross"))
    assert base.shape == (2 * 100, 2 * 100, 3)
    assert (base[:100] != saved).any()
    assert (sample(recipe, "--seed", "1") != base[:100]).any()
    checkpoint = str(folder / "checkpoints" / "iteration-000002")
    line = fails(capsys, "sample", str(model), "--prompt", "x", "--checkpoint", checkpoint)
    assert "is a training checkpoint: give the recipe" in line


def test_report_can_be_written_again(run, capsys):
    folder, _ = run
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").is_file()

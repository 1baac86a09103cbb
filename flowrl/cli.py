"""The command line: a thin layer over `Trainer`, recipes and the report. Its help loads neither torch nor diffusers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.training.recipe import Recipe
    from flowrl.training.trainer import Trainer


_TWO_WORDS = (("eval", "geneval"), ("eval", "parity"))  # commands beside `flowrl eval RECIPE`


class UsageError(Exception):
    """Nothing was run: the command, the recipe or a file that it names is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 done; 1 the run failed; 2 nothing was run: the command, the recipe or a file it names is wrong; 130 interrupted.
    """
    if (here := os.getcwd()) not in sys.path:  # the installed script has its own folder there instead
        sys.path.insert(0, here)  # for `module:function`
    parser = _parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    if tuple(argv[:2]) in _TWO_WORDS:
        argv[:2] = [" ".join(argv[:2])]
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one piece: key=value after an option is left over.
    if rest and (not hasattr(args, "overrides") or any(r.startswith("-") or "=" not in r for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        usage = isinstance(error, UsageError)
        if args.traceback or not (usage or _is_ours(error)):
            traceback.print_exc()
        else:
            message = " ".join(str(error).split())
            print(f"flowrl {args.command}: {message}  (--traceback shows where)", file=sys.stderr)
        return 2 if usage else 1


def _parser() -> argparse.ArgumentParser:
    from flowrl import __version__

    parser = argparse.ArgumentParser(prog="flowrl", description="Align image generators with rewards.")
    parser.add_argument("--version", action="version", version=f"flowrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Any, help: str, recipe: bool = True, as_json: bool = True) -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_").replace("_", " " if run.__name__.startswith("_eval_") else "-")
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        if recipe:
            sub.add_argument("recipe", metavar="RECIPE", help="a recipe's name (see `flowrl recipes`) or YAML file")
            sub.add_argument(
                "overrides", metavar="key=value", nargs="*", default=[], help="such as training.iterations=10"
            )
        if as_json:
            sub.add_argument("--json", action="store_true", help="print JSON instead of tables")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
        return sub

    sub = command(_train, "train, then print scores before and after")
    sub.add_argument(
        "--resume", metavar="auto|PATH", help="go on from the newest checkpoint of output_dir, or from this one"
    )
    command(_check, "try a recipe without training: sample, score, replay")
    sub = command(_eval, "score a recipe's held-out prompts")
    sub.add_argument(
        "--checkpoint", metavar="PATH", type=Path, help="a folder of checkpoints/, best/ or final/; default: the model"
    )
    sub.add_argument("--images-per-prompt", metavar="N", type=_positive, help="default: the recipe's")
    sub = command(_eval_geneval, "score images on GenEval, from a folder or made first", recipe=False)
    images = sub.add_mutually_exclusive_group(required=True)
    images.add_argument(
        "--images",
        metavar="DIR",
        type=Path,
        help="00000/metadata.jsonl and 00000/samples/*.png; golden: twelve bundled drawings",
    )
    images.add_argument("--model", metavar="MODEL|RECIPE", help="make the images with it, in --output")
    sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings of the RECIPE")
    sub.add_argument(
        "--detector", metavar="NAME", default="mask2former", help="default mask2former; see docs/geneval.md"
    )
    sub.add_argument("--colors", metavar="NAME", help="default clip; hsv for yolov3-tiny, shapes for shapes")
    sub.add_argument("--variant", choices=["official", "exact", "partial", "partial_flowgrpo"], default="official")
    sub.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/geneval"), help="default runs/geneval")
    sub.add_argument("--device", metavar="NAME", help="such as cuda:1 or cpu; default: the accelerator")
    sub.add_argument("--batch-size", metavar="N", type=_positive, default=4, help="default 4")
    sub.add_argument("--skip-golden", action="store_true", help="score even if known images are judged wrongly")
    making = sub.add_argument_group("with --model")
    making.add_argument("--checkpoint", metavar="PATH", type=Path, help="its weights, as for `flowrl eval`")
    making.add_argument("--prompts", metavar="NAME|FILE", help="default: the benchmark's 553")
    making.add_argument("--limit", metavar="N", type=_positive, help="the first N prompts of each task")
    making.add_argument("--images-per-prompt", metavar="N", type=_positive, help="default 4")
    making.add_argument("--steps", metavar="N", type=_positive, help="default: the recipe's or the pipeline's")
    making.add_argument("--guidance-scale", metavar="X", type=float, help="default: the recipe's or the pipeline's")
    making.add_argument("--seed", metavar="N", type=int, help="default 42")
    making.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="of a MODEL's weights")
    sub = command(_eval_parity, "compare this GenEval with the original, level by level", recipe=False)
    sub.add_argument("--original", metavar="CHECKOUT", type=Path, help="level 0: of GenEval or Flow-GRPO's server")
    sub.add_argument("--cases", metavar="N", type=_positive, default=10_000, help="of level 0; default 10000")
    sub.add_argument("--dump", metavar="DIR", type=Path, help="levels 1 to 3: what benchmarks/geneval_dump.py wrote")
    sub.add_argument("--images", metavar="DIR", type=Path, help="level 2: the folder that was dumped")
    sub.add_argument("--detector", metavar="NAME", help="level 2: mask2former@FOLDER")
    sub.add_argument("--colors", metavar="NAME", help="level 3: such as clip")
    sub.add_argument("--results", metavar="FILE", type=Path, nargs=2, help="level 4: images.jsonl and results.jsonl")
    sub.add_argument("--level", metavar="N", type=int, choices=range(5), action="append", help="only these levels")
    sub.add_argument("--device", metavar="NAME", default="cpu", help="default cpu")
    sub.add_argument("--output", metavar="FILE", type=Path, default=Path("parity.json"), help="default parity.json")
    sub = command(_sample, "write a picture of a recipe's or a model's samples", as_json=False, recipe=False)
    sub.add_argument("recipe", metavar="RECIPE|MODEL", help="a recipe, a pipeline folder or a hub id")
    sub.add_argument("--prompt", metavar="TEXT", action="append", required=True, help="may be given several times")
    sub.add_argument("--checkpoint", metavar="PATH", type=Path, help="as for `flowrl eval`")
    sub.add_argument("--output", metavar="FILE.png", type=Path, default=Path("samples.png"))
    sub.add_argument("--seed", metavar="N", type=int, default=0)
    sub.add_argument("--count", metavar="N", type=_positive, default=4, help="samples per prompt (default 4)")
    sub = command(_recipes, "list the shipped recipes, or print one", recipe=False)
    sub.add_argument("recipe", metavar="NAME", nargs="?")
    sub = command(_report, "write a run's report.html again", recipe=False, as_json=False)
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    sub = command(_algorithms, "list the algorithms, or print one's card", recipe=False)
    sub.add_argument("name", metavar="NAME", nargs="?")
    sub.add_argument("--write-docs", metavar="DIR", type=Path, help="write all cards as pages of the documentation")
    sub = command(_bench, "compare the algorithms and samplers under one budget", recipe=False)
    sub.add_argument("world", choices=["miniature"])
    sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="recipe settings of every run")
    sub.add_argument("--only", metavar="A,B", type=_names, help="some of the methods; default: all")
    sub.add_argument("--seeds", metavar="N,M", type=_seeds, default=[0, 1, 2], help="default 0,1,2")
    sub.add_argument("--forwards", metavar="N", type=_positive, help="budget of transformer forwards; default 200000")
    sub.add_argument("--seconds", metavar="S", type=_positive, help="budget of training seconds; default 300")
    sub.add_argument("--output", metavar="DIR", type=Path, default=Path("runs/bench"), help="default runs/bench")
    mode = sub.add_mutually_exclusive_group()
    mode.add_argument("--tune", action="store_true", help="search each method's settings first; runs then use them")
    mode.add_argument("--docs", metavar="PAGE", type=Path, help="run nothing: write the repository's results into PAGE")
    sub = command(_score, "score a folder of images with any rewards", recipe=False)
    sub.add_argument("folder", metavar="FOLDER", type=Path, help="images, and metadata.jsonl or GenEval's layout")
    sub.add_argument("--rewards", metavar="A,B", type=_rewards, required=True, help="as in a recipe's `rewards`")
    made_for = sub.add_mutually_exclusive_group()
    made_for.add_argument("--prompts", metavar="FILE.jsonl", type=Path, help="a line per image: file_name, prompt, ...")
    made_for.add_argument("--prompt", metavar="TEXT", help="one for all images")
    sub.add_argument("--output", metavar="FILE", type=Path, help="write a .jsonl or .csv with a row per image")
    sub.add_argument("--batch-size", metavar="N", type=_positive, default=16, help="default 16")
    sub = command(_serve_reward, "answer a reward's scores over HTTP, for RemoteReward", recipe=False, as_json=False)
    sub.add_argument("reward", metavar="NAME|module:function", help="as in a recipe's `rewards`")
    sub.add_argument("--host", metavar="HOST", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 is everywhere")
    sub.add_argument("--port", metavar="N", type=int, default=8000, help="default 8000; 0 takes a free one")
    sub.add_argument("--device", metavar="NAME", help="of the images, such as cuda:1 or cpu; default: the accelerator")
    sub.add_argument("--max-images", metavar="N", type=_positive, help="in a request; default 64")
    sub.add_argument("--max-pixels", metavar="N", type=_positive, help="of an image; default 2097152")
    sub.add_argument("--max-bytes", metavar="N", type=_positive, help="of a request; default 67108864")
    sub.add_argument("--queue", metavar="N", type=_positive, help="requests that may wait; default 16")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rewards(text: str) -> list[str]:
    return [name.strip() for name in re.split(r",(?!\s*https?://)", text) if name.strip()]  # replicas stay together


def _seeds(text: str) -> list[int]:
    names = _names(text)
    if not names or not all(name.isdecimal() for name in names):
        raise argparse.ArgumentTypeError(f"must be seeds such as 0,1,2, not {text!r}")
    return [int(name) for name in names]


# --------------------------------------------------------------------------------------------------- commands


def _train(args: argparse.Namespace) -> int:
    from flowrl.evaluation.report import task_rows, write_report

    resume = args.resume
    for text in [o for o in args.overrides if o.startswith("resume=")]:
        args.overrides.remove(text)
        resume = text.partition("=")[2]
    recipe, trainer = _trainer(args)
    main_process = trainer.accelerator.is_main_process
    with _stdout_for_json(args):
        with _usage():
            trainer.resume(resume or False)
        summary = trainer.train()
    if main_process:
        rows = task_rows(summary["before"], summary["after"])
        report, final = write_report(trainer.output_dir), trainer.output_dir / "final"
        if args.json:
            files = {"summary": trainer.output_dir / "summary.json", "report": report}
            files |= {"weights": final} if summary["finished"] else {}
            named = {k: str(v) for k, v in files.items()}
            _print_json({"finished": summary["finished"], "tasks": rows, **named})
        else:
            if rows:
                print(f"\n{_table(rows)}\n")
            print(f"report   {report}")
            if summary["finished"]:
                print(f"weights  {final}\n\n{_how_to_load(trainer, recipe, final)}")
    return 0 if summary["finished"] else 130


def _check(args: argparse.Namespace) -> int:
    _, trainer = _trainer(args)
    with _stdout_for_json(args):
        found = trainer.check()
    if args.json and trainer.accelerator.is_main_process:
        _print_json(found)
    return 0


def _eval(args: argparse.Namespace) -> int:
    if ("eval", args.recipe) in _TWO_WORDS:
        raise UsageError(f"options come after the name: flowrl eval {args.recipe} ...")
    _, trainer = _trainer(args, args.checkpoint)
    with _usage():
        if trainer.eval_prompts is None:
            raise ValueError("the recipe has no eval_prompts: add eval_prompts=NAME")
    with _stdout_for_json(args):
        result = trainer.evaluate(images_per_prompt=args.images_per_prompt)
    if trainer.accelerator.is_main_process:
        tasks = {t: v for t, v in result.per_task.items() if t != "all"}
        rows = [{"task": t, **{k: v[k] for k in ("prompts", "images", "score")}} for t, v in tasks.items()]
        prompts = sum(int(v["prompts"]) for v in result.per_task.values())
        rows.append({"task": "overall", "prompts": prompts, "images": result.images, "score": result.overall})
        if args.json:
            _print_json({"tasks": rows, **result.summary()})
        else:
            print(_table(rows))
    return 0


def _eval_geneval(args: argparse.Namespace) -> int:
    from flowrl.evaluation import generation, geneval

    with _usage():
        state = geneval.processes()
    device = args.device or str(state.device)
    golden_set = str(args.images) == "golden" and not args.images.is_dir()
    folder = geneval.GOLDEN if golden_set else args.images or args.output / "images"
    source = args.prompts or geneval.DEFAULT_PROMPTS.get(args.detector, "geneval")

    def work(classes: Sequence[str]) -> list[Any]:
        if args.images:
            return geneval.read_folder(folder, classes)
        return generation.read_prompts(source, classes, args.limit)

    with _stdout_for_json(args):
        with _usage():
            _check_making(args)
            # What is cheap to refuse is refused before weights are read; a detector of the user's brings its classes.
            known = geneval.classes_of(args.detector)
            samples = work(known) if known else []
            judge = geneval.Judge(args.detector, args.colors, args.variant)
            samples = samples or work(judge.detector.classes)
            golden = "skipped by --skip-golden" if args.skip_golden else geneval.golden_check(judge, device)
            if args.model:
                draw, settings = _image_source(args, device)
                generation.begin(folder, samples, settings)
        if args.model:
            generation.generate(draw, samples, folder, settings["images_per_prompt"], args.batch_size)
            samples = geneval.read_folder(folder, judge.detector.classes)
        records = geneval.evaluate(folder, samples, judge, args.output, batch_size=args.batch_size, device=device)
    if not state.is_main_process:
        return 0
    result = geneval.summary(records, judge, golden)
    geneval.write_summary(args.output, folder, result, records)
    if args.json:
        _print_json(result)
        return 0
    print(f"\n{_table(geneval.task_rows(result))}\n")
    print(f"images correct   {result['images_correct']:.1%}\nprompts correct  {result['prompts_correct']:.1%}")
    if rows := geneval.mistakes(result["confusions"]):
        print(f"\n{_table(rows)}")
    print("", f"golden set: {golden}", *result["notes"], sep="\n")
    print("", *(args.output / name for name in ("images.jsonl", "summary.json", "failures.html")), sep="\n")
    return 0


def _eval_parity(args: argparse.Namespace) -> int:
    from flowrl.evaluation import parity
    from flowrl.rewards.geneval_parts import load_colors, load_detector

    levels = {  # what it needs, and what it runs
        0: (("original",), lambda: parity.logic(args.original, args.cases)),
        1: (("dump",), lambda: parity.post_processing(args.dump)),
        2: (
            ("dump", "images", "detector"),
            lambda: parity.weights(args.dump, args.images, load_detector(args.detector), args.device),
        ),
        3: (("dump", "colors"), lambda: parity.colors(args.dump, load_colors(args.colors), args.device)),
        4: (("results",), lambda: parity.end_to_end(*args.results)),
    }
    missing = {n: [f"--{name}" for name in needs if not getattr(args, name)] for n, (needs, _) in levels.items()}
    chosen = sorted(set(args.level)) if args.level else [n for n in levels if not missing[n]]
    with _usage():
        for n in chosen:
            if missing[n]:
                raise ValueError(f"level {n} needs {' and '.join(missing[n])}")
        if not chosen:
            raise ValueError("nothing to compare: give --original, --dump or --results")
        results, kept = {}, parity.earlier(args.output)
        for n in chosen:
            results[n] = kept[str(n)] = levels[n][1]()
            parity.keep(args.output, kept)
    if args.json:
        _print_json(results)
    else:
        for n, result in results.items():
            facts = {k: v for k, v in result.items() if not isinstance(v, list)}
            print(f"level {n}: {'passed' if facts.pop('passed') else 'FAILED'}  {facts}")
        if 4 in results:
            print(f"\n{_table([{k: v for k, v in row.items() if k != 'interval'} for row in results[4]['tasks']])}")
        for n, names in missing.items():
            if names and n not in chosen:
                print(f"level {n}: not run, it needs {' and '.join(names)}")
        print(f"\n{args.output}")
    return 0 if all(result["passed"] for result in results.values()) else 1


def _sample(args: argparse.Namespace) -> int:
    import torch
    from PIL import Image

    from flowrl import recipes
    from flowrl.rollout import Prompt
    from flowrl.training.recipe import ModelConfig, is_model, load_policy, stock_sampler
    from flowrl.training.tracking import image_grid
    from flowrl.training.trainer import EVALUATION

    with _usage():
        device = _alone()
        if not recipes.is_recipe(args.recipe) and is_model(args.recipe):
            _refuse_training_checkpoint(args.checkpoint)
            policy, weights = load_policy(ModelConfig.of(args.recipe), None, args.checkpoint), "policy"
            sampler = stock_sampler(policy.pipe)
        else:
            policy, sampler, weights = _recipe_policy(args.recipe, [], args.checkpoint)
    policy.pipe.to(device)
    prompts = [Prompt(i, text) for i, text in enumerate(args.prompt) for _ in range(args.count)]
    members = list(range(args.count)) * len(args.prompt)
    with policy.use(weights):
        rollout = policy.sample(prompts, members, sampler, seed=args.seed, iteration=EVALUATION, batch_size=args.count)
    images = [policy.decode(x) for x in rollout.latents.split(args.count)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image_grid(torch.cat(images), columns=args.count)).save(args.output)
    print(args.output)
    return 0


def _recipes(args: argparse.Namespace) -> int:
    from flowrl import recipes

    with _usage():
        if args.recipe:
            path = recipes.find(args.recipe)
            tree = recipes.read(path)
            if args.json:
                _print_json(tree)
            else:
                print(path.read_text(encoding="utf-8"), end="")
            return 0
        listed = [{"name": n, "description": recipes.read(p)["description"]} for n, p in recipes.shipped().items()]
    if args.json:
        _print_json(listed)
    else:
        print(_table(listed))
    return 0


def _report(args: argparse.Namespace) -> int:
    from flowrl.evaluation.report import write_report

    with _usage():
        print(write_report(args.run_dir))
    return 0


def _algorithms(args: argparse.Namespace) -> int:
    from flowrl.miniature import bench, results
    from flowrl.objectives import cards

    if args.write_docs is not None:
        for file in results.write_pages(args.write_docs, bench.cost, results.load()):
            print(file)
        return 0
    if args.name is None:
        listed = results.overview()
        if args.json:
            _print_json(listed)
        else:
            print(_table(listed))
        return 0
    with _usage():
        card = cards.find(args.name)
    facts = results.card_facts(card, bench.cost(card.name), results.load())
    if args.json:
        _print_json(facts)
    else:
        print(results.card_page(facts), end="")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from flowrl.miniature import bench, results

    if args.docs is not None:
        with _usage():
            results.write_comparison(args.docs, results.load())
        print(args.docs)
        return 0
    given = {"forwards": args.forwards, "seconds": args.seconds}
    budget = bench.Budget(**{k: v for k, v in given.items() if v is not None})
    with _usage():
        if args.tune:
            jobs = bench.search(args.output, args.only, budget, args.overrides)
        else:
            jobs = bench.comparison(args.output, args.only, args.seeds, budget, args.overrides)
    records = bench.work(jobs)
    if args.tune:
        tuning = bench.choose(args.output, jobs, records)
        found = results.search_rows(tuning)
        if args.json:
            _print_json(tuning)
        else:
            print(f"{_table(found)}\n\n{args.output / 'tuning.json'}")
        return 0
    collected = bench.collect(args.output)
    plots = results.plot(collected, args.output)
    tables = {axis: results.rows(collected, axis) for axis in ("forwards", "seconds")}
    if args.json:
        _print_json({**tables, "results": str(args.output / "results.json"), "plots": [str(file) for file in plots]})
    else:
        for axis, table in tables.items():
            print(f"\nequal {axis}: {collected['budget'][axis]:,}\n\n{_table(table)}")
        print("", args.output / "results.json", *plots, sep="\n")
    return 0


def _score(args: argparse.Namespace) -> int:
    from flowrl.evaluation import score

    with _usage():
        _alone()
        score.check_output(args.output)
        images = score.read_folder(args.folder, args.prompts, args.prompt)
        rewards = score.rewards_for(args.rewards, images)
    rows = score.score_images(images, rewards, args.output, batch_size=args.batch_size)
    found = score.summary(rows, rewards)
    if args.json:
        _print_json({"images": len(rows), "rewards": found, "output": args.output and str(args.output)})
    else:
        print(_table(found))
    reasons = [row["reason"] for row in rows if row["reason"]]
    if reasons:
        print(f"{len(reasons)} of {len(rows)} images were not scored by all, such as: {reasons[0]}", file=sys.stderr)
    return 1 if any(row["images"] == 0 for row in found) else 0


def _serve_reward(args: argparse.Namespace) -> int:
    from flowrl.rewards.server import Limits, RewardServer

    given = {"body_bytes": args.max_bytes, "images": args.max_images, "pixels": args.max_pixels, "queue": args.queue}
    token = os.environ.get("FLOWRL_REWARD_TOKEN")  # not an option: a command line can be read by other users
    with _usage():
        limits = Limits(**{k: v for k, v in given.items() if v is not None})
        server = RewardServer(args.reward, args.host, args.port, token, limits, args.device)
    if not server.token and args.host not in ("127.0.0.1", "localhost"):
        print("anyone who reaches this port can use it: set FLOWRL_REWARD_TOKEN here and for training", file=sys.stderr)
    server.rewards.self_test(server.device)  # what is missing should be known before anybody asks
    server.serve()
    return 0


# ----------------------------------------------------------------------------------------------------- pieces


def _trainer(args: argparse.Namespace, checkpoint: Path | None = None) -> tuple[Recipe, Trainer]:
    """The recipe with its overrides, and its trainer with a checkpoint's weights."""
    from flowrl.training.recipe import build_trainer, load_recipe

    with _usage():
        recipe = load_recipe(args.recipe, args.overrides)
        training = checkpoint is not None and _is_training_checkpoint(checkpoint)
        trainer = build_trainer(recipe, None if training else checkpoint)
        if training:
            trainer.load_checkpoint(checkpoint)
    return recipe, trainer


def _alone() -> Any:
    """The accelerator, for a command that several processes would all carry out and write."""
    from flowrl.evaluation.geneval import processes

    state = processes()
    if state.num_processes > 1:
        raise ValueError("this command works in one process: start it without torchrun or accelerate launch")
    return state.device


def _recipe_policy(name: str, overrides: Sequence[str], checkpoint: Path | None) -> tuple[Any, Any, Any]:
    """A recipe's policy with a checkpoint's weights, its evaluation sampler, and the weights to evaluate."""
    from flowrl.training.recipe import build_trainer, evaluation_sampler, load_policy, load_recipe, resolved

    recipe, weights = load_recipe(name, overrides), "policy"
    if checkpoint is not None and _is_training_checkpoint(checkpoint):
        trainer = build_trainer(recipe)
        trainer.load_checkpoint(checkpoint)
        policy, weights = trainer.policy, "ema" if "ema" in trainer.copies else "policy"
    else:
        policy = load_policy(recipe.model, recipe.lora, checkpoint)
    return policy, resolved(evaluation_sampler(recipe), policy.pipe.scheduler.config), weights


def _refuse_training_checkpoint(checkpoint: Path | None) -> None:
    if checkpoint is not None and _is_training_checkpoint(checkpoint):
        raise ValueError(f"{checkpoint} is a training checkpoint: give the recipe it was made with")


def _check_making(args: argparse.Namespace) -> None:
    """Options of `flowrl eval geneval` that go with images made first."""
    names = ("checkpoint", "prompts", "limit", "images_per_prompt", "steps", "guidance_scale", "seed", "dtype")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None] + args.overrides
    if args.images and given:
        raise ValueError(f"{', '.join(given)}: only with --model, as images of a folder are there already")


def _image_source(args: argparse.Namespace, device: Any) -> tuple[Any, dict[str, Any]]:
    """What draws images for `flowrl eval geneval`, and the settings they depend on."""
    from flowrl import recipes
    from flowrl.evaluation import generation, geneval
    from flowrl.training.recipe import is_model

    seed = 42 if args.seed is None else args.seed
    if not recipes.is_recipe(args.model) and is_model(args.model):
        if args.overrides:
            raise ValueError(f"{args.overrides[0]} is a recipe's setting, and {args.model} is a model")
        _refuse_training_checkpoint(args.checkpoint)
        pipe, options = generation.load_model(args.model, args.checkpoint, args.dtype)
        draw = generation.from_pipeline(pipe.to(device), seed, args.steps, args.guidance_scale, **options)
    else:
        if args.dtype:
            raise ValueError(f"--dtype is for a MODEL: write model.dtype={args.dtype} after the recipe")
        policy, sampler, weights = _recipe_policy(args.model, args.overrides, args.checkpoint)
        changed = {"steps": args.steps, "guidance_scale": args.guidance_scale}
        sampler = sampler.with_(**{k: v for k, v in changed.items() if v is not None})
        policy.pipe.to(device)
        draw = generation.from_policy(policy, sampler, seed, weights)
    named = {k: getattr(args, k) for k in ("model", "overrides", "steps", "guidance_scale", "dtype")}
    checkpoint = args.checkpoint and str(args.checkpoint)
    files = [geneval.stamp(path) for path in (args.model, args.checkpoint) if path]
    count = args.images_per_prompt or 4
    return draw, {**named, "checkpoint": checkpoint, "files": files, "seed": seed, "images_per_prompt": count}


def _is_training_checkpoint(path: Path) -> bool:
    """Whether a folder holds a training checkpoint; otherwise it should hold what `save_pretrained` writes."""
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint folder {path}")
    if (path / "checkpoints").is_dir():
        raise FileNotFoundError(
            f"{path} is a whole run: pass {path / 'final'}, {path / 'best'} or a folder of {path / 'checkpoints'}"
        )
    return (path / "manifest.json").is_file()


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Errors of this block mean that the command or the recipe is wrong, wherever they are raised."""
    try:
        yield
    except (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError) as error:
        raise UsageError(str(error) or type(error).__name__) from error


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it, with a message written for the user; otherwise only a traceback helps."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(__file__).parent in Path(frame.tb_frame.f_code.co_filename).parents


@contextlib.contextmanager
def _stdout_for_json(args: argparse.Namespace) -> Iterator[None]:
    """With --json, what the trainer prints goes to stderr: stdout is for the JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        yield


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Aligned text; the first column and texts to the left, numbers to the right."""

    def shown(key: str, value: Any) -> str:
        if isinstance(value, float):
            digits = ".3f" if value == 0 or abs(value) >= 1e-3 else ".1e"
            return f"{value:{'+' if key == 'change' else ''}{digits}}"
        return "-" if value is None else str(value)

    keys = list(rows[0])
    cells = [keys] + [[shown(k, row[k]) for k in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    left = [any(isinstance(row[k], str) for row in rows) for k in keys]
    return "\n".join(
        "  ".join(
            c.ljust(w) if at_left else c.rjust(w) for c, w, at_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in [cells[0], ["-" * w for w in widths], *cells[1:]]
    )


def _how_to_load(trainer: Trainer, recipe: Recipe, folder: Path) -> str:
    """Lines of Python that load the result in diffusers."""
    pipe = trainer.policy.pipe
    name = type(pipe).__name__
    if recipe.lora is not None:
        base, then = recipe.model.location, f'pipe.load_lora_weights("{folder}")\n'
    else:
        base, then = str(folder), ""
    # Text encoders that the pipeline was saved without must be named.
    absent = [k for k, v in pipe.components.items() if v is None and k not in pipe._optional_components]
    options = "".join(f", {k}=None" for k in absent)
    prompt = trainer.prompts[0].text
    length = recipe.model.max_sequence_length
    size = f"height={trainer.policy.height}, width={trainer.policy.width}"
    return (
        f"from diffusers import {name}\n"
        f'pipe = {name}.from_pretrained("{base}"{options})\n{then}'
        f"image = pipe({prompt!r}, {size}, num_inference_steps={trainer.eval_sampler.steps}, "
        f"guidance_scale={trainer.eval_sampler.guidance_scale}, max_sequence_length={length}).images[0]"
    )

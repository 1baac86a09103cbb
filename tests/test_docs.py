"""The examples of the README and the docs run, and what they claim is there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
README = (ROOT / "README.md").read_text()
SWAPS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", README, re.M)


def _run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"
    script.write_text(code)
    return runpy.run_path(str(script))


def _readme_script():
    """The README's script on a smaller batch."""
    (script,) = BLOCK.findall(README)
    for old, new in (
        ("iterations=50", "iterations=1, eval_images_per_prompt=1"),
        ("prompts_per_iteration=12", "prompts_per_iteration=2"),
        ("group_size=12", "group_size=2"),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


def test_readme_script_is_short():
    lines = [line for line in BLOCK.findall(README)[0].splitlines() if line.strip()]
    assert len(lines) <= 15
    assert len(SWAPS) == 5


@pytest.mark.parametrize("swap", [None, *SWAPS], ids=lambda s: "as printed" if s is None else s[1][:24])
def test_readme_script_and_each_one_line_swap(swap, tmp_path, monkeypatch):
    script = _readme_script()
    if swap:
        old, new = swap
        assert sum(old in line for line in script.splitlines()) == 1, f"{old} is not one line of the script"
        script = "from peft import LoraConfig\n" + script.replace(old, new, 1)
    names = _run(script, tmp_path, monkeypatch)
    assert names["summary"]["finished"]
    folder = tmp_path / "runs/readme/model"
    adapter = (folder / "pytorch_lora_weights.safetensors").is_file()
    assert adapter == bool(swap and "LoraConfig" in swap[1])
    assert adapter or (folder / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("page", "number"),
    [(p.name, i) for p in sorted((ROOT / "docs").glob("*.md")) for i in range(len(BLOCK.findall(p.read_text())))],
)
def test_docs_examples_run(page, number, tmp_path, monkeypatch):
    _run(BLOCK.findall((ROOT / "docs" / page).read_text())[number], tmp_path, monkeypatch)


def test_readme_names_what_exists():
    import yaml

    from flowrl import cli

    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    recipes = {p.stem for p in (ROOT / "flowrl/recipes").glob("*.yaml")} | {"geneval", "parity"}  # flowrl eval geneval
    for command, recipe in re.findall(r"flowrl (train|check|eval|sample) ([\w-]+)", README):
        assert recipe in recipes, f"flowrl {command} {recipe}"
    entries = [next(iter(entry.values())) for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]]
    pages = [p for e in entries for p in (e if isinstance(e, list) else [{"": e}])]  # a section holds pages
    docs = ROOT / "docs"
    assert {next(iter(p.values())) for p in pages} == {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    assert cli.main(["recipes"]) == 0

"""Imports point downwards only, and `import flowrl` is light.

The rooms, each using only those above it:

    core, distributions, noise, recipes
    samplers
    rollout, policy                          (of samplers: only the plans)
    objectives | rewards | pipelines         (they do not import each other)
    training
    evaluation
    miniature
    cli
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl

ROOT = Path(flowrl.__file__).parent
LEVEL = {
    "core": 0,
    "distributions": 0,
    "noise": 0,
    "recipes": 0,
    "samplers": 1,
    "rollout": 2,
    "policy": 2,
    "objectives": 3,
    "rewards": 3,
    "pipelines": 3,
    "training": 4,
    "evaluation": 5,
    "miniature": 6,
    "cli": 7,
}
ENTRY_POINTS = ("__init__", "__main__")  # of the package itself


def modules():
    """Every module of the package: (dotted name, path)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, path: Path):
    """Every module that `path` imports anywhere in it, absolute and dotted, type-checking blocks included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                # `from package import module` names a module, `from module import name` does not.
                yield inner if inner in KNOWN or base == "flowrl" else base
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


KNOWN = {name for name, _ in modules()}
INSIDE = [(n, p) for n, p in modules() if "." in n and n.split(".")[1] not in ENTRY_POINTS]
ids = [n for n, _ in INSIDE]


def room(name: str) -> str:
    return name.split(".")[1]


def test_every_module_has_a_room():
    assert {room(n) for n in ids} <= set(LEVEL)
    assert len(ids) > 30


@pytest.mark.parametrize(("name", "path"), INSIDE, ids=ids)
def test_imports_point_downwards(name, path):
    mine = room(name)
    for target in imports(name, path):
        if target.split(".")[0] != "flowrl":
            continue
        if target == "flowrl.__version__":
            continue
        assert target in KNOWN, f"{name} imports {target}, a public name: import it from its room instead"
        other = room(target)
        if other == mine:
            continue
        lower = LEVEL[other] < LEVEL[mine] or {mine, other} == {"rollout", "policy"}
        assert lower, f"{name} ({mine}) imports {target} ({other})"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("rollout", {"flowrl.samplers.plans", "flowrl.distributions"}),
        ("policy", {"flowrl.samplers.plans", "flowrl.distributions", "flowrl.rollout"}),
    ],
)
def test_rollout_and_policy_know_no_kernel(name, allowed):
    ours = {t for t in imports(f"flowrl.{name}", ROOT / f"{name}.py") if t.startswith("flowrl")}
    assert ours <= allowed


LIBRARIES = {
    # Beside the standard library.
    "core": {"torch"},
    "distributions": {"torch"},
    "noise": {"torch"},
    "recipes": {"yaml"},
    "rollout": {"torch"},
    "policy": {"torch"},
    "samplers": {"torch", "numpy", "diffusers"},
    "objectives": {"torch"},
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_room_uses_only_its_libraries(name):
    used = {target.split(".")[0] for module, path in INSIDE if room(module) == name for target in imports(module, path)}
    assert used - set(sys.stdlib_module_names) - {"flowrl", ""} <= LIBRARIES[name]


def test_objectives_know_no_concrete_pipeline():
    for module, path in INSIDE:
        if room(module) == "objectives":
            assert "Diffusers" not in path.read_text(), module


def test_the_walk_sees_relative_nested_and_dynamic_imports(tmp_path):
    file = tmp_path / "aggregation.py"
    file.write_text(
        "from .batch import Batch\nfrom . import batch\nfrom ..training import trainer\n"
        "import importlib\ndef f():\n    from flowrl import noise\n    importlib.import_module('diffusers')\n"
    )
    found = list(imports("flowrl.core.aggregation", file))
    assert found[:4] == ["flowrl.core.batch", "flowrl.core.batch", "flowrl.training.trainer", "importlib"]
    assert set(found[4:]) == {"flowrl.noise", "diffusers"}


# ------------------------------------------------------------------------------------------------------- at run time


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "open_clip", "torchvision", "numpy", "matplotlib"}


def test_importing_flowrl_loads_no_library():
    assert not loaded_by("import flowrl; dir(flowrl); flowrl.__version__") & HEAVY


def test_core_loads_torch_only():
    assert not loaded_by("import flowrl.core") & (HEAVY - {"torch", "numpy"})  # torch itself loads numpy


def test_every_public_name_is_where_the_package_says():
    for name in flowrl.__all__:
        assert getattr(flowrl, name) is not None
    assert set(flowrl.__all__) <= set(dir(flowrl))
    with pytest.raises(AttributeError, match="no attribute 'FlowPPO'"):
        flowrl.FlowPPO  # noqa: B018


def test_the_type_checkers_names_are_the_real_ones():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == flowrl._HOMES

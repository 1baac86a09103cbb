"""The cards say what is there, and the pages made from them are up to date."""

import inspect
import json
import re
from pathlib import Path

import pytest

from flowrl import objectives
from flowrl.cli import main
from flowrl.core import PRESETS
from flowrl.miniature import bench, results
from flowrl.objectives import Objective
from flowrl.objectives.cards import CARDS, find
from flowrl.recipes import shipped

ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("name", CARDS)


def test_every_objective_has_a_card():
    concrete = {
        name
        for name, cls in vars(objectives).items()
        if inspect.isclass(cls) and issubclass(cls, Objective) and not inspect.isabstract(cls)
    }
    assert {card.objective for card in CARDS.values()} == concrete
    assert set(CARDS) <= set(bench.VARIANTS)


@EVERY
def test_a_card_says_what_the_code_says(name):
    card = CARDS[name]
    objective = card.cls()
    assert card.defaults == {key: getattr(objective, key) for key in card.defaults}
    assert set(card.defaults) == set(inspect.signature(card.cls).parameters)
    assert set(card.requires["always"]) == objective.requires or objective.requires == set(
        card.requires["always"] + card.requires["with kl > 0"]
    )
    preset = PRESETS.get(name.replace("-", "_"))
    assert (preset is None) == (card.paper is not None) == (card.formula_status is not None)  # never said twice
    if preset is not None:
        assert card.source == (preset.paper, preset.formula_status)
        assert objective.algorithm.preset.name == preset.name
    assert card.source[0] in inspect.getdoc(inspect.getmodule(card.cls))


@EVERY
def test_what_a_card_names_exists(name):
    card = CARDS[name]
    assert card.tests and all((ROOT / path).is_file() for path in card.tests)
    spelled = re.compile(rf"^(objective|  name): {card.objective}\b", re.M)
    assert card.recipes == [recipe for recipe, path in shipped().items() if spelled.search(path.read_text())]


def test_facts_known_from_the_papers():
    assert {name: card.kind for name, card in CARDS.items() if card.kind != "trajectory"} == {
        "diffusion-nft": "forward-process"
    }
    assert CARDS["superflow"].source == ("2512.17951", "derived")
    assert CARDS["flow-grpo"].requires == {"always": ["log_prob"], "with kl > 0": ["reference"]}
    assert CARDS["diffusion-nft"].requires == {"always": ["old"], "with kl > 0": ["reference"]}
    assert CARDS["diffusion-nft"].recipes == ["glyphs-nft", "shapes-nft"]


def test_find():
    assert find("flow-grpo") is find("FlowGRPO") is find("flow_grpo") is CARDS["flow-grpo"]
    assert find("EGRPO") is find("E-GRPO") is CARDS["e-grpo"]
    with pytest.raises(ValueError, match="no algorithm 'flow-grop'; did you mean 'flow-grpo'"):
        find("flow-grop")


# ----------------------------------------------------------------------------------------------------- command, pages

COST = {"steps": 7, "group_size": 12, "rollout": 7.0, "update": 1.5, "gradient": 6.0, "forwards": 14.5, "work": 26.5}


def test_command(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "cost", lambda name: asked.append(name) or COST)
    monkeypatch.setattr(results, "load", lambda: None)
    assert main(["algorithms"]) == 0
    assert capsys.readouterr().out.count("\n") == 2 + len(CARDS)
    assert main(["algorithms", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(CARDS)
    assert not asked  # the list costs nothing
    assert main(["algorithms", "DiffusionNFT", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert asked == ["diffusion-nft"] and facts["cost_per_image"] == COST
    assert facts["defaults"]["nft_beta"] == 1.0 and facts["curve"] == []
    assert main(["algorithms", "superflow"]) == 0
    text = capsys.readouterr().out
    assert "DERIVED, not verified" in text and "| update, without gradient | 1.5 |" in text
    assert main(["algorithms", "nft"]) == 2
    assert "no algorithm 'nft'" in capsys.readouterr().err


def test_a_card_takes_what_the_benchmark_measured():
    def point(forwards, score):
        return {"forwards": forwards, "overall": score}

    tried = [
        {"setting": {"objective.kl": 0.0}, "base": 0.4, "score": 0.5, "kl": 1.0, "failure": None},
        {"setting": {"objective.kl": 0.1}, "base": 0.4, "score": 0.3, "kl": 1.0, "failure": None},
        {"setting": {"objective.kl": 9.0}, "base": 0.4, "score": None, "kl": None, "failure": "RuntimeError: nan"},
    ]
    runs = [
        {"variant": "flow-grpo", "points": [point(0, 0.4), point(55, 0.6), point(100, 0.8)]},
        {"variant": "flow-grpo", "points": [point(0, 0.5), point(55, 0.5), point(101, 0.9)]},
        {"variant": "cps", "points": [point(0, 0.1)]},
    ]
    measured = {"budget": {"forwards": 100}, "tuning": {"flow-grpo": {"tried": tried}}, "runs": runs}
    facts = results.card_facts(CARDS["flow-grpo"], COST, measured)
    assert len(facts["curve"]) == 11
    assert facts["curve"][5]["score"] == pytest.approx(0.45)  # at 50 both stand where they began
    assert facts["curve"][10] == {"forwards": 100, "score": pytest.approx(0.65), "seeds": "0.500 - 0.800"}
    assert facts["safe_ranges"][-1] == "kl 0: 0.400 to 0.500 on the search's prompts"
    assert facts["failure_signs"] == ["kl 0.1: 0.400 to 0.300 on the search's prompts", "kl 9: RuntimeError: nan"]
    assert "| 100 | 0.650 | 0.500 - 0.800 |" in results.card_page(facts)


def _without_cost(text):
    return re.sub(rf"## {results.COST}\n.*?(?=## )", "", text, flags=re.S)


@EVERY
def test_pages_are_up_to_date(name):
    """But for the cost, which takes running: the next test compares it."""
    page = (ROOT / "docs/algorithms" / f"{name}.md").read_text()
    made = results.card_page(results.card_facts(CARDS[name], None, results.load()))
    assert f"## {results.COST}\n" in page, "the page lacks its cost"
    assert _without_cost(page) == made, "run flowrl algorithms --write-docs docs/algorithms"


def test_the_overview_is_up_to_date():
    folder = ROOT / "docs/algorithms"
    assert (folder / "index.md").read_text() == results.overview_page()
    assert {p.stem for p in folder.glob("*.md")} == {"index", *CARDS}


@pytest.mark.slow
def test_written_pages_are_those_of_the_docs(tmp_path):
    assert main(["algorithms", "--write-docs", str(tmp_path)]) == 0
    for file in tmp_path.iterdir():
        assert file.read_text() == (ROOT / "docs/algorithms" / file.name).read_text(), file.name

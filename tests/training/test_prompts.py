"""Prompts: what is read, what is refused, and how it is drawn."""

import importlib
import json
from collections import Counter

import pytest

from flowrl.rollout import Prompt
from flowrl.training.prompts import NAMED, PromptSet, columns_of


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------- sources


def test_a_list_of_texts_and_mappings():
    prompts = PromptSet(["a cat", {"prompt": "a dog", "tag": "pet", "weight": 2, "count": 3}])
    assert list(prompts) == [Prompt(0, "a cat", {}, 1.0), Prompt(1, "a dog", {"tag": "pet", "count": 3}, 2.0)]
    assert prompts.columns == ("count", "tag") and len(prompts) == 2


def test_a_jsonl_file_keeps_columns_and_skips_blank_lines(tmp_path):
    rows = [{"prompt": "ein Bär", "tag": "a", "boxes": [[0, 1], [2, 3]]}, {"prompt": "二匹の猫", "n": None}]
    path = write(tmp_path / "p.jsonl", json.dumps(rows[0]), "", "  ", json.dumps(rows[1], ensure_ascii=False), '"bare"')
    for source in (path, str(path)):
        prompts = PromptSet(source)
        assert [p.text for p in prompts] == ["ein Bär", "二匹の猫", "bare"]
        assert [p.index for p in prompts] == [0, 1, 2]
        assert prompts[0].metadata == {"tag": "a", "boxes": [[0, 1], [2, 3]]}
    assert prompts.columns == ("boxes", "n", "tag")


def test_a_txt_file_has_a_prompt_a_line(tmp_path):
    path = write(tmp_path / "p.txt", " a cat ", "", '{"prompt": "not read as JSON"}')
    assert [p.text for p in PromptSet(path)] == ["a cat", '{"prompt": "not read as JSON"}']


def test_line_separators_inside_a_jsonl_text_do_not_end_the_line(tmp_path):
    r"""U+2028 and U+0085 may stand in JSON strings unescaped; only \n ends a line of JSON Lines."""
    texts = ["first\u2028second", "one\u0085two", "plain"]
    path = write(tmp_path / "p.jsonl", *(json.dumps({"prompt": t}, ensure_ascii=False) for t in texts))
    assert [p.text for p in PromptSet(path)] == texts


def test_windows_line_ends(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [p.text for p in PromptSet(path)] == ["a", "b"]


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    for name, content in (("p.txt", "a\nb\n"), ("p.jsonl", '"a"\n"b"\n')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert [p.text for p in PromptSet(tmp_path / name)] == ["a", "b"]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_sets_are_what_their_functions_return(name):
    module, _, function = NAMED[name].partition(":")
    entries = getattr(importlib.import_module(module), function)()
    prompts = PromptSet(name)
    assert len(prompts) == len(entries) > 20
    assert [p.text for p in prompts] == [e["prompt"] for e in entries]
    assert "tag" in prompts.columns and all(p.metadata["tag"] for p in prompts)


def test_a_function_by_its_path(tmp_path, monkeypatch):
    write(tmp_path / "my_prompts_of_test.py", "def pets():", "    return ['a cat', {'prompt': 'a dog', 'legs': 4}]")
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = PromptSet("my_prompts_of_test:pets")
    assert [p.text for p in prompts] == ["a cat", "a dog"] and prompts.columns == ("legs",)
    with pytest.raises(ValueError, match=r"my_prompts_of_test:cars.*cars"):
        PromptSet("my_prompts_of_test:cars")
    with pytest.raises(ValueError, match="no_such_module_of_test"):
        PromptSet("no_such_module_of_test:pets")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('{"text": "a"}', '"prompt"'),
        ('{"prompt": 5}', '"prompt"'),
        ('{"prompt": "  "}', "empty"),
        ("[1, 2]", '"prompt"'),
        ("7", '"prompt"'),
        ("null", '"prompt"'),
        ('{"prompt": "a", "weight": 0}', "weight"),
        ('{"prompt": "a", "weight": -1}', "weight"),
        ('{"prompt": "a", "weight": "much"}', "weight"),
        ('{"prompt": "a", "weight": true}', "weight"),
        ('{"prompt": "a", "weight": NaN}', "weight"),
        ('{"prompt": "a", "weight": Infinity}', "weight"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path, line, reason):
    path = write(tmp_path / "broken.jsonl", '{"prompt": "fine"}', "", line, '{"prompt": "fine too"}')
    with pytest.raises(ValueError, match=reason) as refusal:
        PromptSet(path)
    assert f"{path}, line 3" in str(refusal.value)


def test_a_broken_entry_of_a_list_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"prompt 2.*'dog'"):
        PromptSet(["a", "b", {"text": "dog"}])


def test_files_that_are_missing_empty_or_not_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl.*geneval"):
        PromptSet(tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError, match="shapes/tran"):
        PromptSet("shapes/tran")
    with pytest.raises(ValueError, match=r"no prompts in .*empty\.txt"):
        PromptSet(write(tmp_path / "empty.txt", "", "  "))
    with pytest.raises(ValueError, match="no prompts"):
        PromptSet([])
    (tmp_path / "latin.txt").write_bytes("Bär".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        PromptSet(tmp_path / "latin.txt")
    with pytest.raises(FileNotFoundError):
        PromptSet(tmp_path)  # a folder


# ------------------------------------------------------------------------------------------------- columns


def test_a_missing_value_is_none():
    prompts = PromptSet(["plain", {"prompt": "b", "tag": "t"}, {"prompt": "c", "n": 0}])
    assert columns_of(list(prompts), prompts.columns) == {"n": [None, None, 0], "tag": [None, "t", None]}
    assert columns_of([prompts[2], prompts[2]], ("n",)) == {"n": [0, 0]}
    assert columns_of(list(prompts), ()) == {}


# --------------------------------------------------------------------------------------------------- draws


@pytest.fixture(scope="module")
def many():
    return PromptSet([f"prompt {i}" for i in range(50)])


def test_draws_are_distinct_and_a_function_of_seed_and_iteration(many):
    import torch

    for iteration in range(30):
        torch.manual_seed(iteration)  # the global state plays no part
        drawn = many.draw(4, iteration, 10)
        assert len({p.index for p in drawn}) == 10
        torch.manual_seed(99)
        assert many.draw(4, iteration, 10) == drawn
    assert many.draw(4, 0, 10) != many.draw(4, 1, 10)
    assert many.draw(4, 0, 10) != many.draw(5, 0, 10)


def test_a_draw_may_take_everything_and_nothing_more(many):
    assert {p.index for p in many.draw(0, 0, 50)} == set(range(50))
    with pytest.raises(ValueError, match=r"51 distinct prompts.*50"):
        many.draw(0, 0, 51)


def test_equal_texts_are_different_prompts():
    drawn = PromptSet(["same", "same", "same"]).draw(0, 0, 3)
    assert {p.index for p in drawn} == {0, 1, 2}


def frequencies(prompts, count, draws):
    seen = Counter(p.index for i in range(draws) for p in prompts.draw(1, i, count))
    return [seen[i] / draws for i in range(len(prompts))]


def assert_within_five_errors(found, expected, draws):
    for f, p in zip(found, expected, strict=True):
        assert abs(f - p) < 5 * (p * (1 - p) / draws) ** 0.5, (found, expected)


def test_one_draw_follows_the_weights():
    weights = [1, 2, 3, 0.5, 3.5]
    prompts = PromptSet([{"prompt": f"p{w}", "weight": w} for w in weights])
    draws = 4000
    assert_within_five_errors(frequencies(prompts, 1, draws), [w / 10 for w in weights], draws)


def test_two_of_three_follow_the_exact_chances_of_drawing_without_replacement():
    """P(i among two) = p_i + sum over j of p_j p_i / (1 - p_j)."""
    weights = [5, 1, 2]
    p = [w / 8 for w in weights]
    exact = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    assert abs(sum(exact) - 2) < 1e-12
    prompts = PromptSet([{"prompt": f"p{i}", "weight": w} for i, w in enumerate(weights)])
    assert_within_five_errors(frequencies(prompts, 2, 4000), exact, 4000)


def test_the_choice_between_two_has_the_odds_of_their_weights():
    prompts = PromptSet([{"prompt": "rare", "weight": 1}, {"prompt": "often", "weight": 4}])
    draws = 4000
    assert_within_five_errors(frequencies(prompts, 1, draws), [0.2, 0.8], draws)
    # Two out of two is both, whatever the weights; who comes first has the same odds.
    firsts = Counter(prompts.draw(1, i, 2)[0].text for i in range(draws))
    assert_within_five_errors([firsts["rare"] / draws], [0.2], draws)


def test_extreme_weights_are_drawn_without_overflow():
    prompts = PromptSet([{"prompt": "never", "weight": 1e-300}, {"prompt": "always", "weight": 1e300}, "hardly"])
    assert all(prompts.draw(0, i, 1)[0].text == "always" for i in range(200))
    assert len(prompts.draw(0, 0, 3)) == 3

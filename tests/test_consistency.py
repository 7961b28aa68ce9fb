"""The diff is the algorithm: the GRPO files are one file but for it, and ppo.py shares with them what it can."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRPO = ["grpo_outcome", "grpo_process", "grpo_rtg"]
VARIANT_OPTIONS = {"grpo_rtg": {"baseline"}}


def blocks(script: str) -> dict[str, str]:
    """The script's top-level pieces by name, each with the comments above it; joined they are the file."""
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    pieces, start = {}, 0
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Expr) and not pieces:
            name = "docstring"
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            name = "imports"
        else:
            name = getattr(node, "name", "__main__")
        pieces[name] = "\n".join([pieces.get(name, ""), *lines[start : node.end_lineno]]).strip()
        start = node.end_lineno
    return pieces


def options(script: str) -> dict[str, tuple[str, str]]:
    """Annotation and help of every option; the paper's symbol before the help's colon may differ."""
    fields = re.findall(r"^    (\w+): (.+?) = .+?  # (.+)$", blocks(script)["Args"], re.M)
    return {name: (annotation, re.sub(r"^\S{1,3}: ", "", text)) for name, annotation, text in fields}


def assert_same(one: str, other: str, what: str) -> None:
    difference = "\n".join(difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm=""))
    assert not difference, f"{what} has drifted:\n{difference}"


@pytest.mark.parametrize("script", GRPO[1:])
def test_grpo_files_differ_only_in_the_algorithm(script):
    one, other = blocks(GRPO[0]), blocks(script)
    assert list(one) == list(other)
    for name in set(one) - {"docstring", "Args", "compute_advantages", "train"}:
        assert_same(one[name], other[name], name)
    call = re.compile(r"compute_advantages\(.*\)")
    assert len(call.findall(one["train"])) == len(call.findall(other["train"])) == 1
    assert_same(call.sub("CALL", one["train"]), call.sub("CALL", other["train"]), "train")


@pytest.mark.parametrize("script", GRPO)
def test_grpo_options_differ_only_in_defaults(script):
    assert {
        name: text for name, text in options(script).items() if name not in VARIANT_OPTIONS.get(script, ())
    } == options("grpo_outcome")


def test_ppo_shares_its_definitions():
    grpo, ppo = blocks("grpo_outcome"), blocks("ppo")
    shared = set(grpo) & set(ppo) - {"docstring", "imports", "Args", "check_args", "train"}
    assert {"make_env", "Policy", "play_episodes", "update", "evaluate", "save", "load", "open_run", "main"} <= shared
    for name in shared:
        assert_same(grpo[name], ppo[name].replace("policy = ActorCritic(", "policy = Policy("), name)


def test_ppo_options_are_named_and_explained_alike():
    grpo, ppo = options("grpo_outcome"), options("ppo")
    assert len(set(grpo) & set(ppo)) > 20
    for name in set(grpo) & set(ppo):
        assert grpo[name] == ppo[name]


def test_a_drift_is_found(tmp_path, monkeypatch):
    for script in GRPO:
        (tmp_path / f"{script}.py").write_text((ROOT / f"{script}.py").read_text())
    drifted = tmp_path / "grpo_rtg.py"
    drifted.write_text(drifted.read_text().replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"\+.*set_to_none=False"):
        test_grpo_files_differ_only_in_the_algorithm("grpo_rtg")

"""The diff is the algorithm, ppo.py shares what it can, and all four scripts keep their limits."""

import ast
import re
import tomllib

import pytest

from tests.child import ROOT, SCRIPTS

GRPO = SCRIPTS[:3]
each_script = pytest.mark.parametrize("script", SCRIPTS)


def read(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def halves(script: str) -> tuple[str, str]:
    """What stands above the dividing line, and the rest."""
    above, line, below = read(script).partition("# --- ")
    return above, line + below


def pieces(script: str) -> dict[str, str]:
    """The definitions above the line and Policy's methods; all else, in one: "module"."""
    text = halves(script)[0]
    _docstring, *body = ast.parse(text).body
    [policy] = [node for node in body if getattr(node, "name", "") == "Policy"]
    found = {}
    for node in [*body, *policy.body[1:]]:
        if node is not policy:
            name = getattr(node, "name", "module")
            found[name] = found.get(name, "") + ast.get_source_segment(text, node)
    return found


def options(script: str) -> list[str]:
    """The fields of Args without defaults, and the blank lines between their groups."""
    fields = re.sub(r" = .+?(?=  #)", "", pieces(script)["Args"]).splitlines()[3:]
    return [line for line in fields if "baseline:" not in line]


def test_below_the_line_the_four_files_are_one_text():
    texts = {halves(script)[1] for script in SCRIPTS}
    assert len(texts) == 1
    assert len(re.findall("^# --- .* ---$", texts.pop(), re.M)) == 4  # headings


@pytest.mark.parametrize("script", GRPO[1:])
def test_grpo_files_differ_only_in_the_algorithm(script):
    one, other = pieces(GRPO[0]), pieces(script)
    assert list(one) == list(other)
    assert options(GRPO[0]) == options(script)
    call = re.compile(r"compute_advantages\([^()]*\)")
    for name in one.keys() - {"Args", "compute_advantages"}:
        assert call.sub("", one[name]) == call.sub("", other[name]), name


PPO_OWN = {"module", "Args", "__init__", "play", "make_batch", "update", "train"}


def test_ppo_shares_its_definitions():
    grpo, ppo = pieces("grpo_outcome"), pieces("ppo")
    assert {name for name in grpo.keys() & ppo.keys() if grpo[name] != ppo[name]} == PPO_OWN
    grpo_own = {"compute_advantages", "advantages_of", "step_weights", "grpo_loss", "Episodes"}
    assert grpo.keys() - ppo.keys() == grpo_own | {"collect_groups"}
    ppo_own = {"compute_gae", "ppo_loss", "value", "Steps", "InFlight", "start_episode"}
    assert ppo.keys() - grpo.keys() == ppo_own | {"collect_steps"}
    lines = {name: (grpo[name].splitlines(), ppo[name].splitlines()) for name in PPO_OWN}
    first, second = lines["play"]  # GRPO's looks at the starts of a group
    assert second == [*first[:4], second[4], *first[5:7], *first[12:]]
    first, second = lines["__init__"]
    [critic] = [line for line in second if line not in first]
    assert critic.strip().startswith("self.critic = mlp(")
    neutral = re.compile(r"  # line 1\d|\w+_loss\([^()]*\)|(μ p|P)(?=asses over)")
    first, second = (neutral.sub("", each["update"]).splitlines() for each in (grpo, ppo))
    own = [line for line in second if line not in first]  # its gradients: the critic's, the actor's
    assert len(own) == 6 and all(re.search("actor|critic|max_norm", line) for line in own)


@each_script
def test_limits(script):
    """Of lines and columns; the algorithm comes first."""
    lines = read(script).splitlines()
    assert len(lines) <= 770 and max(map(len, lines)) <= 100
    dividing, *_ = (i for i, line in enumerate(lines, 1) if line.startswith("# ---"))
    [first] = [i for i, x in enumerate(lines, 1) if re.match("def compute_(advantages|gae)", x)]
    assert first < 120 and dividing < 455


@each_script
def test_a_copied_script_names_its_requirements(script):
    """In inline metadata (PEP 723) below the docstring: requirements.txt less pytest."""
    [block] = re.findall(r'^"""\n\n# /// script\n((?:# .*\n)+)# ///$', read(script), re.M)
    metadata = tomllib.loads(block.replace("# ", ""))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    needed = [line.partition(" #")[0] for line in lines if not line.startswith(("#", "pytest"))]
    assert metadata == {"requires-python": ">=3.11", "dependencies": needed}

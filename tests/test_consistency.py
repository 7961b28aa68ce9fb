"""The diff is the algorithm, ppo.py shares what it can, and all four scripts keep their limits."""

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRPO = ["grpo_outcome", "grpo_process", "grpo_rtg"]
each_script = pytest.mark.parametrize("script", [*GRPO, "ppo"])


def read(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def pieces(script: str) -> dict[str, str]:
    """A script's definitions and Run's methods, with what stands above each; the rest: "module"."""
    text = read(script)
    body = ast.parse(text).body
    [run] = [node for node in body if getattr(node, "name", "") == "Run"]
    methods = [node for node in run.body if isinstance(node, ast.FunctionDef)]
    found, lines, start = {}, text.splitlines(), 0
    for node in sorted([*body, *methods], key=lambda node: node.end_lineno):
        if node is not run:
            name = "docstring" if start == 0 else getattr(node, "name", "module")
            name = f"Run.{name}" if node in methods else name
            found[name] = "\n".join([found.get(name, ""), *lines[start : node.end_lineno]]).strip()
            start = node.end_lineno
    return found


def options(script: str) -> list[str]:
    """The fields of Args without defaults, and the blank lines between their groups."""
    fields = re.sub(r" = .+?(?=  #)", "", pieces(script)["Args"]).splitlines()[4:]
    return [line for line in fields if "baseline:" not in line]


@pytest.mark.parametrize("script", GRPO[1:])
def test_grpo_files_differ_only_in_the_algorithm(script):
    one, other = pieces(GRPO[0]), pieces(script)
    assert other.pop("discounted_sums") == pieces("grpo_rtg")["discounted_sums"]
    assert list(one) == list(other)
    assert options(GRPO[0]) == options(script)
    call = re.compile(r"compute_advantages\([^()]*\)")
    for name in one.keys() - {"docstring", "Args", "compute_advantages"}:
        assert call.sub("", one[name]) == call.sub("", other[name]), name


# What ppo.py has by another content: it has a critic, and episodes that go on.
PPO_OWN = {"docstring", "module", "Args", "make_batch", "update", "train", "check_args"}
PPO_OWN |= {"play_saved", "main", "Run.record"}


def test_ppo_shares_its_definitions():
    grpo, ppo = pieces("grpo_outcome"), pieces("ppo")
    assert {name for name in grpo.keys() & ppo.keys() if grpo[name] != ppo[name]} == PPO_OWN
    grpo_own = {"compute_advantages", "step_weights", "grpo_loss", "Episodes", "collect_groups"}
    assert grpo.keys() - ppo.keys() == grpo_own | {"group_metrics"}
    neutral = re.compile(r"  # line 1\d|\w+_loss\([^()]*\)|(μ p|P)(?=asses over)")
    grpo, ppo = (neutral.sub("", each["update"]).splitlines() for each in (grpo, ppo))
    own = [line for line in ppo if line not in grpo]  # its gradients: the critic's, the actor's
    assert len(own) == 6 and all(re.search("actor|critic|max_norm", line) for line in own)


def test_ppo_says_the_same_of_shared_options():
    """But for the paper's symbol."""
    grpo, ppo = ({re.sub(r"# \S\S?: ", "# ", x) for x in options(s)} for s in ("grpo_rtg", "ppo"))
    names = [{line.split(":")[0] for line in lines} for lines in (grpo, ppo, grpo & ppo)]
    assert names[0] & names[1] == names[2]


@each_script
def test_limits(script):
    """Lines, tokens, tokens a line of code, no a, b = x, y, and the algorithm first."""
    source = read(script)
    lines = source.splitlines()
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            assert not any(isinstance(x, ast.Tuple) for x in node.targets), node.lineno
    left_out = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    left_out |= {tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [
        (token.start[0], token.end[0])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in left_out and token.start[0] not in docstrings
    ]
    lines_of_code = set().union(*(range(start, end + 1) for start, end in tokens))
    assert len(lines) <= 730 and max(map(len, lines)) <= 100
    assert len(tokens) <= 5450 and len(tokens) <= 10.6 * len(lines_of_code)
    [dividing] = [i for i, line in enumerate(lines, 1) if line.startswith("# ---")]
    [first] = [i for i, x in enumerate(lines, 1) if re.match("def compute_(advantages|gae)", x)]
    assert first < 120 and dividing < 430


@each_script
def test_a_copied_script_names_its_requirements(script):
    """In inline metadata (PEP 723) below the docstring: requirements.txt less pytest."""
    [block] = re.findall(r'^"""\n\n# /// script\n((?:# .*\n)+)# ///$', read(script), re.M)
    metadata = tomllib.loads(block.replace("# ", ""))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    needed = [line.partition(" #")[0] for line in lines if not line.startswith(("#", "pytest"))]
    assert metadata == {"requires-python": ">=3.11", "dependencies": needed}

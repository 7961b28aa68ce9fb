"""The diff is the algorithm: the GRPO files are one file but for it, ppo.py shares with them what
it can, and all four keep the shape that makes them readable.
"""

import ast
import difflib
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRPO = ["grpo_outcome", "grpo_process", "grpo_rtg"]
each_script = pytest.mark.parametrize("script", [*GRPO, "ppo"])
HELPERS = {"discounted_sums", "ReturnRegression"}  # of compute_advantages
OWN_OPTIONS = {"baseline", "gae_lambda", "decay"}  # of grpo_rtg.py


def read(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def pieces(script: str) -> dict[str, str]:
    """The top-level pieces of a script by name, each with what stands above it; joined they are the
    file. Methods of Run stand for Run.
    """
    text = read(script)
    body = ast.parse(text).body
    [run] = [node for node in body if getattr(node, "name", "") == "Run"]
    methods = [node for node in run.body if isinstance(node, ast.FunctionDef)]
    found, lines, start = {}, text.splitlines(), 0
    for node in sorted([*body, *methods], key=lambda node: node.end_lineno):
        if node is run:
            continue
        name = getattr(node, "name", "module")
        name = f"Run.{name}" if node in methods else name
        name = "docstring" if start == 0 else name
        found[name] = "\n".join([found.get(name, ""), *lines[start : node.end_lineno]]).strip()
        start = node.end_lineno
    return found


def options(script: str) -> dict[str, tuple[str, str]]:
    """Annotation and help of every option; the paper's symbol before the colon may differ."""
    classes = [pieces(script)[name] for name in ("Algorithm", "Environment", "Program")]
    fields = re.findall(r"^    (\w+): (.+?) = .+?  # (.+)$", "".join(classes), re.M)
    return {name: (kind, re.sub(r"^\S{1,3}: ", "", text)) for name, kind, text in fields}


def assert_same(one: str, other: str, what: str) -> None:
    difference = "\n".join(difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm=""))
    assert not difference, f"{what} has drifted:\n{difference}"


def without_own(name: str, code: str) -> str:
    """A piece of a GRPO script less the lines that only grpo_rtg.py has, or that differ by it."""
    if name == "train":
        code = re.sub(r"( +values = None\n)? +if args.baseline == .*\n    .*\n", "", code)
        code = re.sub(r"compute_advantages\([^()]*\)", "compute_advantages()", code)
        code = code.replace("compute_advantages()  # line 9", "compute_advantages()")
    if name == "check_args":
        code = re.sub(r' +highest .= {"gae_lambda": 1, "decay": 1}\n', "", code)
    return code


@pytest.mark.parametrize("script", GRPO[1:])
def test_grpo_files_differ_only_in_the_algorithm(script):
    one, other = pieces(GRPO[0]), pieces(script)
    assert list(one) == [name for name in other if name not in HELPERS]
    for name in set(one) - {"docstring", "Algorithm", "compute_advantages"}:
        assert_same(without_own(name, one[name]), without_own(name, other[name]), name)


@each_script
def test_options_differ_only_in_defaults(script):
    ours, theirs = options("grpo_outcome"), options(script)
    shared = [name for name in ours if name in theirs]
    assert [(name, ours[name]) for name in shared] == [
        (name, text) for name, text in theirs.items() if name in ours
    ]
    if script == "ppo":
        assert len(shared) > 20
    else:
        assert shared == [name for name in theirs if name not in OWN_OPTIONS]


# What is in both, and has to be different: PPO has a critic, and episodes that go on.
PPO_OWN = {"docstring", "module", "Algorithm", "make_batch", "update", "train", "check_args"}
PPO_OWN |= {"play_saved", "Run.record", "Run.finish"}


def test_ppo_shares_its_definitions():
    grpo, ppo = pieces("grpo_outcome"), pieces("ppo")
    shared = {name for name in grpo if name in ppo}
    assert {name for name in shared if grpo[name] != ppo[name]} == PPO_OWN, "what differs"
    assert {"Policy", "mlp", "play", "minibatches", "evaluate", "Run.finish", "main"} <= shared
    for name in ("update", "play_saved"):
        assert_same(neutral(grpo[name]), neutral(ppo[name]), name)


def neutral(code: str) -> str:
    """Without the loss, the network and the paper's letters and lines."""
    code = re.sub(r"\w+_loss\([^()]*\)", "loss()", code)
    return re.sub(r"  # line 1\d.*|[μK] passes|Policy|ActorCritic", "", code)


@each_script
def test_one_idea_a_line(script):
    """At most 10 tokens a line of code, and no a, b = x, y."""
    left_out = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    left_out |= {tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(read(script)).readline)
    lines = [token.start[0] for token in tokens if token.type not in left_out]
    assert len(lines) <= 10 * len(set(lines))
    for node in ast.walk(ast.parse(read(script))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            assert not any(isinstance(x, ast.Tuple) for x in node.targets), node.lineno


@each_script
def test_the_algorithm_stands_first(script):
    lines = read(script).splitlines()
    [dividing] = [i for i, line in enumerate(lines, 1) if line.startswith("# ---")]
    advantage = "def compute_gae(" if script == "ppo" else "def compute_advantages("
    [first] = [i for i, line in enumerate(lines, 1) if line.startswith(advantage)]
    assert first <= 130 and dividing < (510 if script == "grpo_rtg" else 420)
    names = list(pieces(script))
    order = [advantage[4:-1], "Policy", "make_batch", "update", "train", "UserError", "main"]
    assert sorted(order, key=names.index) == order


@each_script
def test_a_copied_script_names_its_requirements(script):
    """As inline script metadata (PEP 723), which `uv run` reads: requirements.txt less pytest."""
    [block] = re.findall(r"^# /// script\n((?:# .*\n)+)# ///$", read(script), re.M)
    metadata = tomllib.loads(block.replace("# ", ""))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    needed = [line.partition(" #")[0] for line in lines if not line.startswith(("#", "pytest"))]
    assert metadata == {"requires-python": ">=3.11", "dependencies": needed}

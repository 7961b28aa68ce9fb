"""The diff is the algorithm: the GRPO files are one file but for it, and ppo.py shares with them
what it can.
"""

import ast
import difflib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GRPO = ["grpo_outcome", "grpo_process", "grpo_rtg"]
VARIANT_OPTIONS = {"grpo_rtg": {"baseline", "num_neighbors"}}
VARIANT_PIECES = {"grpo_rtg": ["nearest_mean", "pad"]}


def blocks(script: str) -> dict[str, str]:
    """The script's top-level pieces by name, each with the comments above it; joined they are the
    file.
    """
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
    """Annotation and help of every option; the paper's symbol before the colon may differ."""
    fields = re.findall(r"^    (\w+): (.+?) = .+?  # (.+)$", blocks(script)["Args"], re.M)
    return {
        name: (annotation, re.sub(r"^\S{1,3}: ", "", text)) for name, annotation, text in fields
    }


def assert_same(one: str, other: str, what: str) -> None:
    difference = "\n".join(difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm=""))
    assert not difference, f"{what} has drifted:\n{difference}"


@pytest.mark.parametrize("script", GRPO[1:])
def test_grpo_files_differ_only_in_the_algorithm(script):
    one, other = blocks(GRPO[0]), blocks(script)
    own = VARIANT_PIECES.get(script, [])
    assert list(one) == [name for name in other if name not in own]
    for name in set(one) - {"docstring", "Args", "compute_advantages", "train"}:
        assert_same(one[name], other[name], name)
    call = re.compile(r"(        baseline = .*\n)?.* = compute_advantages\([^()]*\)")
    assert len(call.findall(one["train"])) == len(call.findall(other["train"])) == 1
    assert_same(call.sub("CALL", one["train"]), call.sub("CALL", other["train"]), "train")


@pytest.mark.parametrize("script", GRPO)
def test_grpo_options_differ_only_in_defaults(script):
    assert {
        name: text
        for name, text in options(script).items()
        if name not in VARIANT_OPTIONS.get(script, ())
    } == options("grpo_outcome")


# What is in both, and has to be different: PPO has a critic, and episodes that go on.
PPO_OWN = {"docstring", "imports", "Args", "make_batch", "update", "train", "average_gradients"}
PPO_OWN |= {"check_args", "Run", "Run.PROGRESS", "Run.__init__", "Run.record"}


def methods(script: str) -> dict[str, str]:
    """The pieces of a script, and those of its class Run."""
    pieces = blocks(script)
    tree = ast.parse(pieces["Run"])
    lines = pieces["Run"].splitlines()
    for node in tree.body[0].body:
        name = getattr(
            node,
            "name",
            "PROGRESS" if isinstance(node, ast.Assign | ast.AugAssign) else "docstring",
        )
        pieces[f"Run.{name}"] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return pieces


def test_ppo_shares_its_definitions():
    grpo, ppo = methods("grpo_outcome"), methods("ppo")
    shared = set(grpo) & set(ppo) - PPO_OWN
    assert {"make_env", "mlp", "Policy", "play_episodes", "evaluate", "save", "load"} <= shared
    assert {"main", "gather", "Run.evaluate_and_save", "Run.finish", "Run.open_logs"} <= shared
    for name in shared:
        assert_same(
            grpo[name], ppo[name].replace("policy = ActorCritic(", "policy = Policy("), name
        )


def test_ppos_update_is_grpos_but_for_the_loss():
    grpo, ppo = blocks("grpo_outcome")["update"], blocks("ppo")["update"]
    for theirs, ours in (
        ("ppo_loss", "grpo_loss"),
        ("K passes", "μ passes"),
        (
            "args.clip_coef, args.ent_coef, args.vf_coef",
            "args.clip_coef, args.kl_coef, args.ent_coef",
        ),
        ("(policy)\n", '(policy, len(batch["obs"]) if args.loss_agg == "step" else 1)\n'),
    ):
        assert ppo.count(theirs) == 1
        ppo = ppo.replace(theirs, ours)
    assert_same(grpo, ppo, "update")


@pytest.mark.parametrize("script", [*GRPO, "ppo"])
def test_the_algorithm_stands_first_in_a_file_of_the_promised_size(script):
    text = (ROOT / f"{script}.py").read_text()
    lines = text.splitlines()
    advantage = "def compute_gae(" if script == "ppo" else "def compute_advantages("
    [line] = [i for i, line in enumerate(lines, 1) if line.startswith("# --- The program around")]
    most = {"ppo": (380, 694, 37), "grpo_rtg": (407, 704, 39)}
    most_above, most_lines, most_kib = most.get(script, (380, 660, 36))
    assert line < most_above and text[: text.index(advantage)].count("\n") < 130
    assert len(lines) <= most_lines and len(text.encode()) <= most_kib * 1024
    assert max(map(len, lines)) <= 100
    names = list(blocks(script))
    order = [advantage[4:-1], "mlp", "Policy", "make_batch", "update", "train", "UserError", "Run"]
    assert sorted(order, key=names.index) == order
    for word in ("torchrun", "RANK", "checkpoint.pt", "Path(", "tqdm", "print("):
        assert word not in "\n".join(lines[lines.index("", 90) : line - 1]), word


@pytest.mark.parametrize("script", [*GRPO, "ppo"])
def test_a_copied_script_names_its_requirements(script):
    """As inline script metadata (PEP 723), which `uv run` reads: requirements.txt less pytest."""
    text = (ROOT / f"{script}.py").read_text()
    [block] = re.findall(r"^# /// script\n((?:# .*\n)+)# ///$", text, re.M)
    metadata = tomllib.loads(block.replace("# ", ""))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    needed = [line.partition(" #")[0] for line in lines if not line.startswith(("#", "pytest"))]
    assert metadata == {"requires-python": ">=3.11", "dependencies": needed}
    assert text.index("# --- The program around") < text.index("# /// script")


def test_ppo_options_are_named_and_explained_alike():
    grpo, ppo = options("grpo_outcome"), options("ppo")
    assert len(set(grpo) & set(ppo)) > 20
    for name in set(grpo) & set(ppo):
        assert grpo[name] == ppo[name]


def test_a_drift_is_found(tmp_path, monkeypatch):
    for script in GRPO:
        (tmp_path / f"{script}.py").write_text((ROOT / f"{script}.py").read_text())
    drifted = tmp_path / "grpo_rtg.py"
    drifted.write_text(
        drifted.read_text().replace(
            "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"
        )
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"\+.*set_to_none=False"):
        test_grpo_files_differ_only_in_the_algorithm("grpo_rtg")

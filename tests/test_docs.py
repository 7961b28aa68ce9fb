"""What docs and README say exists, links resolve, commands run, printed numbers are right."""

import importlib
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import tyro

from tests import child

ROOT = child.ROOT
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
MODULES = [importlib.import_module(script) for script in child.SCRIPTS]
sys.path.append(str(DOCS))
links = importlib.import_module("links")

# What pages mention and the scripts do not have: TRL's names, Gymnasium's, the reader's.
FOREIGN = """num_generations num_iterations epsilon beta sync_ref_model ref_model_sync_steps
per_device_train_batch_size AVX2 neighbors scale_rewards loss_type max_completion_length
frac_reward_zero_std GRPOConfig entropy_coef max_steps
generation_batch_size steps_per_generation gradient_accumulation_steps ref_model_mixup_alpha runs kl
use_bias_correction_kl epsilon_high delta mask_truncated_completions my_module PYTHONPATH entropy
docs tests reward_threshold gymnasium.wrappers.NormalizeReward gymnasium.Wrapper np.random Tuple
Dict"""
OTHER_FLAGS = """--nproc-per-node --logdir --seeds --reach --jobs --by --only --replay --seconds
--help --index-url"""


def prose(page) -> str:
    """A page without its fenced code and displayed equations."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def words() -> set[str]:
    """Every name of the scripts and of what is under docs."""
    paths = [*(ROOT / f"{script}.py" for script in child.SCRIPTS), *DOCS.glob("**/*.py")]
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(path.read_text() for path in paths)))


@pytest.mark.parametrize("page", [x for x in PAGES if x.name != "performance.md"])
def test_every_function_that_a_page_names_exists(page):
    """At least as a word of a script: a variable, a key, a tag. performance.md tried others."""
    for name in set(re.findall(r"`([A-Za-z_][\w.]*)`", prose(page))) - set(FOREIGN.split()):
        first, *rest = name.split(".")
        if rest and hasattr(MODULES[2], first):  # such as Policy.act
            assert hasattr(getattr(MODULES[2], first), rest[0]), name
        elif not re.search(r"\.(py|md|pt|svg|txt|csv)$", name):
            assert words().issuperset([first, *rest]), name


@each_page
def test_every_flag_that_a_page_names_exists(page):
    options = {name.replace("_", "-") for module in MODULES for name in vars(module.Args())}
    known = set(OTHER_FLAGS.split())
    known |= {f"--{no}{name}" for name in options for no in ("", "no-")}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) <= known


def test_defaults_in_the_table_of_symbols_are_those_of_the_script():
    page = (DOCS / "paper-to-code.md").read_text()
    rows = re.findall(r"\| `--([a-z-]+)`[^|]*\| ([\d.]+) \|", page)
    assert len(rows) >= 7
    for flag, value in rows:
        assert getattr(MODULES[2].Args(), flag.replace("-", "_")) == float(value), flag


def anchors(path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_and_pictures_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        path = (page.parent / path) if path else page
        assert path.exists(), target
        if path.suffix != ".py":  # a line of a script: the next test
            assert not anchor or anchor in anchors(path), target


@each_page
def test_links_lead_to_the_lines_of_functions(page):
    text = page.read_text()
    assert text == links.with_lines(text), "python docs/links.py"
    found = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)#L(\d+)\)", text)
    assert len(found) == text.count(".py#L")
    for name, path, line in found:
        code = (page.parent / path).read_text().splitlines()
        assert re.match(rf"(def|class) {name}\b", code[int(line) - 1]), name


# GitHub reads a page as Markdown before it looks for formulas. Between $…$ it drops the backslash
# of \, and \{, makes emphasis of _, * and ~, tags of < and cells of |; and it knows $ only beside a
# space or some punctuation. In ```math a formula is left alone.
INLINE_FORMULA = r"""(?<![^\s(|])\$(?!\s)
    (?: [^$`\\_*~<|\]] | \\[A-Za-z] | (?<=[A-Za-z0-9])_ | \](?!\() )+
    (?<!\s)\$(?![^\s.,;:)|])"""


@each_page
def test_formulas_reach_github_as_written(page):
    assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2 == 0
    for line in re.sub(r"`[^`]+`", "code", prose(page)).splitlines():
        assert "$" not in re.sub(INLINE_FORMULA, "", line, flags=re.VERBOSE), line


def test_the_cpu_build_in_the_readme_is_of_the_required_torch():
    required = re.findall(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert required == re.findall(r"torch==\S+", (ROOT / "README.md").read_text())


def test_the_index_links_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


CODE = [
    pytest.param(
        code, id=f"{page.name}-{i}", marks=pytest.mark.slow if page.name == "ablations.md" else ()
    )
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text.replace("float64", ""))]


@pytest.mark.parametrize("code", CODE)
def test_python_in_the_pages_runs_and_prints_what_its_comments_say(code, capsys):
    torch.set_num_threads(1)
    exec(compile(code, "page", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    for line, said in zip(printed.split("tensor")[1:], re.findall(r"print\(.*\)  # (.*)", code)):
        assert numbers(line) == pytest.approx(numbers(said), abs=6e-4), line


REWARDS = torch.tensor([[[1.0, 1, 2], [0, 3, 0], [2, 0, 0]]])
MASK = torch.tensor([[[1, 1, 1], [1, 1, 0], [1, 0, 0]]], dtype=torch.bool)
FIT = torch.tensor([[[3.0, 2, 2, 0], [3, 2, 0, 0], [2, 0, 0, 0]]])
WORKED = {  # the row of methods.md: script, options
    "outcome": ("grpo_outcome", {}),
    "process": ("grpo_process", {}),
    "return-to-go, `group`": ("grpo_rtg", {"baseline": "group"}),
    "return-to-go, `timestep`": ("grpo_rtg", {"baseline": "timestep"}),
    "return-to-go, `regression`": (
        "grpo_rtg",
        {"baseline": "regression", "values": FIT, "gae_lambda": 0.5},
    ),
}


@pytest.mark.parametrize("variant", WORKED)
def test_the_group_that_methods_works_by_hand(variant):
    script, options = WORKED[variant]
    advantages = importlib.import_module(script).compute_advantages(REWARDS, MASK, 1.0, **options)
    page = (DOCS / "methods.md").read_text()
    [row] = re.findall(rf"^\| {re.escape(variant)} \| (.*) \|$", page, re.MULTILINE)
    assert advantages[MASK].tolist() == pytest.approx(numbers(row), abs=6e-4)


def commands() -> list[str]:
    """The training commands of the pages, indented or in backticks."""
    found = []
    for page in PAGES:
        found += re.findall(r"^ +(python .*?)(?:  +#.*)?$", page.read_text(), re.MULTILINE)
        found += re.findall(r"`(python [^`…]*)`", page.read_text())
    training = r"python (grpo_\w+|ppo)\.py(?!.*(--help|<run>|my_module|neigh))"
    return sorted({command for command in found if re.match(training, command)})


@pytest.mark.parametrize("command", commands())
def test_training_commands_can_be_typed(command):
    """Their options exist and are in range, and their environments can be made."""
    _, script, *flags = shlex.split(command)
    for name, package in (("LunarLander", "Box2D"), ("Hopper|HalfCheetah", "mujoco")):
        if re.search(name, command) and not find_spec(package):
            pytest.skip(f"needs {package}")
    module = importlib.import_module(script.removesuffix(".py"))
    args = tyro.cli(module.Args, args=flags)
    module.check_args(args)
    module.make_env(args).close()


@pytest.mark.slow
def test_the_tables_are_current():
    """The tables of the study are what report.py makes of the CSVs."""
    pytest.importorskip("scipy"), pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, DOCS / "benchmark" / "report.py", "--check"], check=True)


@pytest.mark.slow
def test_the_pictures_can_be_drawn(monkeypatch, tmp_path):
    pytest.importorskip("scipy"), pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(DOCS / "figures")
    draw = importlib.import_module("draw")
    monkeypatch.setattr(sys.modules["report"], "DOCS", tmp_path)
    envs, policy = draw.environments(draw.grpo_rtg.Args(group_size=8))
    episodes = draw.grpo_rtg.collect_groups(envs, policy, 1, np.random.default_rng(0))
    draw.draw_flow()
    draw.draw_variants(episodes)
    drawn = {path.stem: path.stat().st_size for path in (tmp_path / "figures").iterdir()}
    assert drawn.keys() == {"flow", "variants"} and min(drawn.values()) > 10_000

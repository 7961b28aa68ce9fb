"""What README and docs say exists and is right; docs/benchmark writes what the scripts did."""

import importlib
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import tyro

from tests.child import ROOT, SCRIPTS
from tests.test_maths import VARIANTS, each_variant, pad

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}
sys.path[:0] = [str(DOCS), str(DOCS / "benchmark"), str(DOCS / "figures")]
links = importlib.import_module("links")

# What pages mention and the project does not have: TRL's names, Gymnasium's, the reader's.
FOREIGN = """num_generations num_iterations epsilon beta sync_ref_model ref_model_sync_steps
per_device_train_batch_size scale_rewards loss_type max_completion_length frac_reward_zero_std
GRPOConfig generation_batch_size gradient_accumulation_steps use_bias_correction_kl
gymnasium.Wrapper LinearReward ResizeObservation GrayscaleObservation FrameStackObservation
FilterObservation NormalizeObservation NormalizeReward FlatObsWrapper max_grad_norm entropy_coef
ref_model_mixup_alpha"""
OTHER_FLAGS = "--by --out --tag --nproc-per-node --logdir --seeds --replay --index-url --help --no-"


def prose(page) -> str:
    """A page without its fenced code and displayed equations."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


# Every name of the scripts and of what is under docs.
CODES = [path.read_text() for path in (*ROOT.glob("*.py"), *DOCS.glob("**/*.py"))]
WORDS = set(re.findall(r"[A-Za-z_]\w*", " ".join(CODES)))


@each_page
def test_every_name_on_a_page_exists(page):
    """At least as a word of a script: a variable, a key, a tag."""
    for name in set(re.findall(r"`([A-Za-z_][\w.]*)`", prose(page))) - set(FOREIGN.split()):
        if not re.search(r"\.(py|md|pt|svg|txt|csv)$", name):
            assert WORDS.issuperset(name.split(".")), name


@each_page
def test_every_flag_on_a_page_exists(page):
    names = {name.replace("_", "-") for module in MODULES.values() for name in vars(module.Args())}
    known = {f"--{no}{name}" for name in names for no in ("", "no-")} | set(OTHER_FLAGS.split())
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) <= known


@each_page
def test_links_and_pictures_resolve(page):
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        path = (page.parent / path) if path else page
        assert path.exists(), target
        if path.suffix == ".md" and anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text().lower(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", x).replace(" ", "-") for x in heads], target


@each_page
def test_links_lead_to_the_lines_of_functions(page):
    text = page.read_text()
    assert text == links.with_lines(text), "python docs/links.py"
    for name, path, line in re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)#L(\d+)\)", text):
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
        formula = re.sub(INLINE_FORMULA, "", line, flags=re.VERBOSE)
        assert "$" not in formula or line.startswith("    "), line


def test_the_pages_are_short_and_in_the_index():
    written = [re.sub(r"<!-- table.*?end -->", "", x.read_text(), flags=re.DOTALL) for x in PAGES]
    assert len(re.findall(r"\S*\w\S*", " ".join(written))) < 9500
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


CODE = [
    pytest.param(code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text.replace("float64", ""))]


@pytest.mark.parametrize("code", CODE)
def test_python_in_the_pages_runs_and_prints_what_its_comments_say(code, capsys):
    torch.set_num_threads(1)
    for name in {"optuna", "pandas"} & set(re.findall(r"^import (\w+)", code, re.M)):
        pytest.importorskip(name)
    exec(compile(code.replace("range(1, 6)", "range(1, 3)"), "page", "exec"), {})  # for time
    printed = capsys.readouterr().out
    assert printed
    said = re.findall(r"print\(.*\)  # (.*)", code)
    for line, numbers_said in zip(printed.split("tensor(")[1:], said):
        assert numbers(line) == pytest.approx(numbers(numbers_said), abs=6e-4), line
    if "for iteration" in code:  # a training loop
        returns = [float(line) for line in re.findall(r"^\d+\.\d+$", printed, re.M)]
        assert max(returns[-3:]) > 1.5 * returns[0], "it learns"
    if said and not numbers(said[-1]):
        assert printed.splitlines()[-1] == said[-1]


@each_variant
def test_the_group_that_is_worked_by_hand(variant):
    compute, _ = VARIANTS[variant]
    rewards, mask = pad([[[1.0, 1, 2], [0.0, 3], [2.0]]])
    page = (DOCS / "grpo.md").read_text()
    [row] = re.findall(rf"^\| (?:return-to-go, `)?{variant}`? \| (.*) \|$", page, re.MULTILINE)
    advantages = compute(rewards, mask, 1.0)
    assert advantages[mask].tolist() == pytest.approx(numbers(row), abs=6e-4)


def training_commands() -> list[str]:
    found = []
    for page in PAGES:
        found += re.findall(r"^ +(python .*?)(?:  +#.*)?$", page.read_text(), re.MULTILINE)
    training = r"python (grpo_\w+|ppo)\.py(?!.*(--help|--track|<run>|my_module))"
    return sorted({command for command in found if re.match(training, command)})


@pytest.mark.parametrize("command", training_commands())
def test_training_commands_can_be_typed(command, monkeypatch):
    """Their options exist and are in range, and their environments can be made."""
    monkeypatch.syspath_prepend(ROOT)
    _, script, *flags = shlex.split(command)
    if "LunarLander" in command and not find_spec("Box2D"):
        pytest.skip("needs Box2D")
    module = MODULES[script.removesuffix(".py")]
    args = tyro.cli(module.Args, args=flags)
    module.check_args(args)
    module.make_env(args)


@pytest.mark.slow
def test_the_tables_are_current():
    pytest.importorskip("scipy")
    subprocess.run([sys.executable, DOCS / "benchmark" / "report.py", "--check"], check=True)


FLAGS = "--num-groups 1 --group-size 4 --update-epochs 2 --learning-rate 1e-9"
COMMAND = f"grpo_outcome.py --env-id CartPole-v1 --total-timesteps 2500 {FLAGS} --seed 7"


@pytest.mark.slow
def test_a_row_is_what_the_script_gives(monkeypatch, tmp_path):
    run = importlib.import_module("run")
    monkeypatch.setattr(run.studies, "RESULTS", tmp_path)
    jobs = {("CartPole-v1", "outcome", "7"): COMMAND}
    jobs["CartPole-v1", "wrong", "7"] = COMMAND.replace("size 4", "size 1")
    assert run.run_all(jobs, "small", 2) == 1  # the second one fails
    [row] = run.studies.read("small").values()
    module = MODULES["grpo_outcome"]
    ended = module.train(tyro.cli(module.Args, args=COMMAND.split()[1:]))  # in this process
    assert int(row["steps"]) == ended.step
    assert float(row["greedy"]) == pytest.approx(ended.best_return, abs=0.005)
    assert len(row["curve"].split()) == 25
    mean_return = sum(ended.recent_returns) / len(ended.recent_returns)
    assert float(row["train_return"]) == pytest.approx(mean_return, abs=0.005)
    assert row["command"] == COMMAND and row["commit"] and "torch 2" in row["versions"]


def test_intervals_are_welchs():
    stats = pytest.importorskip("scipy.stats")
    report = importlib.import_module("report")
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 5), rng.normal(1, 3, 10)
    welch = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    student = stats.ttest_1samp(a, 0).confidence_interval()
    for (point, half), bounds in ((report.difference(a, b), welch), (report.mean(a), student)):
        assert [point - half, point + half] == pytest.approx([*bounds])
    assert report.mean(a, b) == pytest.approx(np.divide(report.difference(a, -b), 2))
    assert report.difference(np.ones(5), np.zeros(5)) == (1, 0)


def test_most_seeds_then_the_highest_return_choose_the_discounts(monkeypatch):
    studies = importlib.import_module("studies")
    ends = {"0.9": [(-100, -100)], "0.95": [(-150, -150)] * 2, "0.99": [(-140, -180), (-150, -200)]}
    tried = {("Pendulum-v1", f"timestep --gamma {x}"): ends[x] for x in ends}
    monkeypatch.setattr(studies, "tried", lambda study: tried)
    options = studies.discounts("Pendulum-v1", "timestep")
    assert studies.best("discount_tuning", "Pendulum-v1", "timestep", options) == "--gamma 0.99"


OLD_SCRIPT = """
import pathlib
pathlib.Path("runs", "a").mkdir(parents=True)
print("Trained 8 steps in 1.0 s")
print("Training return, last 1 episodes: 9.5")
print("Greedy evaluation, 1 episodes: return 8 ± 0")
"""


def test_a_replay_runs_the_commit_that_a_row_names(monkeypatch, tmp_path):
    """The tree's would fail. Only a row that names its processor has to end as it did."""
    run = importlib.import_module("run")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "training_curve", lambda run_dir, steps: f"1 {steps}")
    (tmp_path / "old.py").write_text(OLD_SCRIPT)
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm a"):
        run.git(*words.split())
    row = {"env": "A-v0", "variant": "a", "seed": "1", "command": "old.py --total-timesteps 2"}
    row |= {"steps": "8", "greedy": "8", "train_return": "9.5", "curve": "1 2"}
    row |= {"versions": run.versions(), "commit": run.git("rev-parse", "--short", "HEAD")}
    (tmp_path / "old.py").write_text("raise SystemExit('not this one')")
    assert run.replay([row], 1)
    assert not run.replay([row | {"greedy": "9"}], 1)
    assert run.replay([row | {"greedy": "9", "versions": row["versions"].rsplit(", ", 1)[0]}], 1)

"""What docs and README say exists, links resolve, commands run, printed numbers are right."""

import importlib
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests import child

ROOT, DOCS = child.ROOT, child.ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
MODULES = [importlib.import_module(script) for script in child.SCRIPTS]
sys.path.append(str(DOCS))
diff = importlib.import_module("diff")

# Names that pages mention and that are not of the four scripts: TRL's, Gymnasium's, Python's,
# examples.
FOREIGN = """num_generations num_iterations epsilon beta sync_ref_model ref_model_sync_steps
scale_rewards loss_type max_grad_norm max_completion_length learning_rate frac_reward_zero_std
kl entropy reset step terminated truncated Box Discrete MultiDiscrete MultiBinary Tuple Dict
render_mode metadata max_episode_steps reward_threshold np_random random np.random gymnasium.Wrapper
env.step env.reset gym.make module my_module PYTHONPATH GRPOConfig generation_batch_size
steps_per_generation gradient_accumulation_steps ref_model_mixup_alpha std mean uint8 docs tests
runs gymnasium.wrappers.NormalizeReward group timestep neighbors use_bias_correction_kl epsilon_high
delta mask_truncated_completions entropy_coef max_steps Haswell SkylakeX"""
OTHER_FLAGS = (
    "--nproc-per-node --logdir --seeds --reach --jobs --by --only --list --replay --seconds"
)
OTHER_FLAGS += " --against --cleanrl --cleanrl-python --help --index-url --script --log-std"


def text_of(page) -> str:
    return page.read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its fenced code and displayed equations."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def names() -> set[str]:
    """Every function, class, method, field, local name and dictionary key of the four scripts and
    the examples.
    """
    words = set()
    for path in [*(ROOT / f"{script}.py" for script in child.SCRIPTS), *DOCS.glob("**/*.py")]:
        words |= set(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return words


def exists(name: str) -> bool:
    for module in MODULES:
        target = module
        try:
            for part in name.removeprefix(f"{module.__name__}.").split("."):
                target = getattr(target, part)
            return True
        except AttributeError:
            pass
    return False


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "performance.md"], ids=lambda page: page.name
)
def test_every_function_that_a_page_names_exists(page):
    """As a function, class or method, or at least as a word of a script or an example: a variable,
    a key, a tag.
    """
    for name in set(re.findall(r"`([A-Za-z_][\w.]*)`", prose(text_of(page)))) - set(
        FOREIGN.split()
    ):
        if re.search(r"\.(py|md|pt|svg|txt|csv)$", name):
            continue
        assert exists(name) or names().issuperset(name.split(".")), name


def test_the_functions_of_paper_to_code_are_in_the_scripts():
    """Not only anywhere in their text: each is a function, class or method."""
    text = prose(text_of(DOCS / "paper-to-code.md"))
    named = set(re.findall(r"`([A-Za-z_][\w.]*)`", text)) - set(FOREIGN.split())
    named = {name for name in named if not re.search(r"\.(py|md|pt)$", name)}
    assert {"compute_advantages", "grpo_loss", "Policy.sampler", "step_weights"} <= named
    assert [name for name in named if not exists(name)] == []


@each_page
def test_every_flag_that_a_page_names_exists(page):
    flags = {name for module in MODULES for name in module.Args.__dataclass_fields__}
    known = {f"--{name.replace('_', '-')}" for name in flags} | {
        f"--no-{name.replace('_', '-')}" for name in flags
    }
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text_of(page))) - set(
        OTHER_FLAGS.split()
    ):
        assert flag in known, flag


def test_defaults_in_the_table_of_symbols_are_those_of_the_script():
    args, rows = (
        MODULES[2].Args(),
        re.findall(r"\| `--([a-z-]+)`[^|]*\| ([\d.]+) \|", text_of(DOCS / "paper-to-code.md")),
    )
    assert len(rows) >= 7
    for flag, value in rows:
        assert getattr(args, flag.replace("-", "_")) == float(value), flag


def anchors(path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_and_pictures_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        path = (page.parent / path) if path else page
        assert path.exists(), target
        if path.suffix != ".py":  # a line of a script: the next test
            assert not anchor or anchor in anchors(path), target


@each_page
def test_links_lead_to_the_lines_of_functions(page):
    text = text_of(page)
    assert text == diff.with_lines(text), "python docs/diff.py"
    found = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)#L(\d+)\)", text)
    assert len(found) == text.count(".py#L")
    for name, path, line in found:
        code = (page.parent / path).read_text().splitlines()
        assert re.match(rf"(def|class) {name}\b", code[int(line) - 1]), name


# GitHub reads a page as Markdown before it looks for formulas. Between $…$ it drops the backslash
# of \, and \{, makes emphasis of _, * and ~, tags of < and cells of |; and it knows $ only beside a
# space or some punctuation. In ```math and in $`…`$ a formula is left alone.
INLINE_FORMULA = r"""(?<![^\s(|])\$(?!\s)
    (?: [^$`\\_*~<|\]] | \\[A-Za-z] | (?<=[A-Za-z0-9])_ | \](?!\() )+
    (?<!\s)\$(?![^\s.,;:)|])"""


@each_page
def test_formulas_reach_github_as_written(page):
    """Display formulas in ```math, inline ones without what Markdown eats, fences closed."""
    text, fence = "", ""
    for line in text_of(page).splitlines():
        if mark := re.match(r" *```(.*)", line):
            assert bool(mark[1]) != bool(fence), line  # opens with a language, closes without
            fence = mark[1]
        elif not fence:
            text += f"{line}\n"
    assert not fence
    text = re.sub(r"\$`[^`\n|<]+`\$", "$x$", text)  # for what stands beside it
    text = re.sub(r"`[^`]+`", "code", text)
    for line in text.splitlines():
        assert "$" not in re.sub(INLINE_FORMULA, "", line, flags=re.VERBOSE), line


@each_page
def test_lines_are_short(page):
    """At most 120 characters, but tables, code and what cannot be broken: pictures, commands."""
    if page.name == "diff.md":  # generated, and code but for three lines
        return
    prose = re.sub(r"^ *```.*?```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for line in prose.splitlines():
        unbroken = re.sub(r"`[^`]+`|\]\([^)]+\)", "", line.strip())
        kept = line.startswith(("|", "    ", "![")) or len(unbroken.split()) <= 3
        assert kept or len(line) <= 120, line


def test_the_cpu_build_in_the_readme_is_of_the_required_torch():
    required = re.findall(r"^torch==\S+", text_of(ROOT / "requirements.txt"), re.MULTILINE)
    assert required == re.findall(r"torch==\S+", text_of(ROOT / "README.md"))


def test_the_index_links_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(DOCS / "README.md")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_the_diffs_are_current():
    assert text_of(DOCS / "diff.md") == diff.page(), "python docs/diff.py"


CODE = [
    (page.name, i, code) for page in PAGES for i, code in enumerate(blocks(text_of(page), "python"))
]


@pytest.mark.parametrize(
    "code", [code for *_, code in CODE], ids=[f"{name}-{i}" for name, i, _ in CODE]
)
def test_python_in_the_pages_runs_and_prints_what_its_comments_say(code, capsys):
    exec(compile(code, "page", "exec"), {})
    printed = capsys.readouterr().out
    for line, said in zip(printed.split("tensor")[1:], re.findall(r"print\(.*\)  # (.*)", code)):
        numbers = [
            float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line.replace("float64", ""))
        ]
        expected = [
            float(x)
            for x in re.findall(r"-?\d+\.?\d*", re.sub(r"float64|K = 1|G = 2|T = 3", "", said))
        ]
        assert numbers == pytest.approx(expected, abs=6e-4), line
    assert printed


GROUP = torch.tensor([[[1.0, 1, 2], [0, 3, 0], [2, 0, 0]]])
MASK = torch.tensor([[[1, 1, 1], [1, 1, 0], [1, 0, 0]]], dtype=torch.bool)
METHODS = DOCS / "methods.md"
OBS = torch.tensor([[[0.0, 2, 2], [6, 6, 0], [2, 0, 0]]])[..., None]
WORKED = {  # the row of methods.md: script, options, advantages
    "outcome": ("grpo_outcome", {}, [1, 1, 1, 0, 0, -1]),
    "process": ("grpo_process", {}, [-0.477, 0.000, 0.477, 0.000, 1.430, 0.477]),
    "return-to-go, `group`": (
        "grpo_rtg",
        {"baseline": "group"},
        [1.550, 0.221, -1.107, 0.221, 0.221, -1.107],
    ),
    "return-to-go, `timestep`": (
        "grpo_rtg",
        {"baseline": "timestep"},
        [1.581, 0, 0, 0, 0, -1.581],
    ),
    "return-to-go, `neighbors`": (
        "grpo_rtg",
        {"baseline": "neighbors", "obs": OBS},
        [1.490, 0.502, -0.463, 0.478, 0.306, -1.411],
    ),
}


@pytest.mark.parametrize("variant", WORKED)
def test_the_group_that_methods_works_by_hand(variant):
    script, options, expected = WORKED[variant]
    advantages = importlib.import_module(script).compute_advantages(GROUP, MASK, 1.0, **options)
    assert advantages[MASK].tolist() == pytest.approx(expected, abs=6e-4)
    [row] = re.findall(rf"^\| {re.escape(variant)} \| (.*) \|$", text_of(METHODS), re.MULTILINE)
    assert [float(x) for cell in row.split(" | ") for x in cell.split(", ")] == expected


def test_the_weighted_means_that_methods_works_by_hand():
    """Squared distance and R of two neighbours, their mean, R less that: a row for each step."""
    number = r"(-?[\d.]+)"
    two = rf"{number}; {number}"
    row = rf"^\| member .*? \| {number} \| .*? \| {two} \| {two} \| {number} \| {number} \|$"
    rows = [[*map(float, found)] for found in re.findall(row, text_of(METHODS), re.MULTILINE)]
    for own, near, far, first, second, mean, left in rows:
        weighted = (first / near + second / far) / (1 / near + 1 / far)
        assert (mean, left) == (pytest.approx(weighted, abs=6e-4), pytest.approx(own - mean))
    given = importlib.import_module("grpo_rtg").compute_advantages(
        GROUP, MASK, 1.0, norm_std=False, baseline="neighbors", obs=OBS
    )
    assert [row[-1] for row in rows] == pytest.approx(given[MASK].tolist(), abs=6e-4)


def commands() -> list[str]:
    """Every command in the pages: indented lines and what stands in backticks."""
    found = []
    for page in PAGES:
        text = text_of(page)
        found += re.findall(
            r"^    ((?:python|torchrun|pytest|pip|tensorboard) .*?)(?:  +#.*)?$",
            text,
            flags=re.MULTILINE,
        )
        found += re.findall(r"`((?:python|pip) [^`…]*)`", text)
        found += [
            f"python {row}"
            for row in re.findall(r"^\| `((?:grpo_\w+|ppo)\.py[^`]*)` \|", text, re.MULTILINE)
        ]
    return sorted(set(found))


TRAINING = [
    x for x in commands() if re.match(r"python (grpo_\w+|ppo)\.py(?!.*(--help|<run>|my_module))", x)
]
ELSEWHERE = {  # command: the test that runs it, or why none does
    r"pip install": "what CI begins with",
    r"pytest": "this",
    r"tensorboard": "a server",
    r"torchrun": "test_distributed.py",
    r"python \S+ --help": "test_cli.py",
    r"python \S+ --(evaluate|resume) ": "test_cli.py, test_reliability.py",
    r"python docs/benchmark/learning\.py": "test_benchmark.py",
    r"python docs/benchmark/speed\.py": "test_benchmark.py",
    r"python docs/benchmark/run\.py": "test_benchmark.py",
    r"python docs/benchmark/gait\.py": "test_benchmark.py",
    r"python docs/benchmark/boxes\.py": "test_boxes.py",
    r"python docs/benchmark/defaults\.py": "test_defaults.py",
    r"python docs/benchmark/report\.py": "test_the_report_is_current",
    r"python docs/benchmark/random_policy\.py": "test_benchmark.py",
    r"python docs/figures/draw\.py": "test_the_drawn_pictures_are_current",
    r"python docs/diff\.py": "test_the_diffs_are_current",
    r"python docs/examples/arithmetic\.py": "test_examples.py",
    r"python -X importtime": "performance.md's own measurement",
    r"python grpo_rtg\.py --env-id my_module": "the reader's own environment",
}


def test_every_command_is_run_by_a_test():
    """Or is listed above with the reason why it is not."""
    others = [
        x
        for x in commands()
        if x not in TRAINING and not any(re.match(start, x) for start in ELSEWHERE)
    ]
    assert others == [] and len(TRAINING) > 10


IN_README = [command for command in TRAINING if command in text_of(ROOT / "README.md")]
REST = [pytest.param(x, marks=pytest.mark.slow) for x in TRAINING if x not in IN_README]


@pytest.mark.parametrize("command", IN_README + REST)
def test_training_commands_run(command, tmp_path):
    """With their own flags, on a budget of one iteration or a few, of short episodes."""
    _, script, *flags = shlex.split(command)
    env_id = flags[flags.index("--env-id") + 1] if "--env-id" in flags else "CartPole-v1"
    try:
        gym.make(env_id).close()
    except gym.error.DependencyNotInstalled as error:
        pytest.skip(str(error))
    values = {name: int(value) for name, value in pairwise(flags) if value.isdigit()}
    episodes = values.get("--num-groups", 2) * values.get("--group-size", 32)
    steps = (
        values.get("--num-envs", 16) * values.get("--num-steps", 256)
        if script == "ppo.py"
        else 30 * episodes
    )
    budget = [
        "--total-timesteps",
        2 * steps,
        "--max-episode-steps",
        30,
        "--eval-episodes",
        1,
        "--update-epochs",
        1,
    ]
    status = child.run(script.removesuffix(".py"), *flags, *budget, folder=tmp_path)
    assert status == 0, (tmp_path / "err.txt").read_text()


def written(command: list) -> list[tuple[str, str]]:
    """The pages and pictures before and after a command that writes some of them."""
    paths = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    paths += sorted((DOCS / "figures").glob("*.svg"))
    before = [path.read_text() for path in paths]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return list(zip(before, [path.read_text() for path in paths]))


@pytest.mark.slow
def test_the_report_is_current():
    """The tables and figures of the study are what report.py makes of the CSVs."""
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    assert all(before == after for before, after in written([DOCS / "benchmark" / "report.py"]))


NUMBER = r"(-?\d+(?:\.\d+)?)"
INTERVAL = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]")
APART = {  # measured by learning.py: the grid world with few and many groups, two variants
    *("0.54 [0.20, 0.67]", "0.67 [0.63, 0.69]", "0.66 [0.24, 0.70]", "0.66 [0.63, 0.70]"),
    *("0.65 [0.41, 0.71]", "0.55 [-0.61, 0.67]", "-1.47 [-1.91, -0.56]", "-0.54 [-1.07, -0.13]"),
    *(
        "239 [210, 244]",
        "208 [152, 232]",
    ),  # PPO on LunarLander without entropy bonus, by learning.py
    *(
        "1132 [962, 1491]",
        "4149 [2736, 4677]",
    ),  # PPO on HalfCheetah with RL-Zoo's settings, by learning.py
    "-76.8 [-87.3, -72.6]",  # neighbors on Acrobot with 4 groups of 4, by learning.py
}


def test_intervals_in_the_text_are_those_of_the_tables():
    page = "".join(text_of(DOCS / f"{name}.md") for name in ("results", "ablations", "protocol"))
    table = r"<!-- table .*?<!-- end -->"
    cells = INTERVAL.findall("".join(re.findall(table, page, re.DOTALL)))
    measured = np.array(cells, float)
    text = re.sub(r"<!-- (learning )?table.*?<!-- end -->", "", page, flags=re.DOTALL)
    said = [match for match in INTERVAL.finditer(text) if match[0] not in APART]
    for interval in said:
        digits = [len(number.partition(".")[2]) for number in interval.groups()]
        half = [0.501 / 10**n for n in digits]  # of the last digit
        distance = np.abs(measured - np.array(interval.groups(), float))
        assert (distance <= half).all(1).any(), interval[0]
    assert len(said) > 50 and all(interval in page for interval in APART)


@pytest.mark.slow
def test_the_drawn_pictures_are_current():
    pytest.importorskip("matplotlib")
    pytest.importorskip("Box2D")
    assert all(before == after for before, after in written([DOCS / "figures" / "draw.py"]))

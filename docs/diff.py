"""Write docs/diff.md, how the scripts differ, and the lines that the pages' links lead to.

python docs/diff.py
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# The diff is the algorithm

Written by `python docs/diff.py`; a test keeps it current, and another sees to it that nothing else
differs. What does differ between two GRPO scripts is the docstring, the options and defaults of the
variant with their bounds, `compute_advantages` with its helpers, and the lines that call these.
"""


def unified(one: str, other: str) -> str:
    texts = [(ROOT / name).read_text().splitlines() for name in (one, other)]
    return "\n".join(difflib.unified_diff(*texts, one, other, n=0, lineterm=""))


def definitions(name: str) -> dict[str, str]:
    """The source of each function and class of a script, by name."""
    text = (ROOT / name).read_text()
    nodes = [node for node in ast.parse(text).body if hasattr(node, "name")]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def page() -> str:
    parts = [HEAD]
    for other in ("grpo_process.py", "grpo_rtg.py"):
        difference = unified("grpo_outcome.py", other)
        parts.append(f"## diff grpo_outcome.py {other}\n\n```diff\n{difference}\n```\n")
    ours, ppo = definitions("grpo_rtg.py"), definitions("ppo.py")
    same = [name for name in ours if ours[name] == ppo.get(name)]
    both = [name for name in ours if name in ppo and name not in same]
    rows = {
        "word for word the same": same,
        "in both, with differences": both,
        "only in grpo_rtg.py": [name for name in ours if name not in ppo],
        "only in ppo.py": [name for name in ppo if name not in ours],
    }
    table = "\n".join(
        f"| {title} | {', '.join(f'`{name}`' for name in names)} |" for title, names in rows.items()
    )
    parts.append(f"## grpo_rtg.py and ppo.py\n\n| | functions and classes |\n|-|-|\n{table}\n")
    return "\n".join(parts)


def with_lines(text: str) -> str:
    """A page whose links [`function`](script.py#L1) lead to the line that defines it."""

    def lead(link: re.Match) -> str:
        code = (ROOT / link["script"]).read_text()
        [node] = [x for x in ast.parse(code).body if getattr(x, "name", "") == link["name"]]
        return f"[`{link['name']}`]({link['path']}#L{node.lineno})"

    link = r"\[`(?P<name>\w+)`\]\((?P<path>(?:\.\./)?(?P<script>\w+\.py))#L\d+\)"
    return re.sub(link, lead, text)


if __name__ == "__main__":
    (ROOT / "docs" / "diff.md").write_text(page())
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        path.write_text(with_lines(path.read_text()))

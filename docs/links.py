"""Let the links of README and docs/*.md lead to the line of the function that they name.

python docs/links.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_lines(text: str) -> str:
    """A page whose links [`function`](script.py#L1) lead to the line that defines it."""

    def lead(link: re.Match) -> str:
        code = (ROOT / link["script"]).read_text()
        [node] = [x for x in ast.parse(code).body if getattr(x, "name", "") == link["name"]]
        return f"[`{link['name']}`]({link['path']}#L{node.lineno})"

    link = r"\[`(?P<name>\w+)`\]\((?P<path>(?:\.\./)?(?P<script>\w+\.py))#L\d+\)"
    return re.sub(link, lead, text)


if __name__ == "__main__":
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        path.write_text(with_lines(path.read_text()))

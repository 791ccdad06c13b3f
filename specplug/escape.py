"""Texts of models, of data sets and of command lines are data: how they go into Markdown, into a page and onto a terminal."""

import html
import json
import re
import unicodedata
from typing import Any

# Line and paragraph separators, control characters, halves of characters; and what turns the direction of what follows.
_SPACE = re.compile(r"[\s\u2028\u2029\x85]+")
_TURNING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    """With a replacement character for each one that is none to look at, but for those in `keep`."""
    return "".join(
        "�" if (unicodedata.category(c) in ("Cc", "Cs") or c in _TURNING) and c not in keep else c for c in text
    )


def one_line(text: object, longest: int | None = None) -> str:
    """For a label, a table's cell or a terminal: without line breaks, cut with … if too long."""
    line = printable(_SPACE.sub(" ", str(text)).strip())
    return line if longest is None or len(line) <= longest else line[: longest - 1] + "…"


def in_html(text: object) -> str:
    """For the content of an element or a quoted attribute."""
    return html.escape(printable(str(text), keep="\n\t"), quote=True)


def in_markdown(text: object) -> str:
    """For one line of Markdown, a table's cell among them: shown as it is, with no markup, link or mention in it."""
    escaped = html.escape(one_line(text), quote=False)
    escaped = re.sub(r"([\\`*|\[\]~$])", r"\\\1", escaped)
    escaped = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", escaped)  # inside a word an underscore is no markup
    for special, entity in (("://", "&#58;//"), ("www.", "www&#46;"), ("@", "&#64;")):
        escaped = escaped.replace(special, entity)
    return escaped


def markdown_table(rows: list[list[str]]) -> list[str]:
    """The lines of a table, header first."""
    header, *body = [[in_markdown(cell) for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *body]]


def code_block(text: str) -> str:
    """A fenced block of Markdown, the fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text, keep=chr(10))}\n{fence}"


def in_script(value: Any) -> str:
    """JSON that cannot end the <script> element it stands in."""
    found = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return found.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")

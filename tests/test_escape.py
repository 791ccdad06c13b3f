"""Texts of others in Markdown, in scripts and on a terminal: read back by a parser, they are the texts that went in."""

import html
import json
import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from specplug.escape import code_block, in_html, in_markdown, in_script, one_line, printable

HOSTILE = [
    "<b>bold</b> <img src=x onerror=alert(1)> <!-- --> &lt; &amp;",
    "a | b || c \\| d",
    "`code` ``more`` ``` ~~~ ~~struck~~",
    "*a* **b** _c_ __d__ snake_case_name a_ _b",
    "[a](javascript:alert(1)) ![b](x.png) [c]: d <http://x.y>",
    "http://example.invalid www.example.invalid @everyone $\\frac{1}{2}$",
    "one\ntwo\r\nthree\u2028four\u2029five\ttab\x0b\x0c",
    "\x00\x1b[31mred\x07 \ud800 \u202edrawkcab",
    "# no heading",
    "- no list\n\n1. nor this",
    "\\",
    "ends in backslash\\",
    "zażółć 漢字 🪁 \u200dé",
]


class Elements(HTMLParser):
    """Names of elements, and the text in each cell."""

    def __init__(self, text):
        super().__init__()
        self.names, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def rendered(text: str) -> Elements:
    """As forges render it: HTML let through, tables, links recognised."""
    return Elements(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_of_markdown_is_one_cell_with_that_text(text):
    table = f"| a | b |\n| --- | --- |\n| {in_markdown(text)} | 1 |\n"
    found = rendered(table)
    assert set(found.names) <= {"table", "thead", "tbody", "tr", "th", "td"}
    assert [" ".join(cell.split()) for cell in found.cells] == ["a", "b", one_line(text), "1"]
    for linked in ("://", r"www\.", "@", r"(?<!\\)\$"):  # what forges make something of
        assert not re.search(linked, in_markdown(text))


def test_without_it_the_cell_is_broken():
    for text in HOSTILE[:3]:
        found = rendered(f"| a | b |\n| --- | --- |\n| {text} | 1 |\n")
        names = set(found.names) - {"table", "thead", "tbody", "tr", "th", "td"}
        assert names or found.cells != ["a", "b", one_line(text), "1"]


def test_names_with_underscores_stay_readable():
    assert in_markdown("math_reasoning") == "math_reasoning"


@pytest.mark.parametrize("text", [*HOSTILE, "````", "a\n```\nb", "~~~\n`````text\n"])
def test_a_code_block_holds_all_of_it(text):
    tokens = MarkdownIt("commonmark").parse(f"before\n\n{code_block(text)}\n\nafter")
    fences = [token.content for token in tokens if token.type == "fence"]
    assert fences == [printable(text, keep="\n") + "\n"]
    assert [token.content for token in tokens if token.type == "inline"] == ["before", "after"]


@pytest.mark.parametrize("text", [*HOSTILE, "</script><script>", "]]>", "<!--<script>"])
def test_json_in_a_script_cannot_end_it(text):
    written = in_script({"a": [text, {text: 1}]})
    assert not set(written) & set("<>&\u2028\u2029") and written.isascii()
    assert json.loads(written) == {"a": [text, {text: 1}]}


def test_a_number_that_json_does_not_have_is_an_error():
    with pytest.raises(ValueError):
        in_script({"a": float("nan")})


@pytest.mark.parametrize("text", HOSTILE)
def test_html(text):
    found = Elements(f"<td title='{in_html(text)}' alt=\"{in_html(text)}\">{in_html(text)}</td>")
    assert found.names == ["td"] and found.cells == [printable(text, keep="\n\t")]
    assert html.unescape(in_html(text)) == printable(text, keep="\n\t")


def test_one_line():
    assert one_line("a\n\n b\u2028c") == "a b c" and one_line("\x1b[31m") == "�[31m"
    assert one_line("abcdef", 4) == "abc…" and one_line("abcd", 4) == "abcd"

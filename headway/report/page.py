"""One HTML page that holds everything it shows: no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2330; --soft: #667085; --line: #e4e7ec;
  --one: #1f6feb; --two: #d9480f; --three: #2b8a3e; --four: #9c36b5; --good: #2b8a3e; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171d; --ink: #e6e9ef; --soft: #98a2b3; --line: #2c323d;
  --one: #6ea8fe; --two: #ff9f6b; --three: #69db7c; --four: #da77f2; --good: #69db7c; --bad: #ff8787; } }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; }
p { max-width: 46rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .4rem 1.2rem .4rem 0; vertical-align: middle;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 600; font-size: .85rem; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem; } .row > figure { margin: 0; flex: 1 1 26rem; max-width: 40rem; }
.maps { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.chart { width: 100%; height: auto; } .grid { stroke: var(--line); }
.tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--ink); font-size: 13px; font-weight: 600; }
.bar { display: inline-block; width: 9rem; height: .7rem; background: var(--line); border-radius: .35rem;
  overflow: hidden; }
.bar span { display: block; height: 100%; background: var(--one); }
.good { color: var(--good); } .bad { color: var(--bad); }
code { font: .9em ui-monospace, monospace; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def svg_file(svg: str) -> str:
    """A chart as a file by itself, which follows the light or dark theme of whoever shows it."""
    style = f"<style>{STYLE}svg {{ background: var(--paper); font-family: system-ui, sans-serif; }}</style>"
    head, _, rest = svg.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of HTML cells; the columns `numbers` are set to the right."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{cell}</td>' if column in numbers else f"<td>{cell}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"

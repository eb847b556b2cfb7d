"""Parts of pages that are one HTML file, without network or libraries: the report's and a load's.

They fit phones and dark mode. A mark of a picture with `data-t` tells that text when it is pointed
at, tapped or reached by keyboard, and is a row of the table below the picture.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

Legend = Iterable[tuple[str, str]]


def document(title: str, body: str, style: str = "") -> str:
    """Return a page with what is inside its `main` element; `style` adds to the common one."""
    assets = files("serve.obs") / "assets"
    common = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{common}{style}</style>\n<main>\n{body}\n</main>\n"
        f'<div id="tip" role="status" hidden></div>\n<script>\n{script}</script>\n</html>\n'
    )


def figure(
    title: str,
    caption: str,
    picture: str,
    legend: Legend = (),
    empty: str = "Nothing to show yet.",
    wide: bool = False,
) -> str:
    """Return a picture or a table with heading and legend; `empty` is said in place of none."""
    keys = "".join(f'<li class="key {cls}">{escape(name)}</li>' for name, cls in legend)
    shown = f'<ul class="legend">{keys}</ul>' if keys and picture else ""
    hint = '<p class="hint">Scroll sideways to see all of it.</p>'
    numbers = "<details><summary>In numbers</summary><div></div></details>"
    inside = f'<p class="empty">{empty}</p>'
    if picture:
        drawn = numbers if ' data-t="' in picture else ""
        inside = f'<div class="scroll" data-name="{title}">{picture}</div>{hint}{drawn}'
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h2>{title}</h2>'
        f"{f'<p>{caption}</p>' if caption else ''}</figcaption>{shown}{inside}</figure>\n"
    )


def table(
    title: str,
    caption: str,
    rows: Sequence[Sequence[str]],
    head: str,
    kinds: str,
    empty: str = "Nothing to show yet.",
    wide: bool = False,
) -> str:
    """Return a table as a figure.

    Args:
        title: Heading.
        caption: Sentence below the heading.
        rows: Cells as HTML.
        head: Names of the columns, separated by slashes.
        kinds: For each column n (number), i (id) or _ (text).
        empty: Sentence in place of a table without rows.
        wide: Take the whole width of the page.
    """
    classes = [{"n": ' class="n"', "i": ' class="id"'}.get(kind, "") for kind in kinds]
    top = "".join(
        f"<th{cls}>{name}</th>" for name, cls in zip(head.split("/"), classes, strict=True)
    )
    names = [name.replace("<br>", ", ") for name in head.split("/")]
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td{c} data-h="{name}"><div>{cell}</div></td>'
            for cell, c, name in zip(row, classes, names, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    inside = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>" if rows else ""
    return figure(title, caption, inside, (), empty, wide)

"""Tables of HTML, as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(
    rows: Iterable[Sequence[str]],
    *,
    head: Sequence[str] = (),
    above: str = "",
    below: str = "",
    align: str = "right",
) -> str:
    """Return a table with paragraphs around it, all of plain text; the first cell of a row names it."""
    lines = ["".join(f"<th>{html.escape(text)}</th>" for text in head)] if head else []
    for name, *cells in rows:
        row = "".join(f'<td style="text-align: {align}">{html.escape(text)}</td>' for text in cells)
        lines.append(f"<th>{html.escape(name)}</th>{row}")
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    before, after = (f"<p>{html.escape(text)}</p>" if text else "" for text in (above, below))
    return f"{before}<table>{table}</table>{after}"

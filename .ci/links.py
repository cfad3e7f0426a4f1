"""The links inside the built manual: `python .ci/links.py doc/_build/html` names pages and places that are not there.

It also names pictures without a text that says what they show. Addresses elsewhere are not looked up.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, the places it has, and its pictures without a description."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.undescribed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, is named and shows."""
        found = {name: value or "" for name, value in attributes}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        self.links |= {found[name] for name in ("href", "src") if name in found}
        is_thumbnail = "_thumb." in found.get("src", "")  # its title follows
        if tag == "img" and not is_thumbnail and len(found.get("alt", "")) < 30:
            self.undescribed.append(f"{found.get('src')}: {found.get('alt')!r}")


def faults(folder: Path) -> list[str]:
    """Return a line per broken link and picture without a description."""
    pages = {
        path: Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts
    }
    lines = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        lines += [f"{name}: no description of {picture}" for picture in page.undescribed]
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                lines.append(f"{name}: no file {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                lines.append(f"{name}: no place {link}")
    return lines


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "doc/_build/html").resolve()
    if not (root / "index.html").exists():
        sys.exit(f"There is no manual in {root}; build it by `make doc`.")
    lines = faults(root)
    print(*lines, f"{len(lines)} faults" if lines else "All links inside the manual lead somewhere.", sep="\n")
    sys.exit(bool(lines))

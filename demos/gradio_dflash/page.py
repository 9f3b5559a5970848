"""One run as one HTML file: the player's script and style, and the lines of the run, with nothing else to load."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from string import Template

STATIC = Path(__file__).resolve().parent / "static"
PLAYER = ("base", "blocks", "figures", "player", "timeline", "writing")  # what the player needs of STATIC

# Within a script element "<" could end it or open a comment; U+2028 and U+2029 are line ends to some readers of JSON,
# and a lone surrogate cannot be written as UTF-8. In JSON all of them stand in strings only, where an escape says the
# same.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def _joined(names: Iterable[str], suffix: str) -> str:
    return "\n".join((STATIC / f"{name}{suffix}").read_text(encoding="utf-8") for name in names)


def _names(suffix: str) -> list[str]:
    """Names of the static files with this suffix, base first and the others in alphabetical order."""
    return sorted((path.stem for path in STATIC.glob(f"*{suffix}")), key=lambda name: (name != "base", name))


@cache
def script() -> str:
    """The script of all panels: base.js, then the others in alphabetical order."""
    return _joined(_names(".js"), ".js")


@cache
def style() -> str:
    """The style of all panels: base.css, then the others in alphabetical order."""
    return _joined(_names(".css"), ".css")


def embed(lines: str) -> str:
    """JSON lines as the text of a script element of type application/json: the same values, and nothing ends it."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", lines)


def page(lines: str, *, title: str) -> str:
    """A document that plays the run of ``lines`` (JSON lines as the player reads them) from a file, without a network.

    ``title`` is plain text. Scripts and styles are inline; the document's own policy forbids to load anything else."""
    names = [name for name in PLAYER if (STATIC / f"{name}.css").exists()]
    return Template((STATIC / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        style=_joined(names, ".css"),
        script=_joined(PLAYER, ".js"),
        lines=embed(lines),
    )

"""Open the web demo: every drafted block with what was accepted and rejected, a race against plain decoding, and what
the conditioning is worth.

The page is served on this machine only unless --host or --share says otherwise. Ctrl-C ends it. A saved trace is shown
without any model, and written as one HTML file with --html.

  dflash demo
  dflash demo --trace trace.jsonl
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash.cli import common

if TYPE_CHECKING:
    from gradio_dflash.studio import Studio

    from dflash.trace import Trace

HELP = "watch blocks being drafted and judged, in a browser"
DEFAULT_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_flags(parser)
    shown = parser.add_argument_group("a saved generation")
    shown.add_argument("--trace", metavar="FILE", help="open this trace, as dflash generate --trace writes it")
    shown.add_argument("--html", metavar="FILE", help="write --trace as one self-contained HTML file, and end")
    served = parser.add_argument_group("where the page is served")
    served.add_argument("--host", default=DEFAULT_HOST, help=f"address to listen at (default: {DEFAULT_HOST})")
    served.add_argument("--port", type=int, help="default: the first free one from 7860")
    served.add_argument("--share", action="store_true", help="also through a public link of Gradio's servers")
    served.add_argument("--auth", metavar="USER:PASSWORD", help="ask visitors for these")
    served.add_argument("--open", action="store_true", help="open it in the browser")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from dflash.errors import UsageError
    from dflash.trace import Trace

    if args.html and not args.trace:
        raise UsageError("--html writes a saved trace as a page; name it with --trace")
    if args.port is not None and not 0 < args.port < 65536:
        raise UsageError(f"--port is {args.port}; it must be between 1 and 65535")
    auth = _auth(args.auth)
    trace = Trace.load(args.trace) if args.trace else None
    if args.html and trace:
        common.check_writable(Path(args.html))
        _write_page(trace, Path(args.html))
        return 0
    _check_gradio()
    studio = _studio(args, eager=trace is None)
    _serve(studio, trace, args, auth)
    return 0


def _auth(text: str | None) -> tuple[str, str] | None:
    from dflash.errors import UsageError

    if text is None:
        return None
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise UsageError("--auth needs a name and a password: USER:PASSWORD")
    return user, password


def _write_page(trace: Trace, path: Any) -> None:
    from gradio_dflash.page import page
    from gradio_dflash.view import page_lines

    path.write_text(page(page_lines(trace), title="A DFlash generation"), encoding="utf-8")
    common.say(f"dflash: wrote {path}")


def _check_gradio() -> None:
    from dflash.errors import BackendError

    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise BackendError(f"the demo needs gradio ({error}); pip install 'dflash-lab[demo]'") from None


def _studio(args: argparse.Namespace, *, eager: bool) -> Studio:
    """The studio with the pair that the flags name; loaded at once where something can be generated with it, so that
    what is wrong with it shows here and the first visitor does not wait."""
    from gradio_dflash.studio import Studio

    from dflash.backends import installed_backends
    from dflash.meter import Meter

    names = ("backend", "device", "dtype", "draft_bits", "thinking")
    models = {name: getattr(args, name) for name in names}
    named = {}
    if args.target or args.draft:
        pair = {"pair": args.target} if args.draft is None else {"target": args.target, "draft": args.draft}
        named = {args.target or args.draft: pair}
    studio = Studio(models, named)
    if eager and installed_backends():
        with Meter() as meter:
            name = studio.pairs()[0]
            meter.stage(f"loading {name}")
            studio.load(name)
    return studio


def _serve(studio: Studio, trace: Trace | None, args: argparse.Namespace, auth: tuple[str, str] | None) -> None:
    from gradio_dflash.app import launch_options, make_app

    from dflash.errors import UsageError

    try:
        make_app(studio, trace).launch(
            server_name=args.host,
            server_port=args.port,
            share=args.share,
            auth=auth,
            inbrowser=args.open,
            **launch_options(),
        )
    except KeyboardInterrupt:  # Ctrl-C before Gradio waits for it
        return
    except OSError:  # Gradio's own sentence is for programmers
        port = args.port or "7860 or one of those behind it"
        raise UsageError(
            f"the page cannot be served at {args.host}, port {port}: it is taken, or the address is not this machine's"
        ) from None

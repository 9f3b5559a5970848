"""What every worker of ``dflash bench --suite end-to-end`` speaks: one JSON object a line in, one out.

The scripts of this folder are started by path, each in an environment of its own, and never imported; this module is
their neighbour there and needs the standard library alone. ``{"do": "load", …}`` comes first and is answered with what
the record should hold of the program (``versions``), and under ``unable`` the arms that it cannot run, with the reason.
``{"do": arm, "prompt": ids, "max_new_tokens": n, "stop": ids}`` is answered with ``tokens`` and ``seconds``. Whatever
goes wrong is answered as ``error``, one sentence; the traceback goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Request = dict[str, Any]
Generate = Callable[[Request], list[int]]


def serve(load: Callable[[Request], tuple[Mapping[str, Generate], dict[str, Any]]]) -> None:
    """Answer until the input ends. ``load`` returns the arms by name and its reply; an arm returns the new tokens and
    is clocked. What libraries print goes to stderr: replies own stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arms: Mapping[str, Generate] = {}
    for line in sys.stdin:
        request: Request = json.loads(line)
        try:
            if request["do"] == "load":
                arms, reply = load(request)
            else:
                begun = time.perf_counter()
                tokens = arms[request["do"]](request)
                reply = {"seconds": time.perf_counter() - begun, "tokens": tokens}
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().splitlines()
            reply = {"error": f"{type(error).__name__}: {said[0] if said else 'no reason given'}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

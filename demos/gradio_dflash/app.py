"""The page: its controls and panels, and which event runs what. What is shown comes from ``gradio_dflash.view``, what
runs from ``gradio_dflash.studio``.

Every event that uses a model shares one place in the queue (``concurrency_id``), so visitors wait for each other and
are told their place. Events are named endpoints too: ``gradio_client`` gets the same lines that the page draws.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from dflash.backends import install_command, installed_backends
from dflash.prompts import MINI, read_prompts
from dflash.trace import Trace
from gradio_dflash import words
from gradio_dflash.endpoints import Endpoints
from gradio_dflash.page import script, style
from gradio_dflash.studio import LONGEST, Request, Studio
from gradio_dflash.view import json_text, page_lines

BLOCK_SIZES = ("auto", "2", "4", "8", "12", "16")
LARGEST_FILE = "64mb"  # of a trace to replay
ONE_HOUR = 3600
_ON_MODEL: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "minimal"}
_HIDDEN: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def launch_options() -> dict[str, Any]:
    """How the page is served, whatever the address: theme, scripts and style, and no call to anyone else's server."""
    font = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    # Style goes into the head as it is: Gradio would put its own container before every selector of ``css``.
    head = f"<style>{style()}</style><script>{script()}DFlash.controls({json_text(words.CONTROLS)});</script>"
    return {
        "theme": gr.themes.Default(primary_hue="blue", font=font, font_mono=mono),
        "head": head,
        "max_file_size": LARGEST_FILE,
        "footer_links": ["api", "settings"],
        "ssr_mode": False,
        "show_error": True,
    }


def make_app(studio: Studio, trace: Trace | None = None) -> gr.Blocks:
    """The page over ``studio``; ``trace`` is open in its Replay tab."""
    does = Endpoints(studio)
    with gr.Blocks(
        title=words.TITLE, analytics_enabled=False, fill_width=True, delete_cache=(ONE_HOUR, ONE_HOUR)
    ) as app:
        gr.HTML(words.INTRODUCTION, apply_default_css=False)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                asked, generate, stop = _controls(studio)
            with gr.Column(scale=3, min_width=340), gr.Tabs(selected="replay" if trace else "watch") as tabs:
                with gr.Tab("Watch", id="watch"):
                    player = _panel("player")
                    files = _files()
                with gr.Tab("Race", id="race"):
                    start, give_up, race = _race()
                with gr.Tab("Conditioning", id="conditioning"):
                    index, look, look_stop, conditioning = _conditioning()
                with gr.Tab("Replay", id="replay"):
                    upload, replayed, replay_page = _replay(trace)

        run = gr.on([generate.click, asked[0].submit], does.generate, asked, player, api_name="generate", **_ON_MODEL)
        gr.on([generate.click, asked[0].submit], _to_watch, None, tabs, **_HIDDEN)
        run.then(does.files, None, [*files, index], **_HIDDEN)
        stopped = stop.click(does.stop, None, player, cancels=run, api_name="stop", queue=False)
        stopped.then(does.files, None, [*files, index], **_HIDDEN)
        racing = start.click(does.race, asked, race, api_name="race", **_ON_MODEL)
        racing.then(does.raced, None, player, **_HIDDEN)
        give_up.click(does.stop_race, None, race, cancels=racing, **_HIDDEN)
        looking = look.click(does.conditioning, index, conditioning, api_name="conditioning", **_ON_MODEL)
        look_stop.click(does.stop_looking, None, conditioning, cancels=looking, **_HIDDEN)
        upload.upload(does.replay, upload, [replayed, replay_page], api_name="replay", show_progress="minimal")
        gr.api(does.models, api_name="models")
        app.unload(does.leave)
    return app


def _to_watch() -> gr.Tabs:
    return gr.Tabs(selected="watch")


def _panel(kind: str, value: str = "", name: str = "") -> gr.HTML:
    """A part of the page that ``DFlash.<kind>`` of ``static/`` draws from its value; ``name`` is its id on the page."""
    return gr.HTML(
        value,
        html_template=f'<div class="dflash {kind}"></div>',
        js_on_load=f"""
            const panel = DFlash.{kind}(element.querySelector(".{kind}"));
            const show = () => panel.update(props.value || "");
            watch("value", show);
            show();
        """,
        apply_default_css=False,
        elem_id=f"dflash-{name or kind}",
    )


def _controls(studio: Studio) -> tuple[list[Any], gr.Button, gr.Button]:
    """What a visitor may set, in the order of ``Endpoints.generate``; and the buttons."""
    standard, backends = Request(""), installed_backends()
    prompt = gr.Textbox(words.FIRST_PROMPT, label="Prompt", lines=4, max_lines=12, elem_id="dflash-prompt")
    with gr.Row():
        generate = gr.Button(
            "Generate", variant="primary", min_width=80, elem_id="dflash-generate", interactive=bool(backends)
        )
        stop = gr.Button("Stop", min_width=80, elem_id="dflash-stop", interactive=bool(backends))
    if not backends:
        gr.Markdown(words.NO_BACKEND.format(install=install_command()))
    examples = gr.Dropdown(_examples(), value=None, label="Examples: math, code, chat", elem_id="dflash-examples")
    examples.input(lambda example: example, examples, prompt, **_HIDDEN)
    with gr.Accordion("Settings", open=False):
        pairs, rules = studio.pairs(), studio.rules()
        pair = gr.Dropdown(pairs, value=pairs[0], label="Model pair", elem_id="dflash-pair")
        backend = gr.Dropdown(["auto", *backends], value="auto", label="Backend", elem_id="dflash-backend")
        block = gr.Dropdown(
            list(BLOCK_SIZES), value="auto", label="Block size", allow_custom_value=True, elem_id="dflash-block"
        )
        rule = gr.Dropdown(["auto", *rules], value="auto", label="Rule", elem_id="dflash-rule")
        temperature = gr.Slider(
            0, 2, standard.temperature, step=0.05, label="Temperature", elem_id="dflash-temperature"
        )
        top_p = gr.Slider(0.05, 1, standard.top_p, step=0.05, label="Top-p", elem_id="dflash-top-p")
        seed = gr.Number(standard.seed, label="Seed", precision=0, minimum=0, elem_id="dflash-seed")
        budget = gr.Slider(
            1, LONGEST, standard.max_new_tokens, step=1, label="Budget of new tokens", elem_id="dflash-budget"
        )
    return [prompt, pair, backend, block, rule, temperature, top_p, seed, budget], generate, stop


def _files() -> list[gr.DownloadButton]:
    with gr.Row():
        trace = gr.DownloadButton("Save the trace", size="sm", interactive=False, elem_id="dflash-trace-file")
        page = gr.DownloadButton("Share as one HTML file", size="sm", interactive=False, elem_id="dflash-page-file")
    return [trace, page]


def _race() -> tuple[gr.Button, gr.Button, gr.HTML]:
    with gr.Row():
        start = gr.Button("Race", variant="primary", elem_id="dflash-race-start")
        stop = gr.Button("Stop", elem_id="dflash-race-stop")
    return start, stop, _panel("race")


def _conditioning() -> tuple[gr.Number, gr.Button, gr.Button, gr.HTML]:
    with gr.Row(elem_classes="dflash-row"):
        index = gr.Number(1, label="Round", precision=0, minimum=1, min_width=120, elem_id="dflash-round")
        look = gr.Button("Look inside", variant="primary", min_width=120, elem_id="dflash-look")
        stop = gr.Button("Stop", min_width=120, elem_id="dflash-look-stop")
    return index, look, stop, _panel("conditioning")


def _replay(trace: Trace | None) -> tuple[gr.File, gr.HTML, gr.DownloadButton]:
    upload = gr.File(
        label="Trace (.jsonl or .jsonl.gz)", file_types=[".jsonl", ".gz"], height=140, elem_id="dflash-upload"
    )
    replayed = _panel("player", page_lines(trace) if trace else "", name="replayed")
    page = gr.DownloadButton("Share as one HTML file", size="sm", interactive=False, elem_id="dflash-replay-page")
    return upload, replayed, page


def _examples() -> list[tuple[str, str]]:
    """Prompts by class, as a label and the whole text."""
    chosen = [each for each in read_prompts(MINI) if isinstance(each.prompt, str)]
    return [(f"{each.domain}: {each.prompt}", str(each.prompt)) for each in chosen]

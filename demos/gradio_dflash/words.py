"""What the page says of itself: its introduction, and a sentence for every control."""

from __future__ import annotations

TITLE = "DFlash: watch a block being drafted, judged and committed"

# Written here, never by a visitor: the one text of the page that is HTML.
INTRODUCTION = f"""<div class="dflash intro">
<h1>{TITLE}</h1>
<p>A language model writes one token per pass, and each pass is slow. Here a small <b>drafter</b> guesses a whole block
of tokens in one pass, and the model itself, the <b>target</b>, checks the block in one pass of its own. Guesses that it
would have written anyway stay; the first one that it would not is replaced by its own token. The text is exactly the
target's, and several tokens come from one of its passes.</p>
<button type="button" class="control theme">Light or dark</button>
</div>"""

FIRST_PROMPT = "Tom has 3 boxes with 4 apples in each box. How many apples does he have?"

# elem_id → a sentence, shown on hover and on focus.
CONTROLS = {
    "dflash-prompt": "What the model is asked: one user message, given through its chat template.",
    "dflash-examples": "Prompts of three kinds: drafters guess code and mathematics better than prose.",
    "dflash-generate": "Decode the prompt with the drafter, and show every round as it comes (Shift+Enter).",
    "dflash-stop": "End at the next round; what was committed until then stays.",
    "dflash-pair": "The target and the drafter made for it; those on this machine are listed.",
    "dflash-backend": "The library that computes: PyTorch or Apple MLX, as far as they are installed.",
    "dflash-block": "Tokens of a block, the anchor included; auto is what the drafter was trained for. A longer block "
    "costs more to verify.",
    "dflash-rule": "How the target judges a draft: greedy accepts its likeliest token, match accepts the token it "
    "draws itself, rejection accepts by chance as often as the target would say it; auto takes greedy at temperature 0 "
    "and match above.",
    "dflash-temperature": "0 always takes the likeliest token; higher values draw more freely.",
    "dflash-top-p": "Draw only from the likeliest tokens that together reach this share; 1 is off.",
    "dflash-seed": "The same seed and settings give the same tokens, drafter or none; empty draws a new seed.",
    "dflash-budget": "At most this many new tokens.",
    "dflash-race-start": "Decode the prompt plainly, then with the drafter, and replay both side by side.",
    "dflash-race-stop": "Give the race up at the next round.",
    "dflash-round": "Which round of the last answer to look into; the number is the one under its bar.",
    "dflash-look": "Draft that round again, with its conditioning and without, and show where every slot looks.",
    "dflash-look-stop": "Look at no more rounds.",
    "dflash-trace-file": "Every event of the answer as JSON lines: the Replay tab and dflash demo --trace open it.",
    "dflash-page-file": "This answer as one HTML file that needs no server, no model and no network.",
    "dflash-upload": "A trace, from dflash generate --trace FILE or from the Watch tab; no model is needed to see it.",
    "dflash-replay-page": "The trace as one HTML file that needs no server, no model and no network.",
}

NO_BACKEND = "No backend is installed, so nothing can be generated here: {install}. The Replay tab works without one."

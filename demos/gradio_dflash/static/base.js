// What every panel shares: making elements, showing tokens, tooltips. No library, no build step; a page loads this file
// before the panels' own. Text from a model is only ever set as text (textContent), never as HTML.
window.DFlash = window.DFlash || {};
(function (DFlash) {
  "use strict";

  // The fates of tokens. Marks say without colour what the colours say.
  DFlash.fates = {
    accepted: { mark: "✓", word: "accepted", why: "The drafter guessed it and the target agreed." },
    rejected: { mark: "✗", word: "rejected", why: "The first guess that the target did not agree with." },
    discarded: { mark: "·", word: "discarded", why: "Guessed behind the end of what the round commits, so thrown away unjudged." },
    correction: { mark: "→", word: "correction", why: "The target's own token, in place of the first rejected guess." },
    bonus: { mark: "★", word: "bonus", why: "All guesses stood, and the same pass of the target gave one token more." },
    plain: { mark: "•", word: "plain", why: "Written by the target without a draft." },
    prompt: { mark: "", word: "prompt", why: "Given, not generated." },
    anchor: { mark: "⚓", word: "anchor", why: "The newest token: committed, and not yet through the target. The block is guessed behind it." },
  };

  // make("button", "step back", "◀", {"aria-label": "one round back"}): an element with classes, text and attributes.
  DFlash.make = function (tag, classes, text, attributes) {
    const element = document.createElement(tag);
    if (classes) element.className = classes;
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return element;
  };

  // The record that a panel is given as JSON: an empty one before there is any, and an error for what cannot be read.
  DFlash.record = function (value, what) {
    try {
      return value ? JSON.parse(value) : { state: "empty" };
    } catch {
      return { state: "error", text: `The record of ${what} could not be read.` };
    }
  };

  // Fills a panel with a few words: before, during and instead of what it shows.
  DFlash.message = function (root, classes, title, lines, attributes) {
    const box = DFlash.make("section", "panel message " + classes, null, attributes);
    box.append(DFlash.make("h3", "", title), ...lines.map((line) => DFlash.make("p", "", line)));
    root.replaceChildren(box);
  };

  // A token on one line, nothing of it invisible.
  DFlash.visible = function (text) {
    return text
      .replace(/ /g, "␣")
      .replace(/\r?\n/g, "⏎")
      .replace(/\t/g, "⇥")
      .replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (char) => "‹" + char.codePointAt(0).toString(16).toUpperCase() + "›");
  };

  DFlash.percent = function (share, digits) {
    if (share === null || share === undefined) return "–";
    const value = 100 * share;
    if (value > 0 && value < 0.1) return "<0.1%";
    return value.toFixed(digits === undefined ? (value < 10 ? 1 : 0) : digits) + "%";
  };

  DFlash.seconds = function (seconds) {
    return seconds < 1 ? (1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0) + " ms" : seconds.toFixed(2) + " s";
  };

  // A token in running text: white space as it is, coloured and marked by its fate. `token` is [text, fate, special].
  DFlash.token = function (token, tip) {
    const [text, fate, special] = token;
    const span = DFlash.make("span", "token " + fate + (special ? " special" : ""), special ? DFlash.visible(text) : text);
    if (!text) span.classList.add("unfinished");
    span.dataset.fate = fate;
    if (tip) span.dataset.tip = tip;
    return span;
  };

  // The legend of the fates named, as a list.
  DFlash.legend = function (fates) {
    const list = DFlash.make("ul", "legend", null, { "aria-label": "what the colours and marks mean" });
    for (const fate of fates) {
      const { mark, word, why } = DFlash.fates[fate];
      const item = DFlash.make("li", "swatch " + fate, null, { tabindex: "0" });
      item.append(DFlash.make("span", "mark", mark), DFlash.make("span", "word", word));
      item.dataset.tip = why;
      list.append(item);
    }
    return list;
  };

  // A bar of parts side by side; `parts` are [class, share of the whole, tooltip].
  DFlash.stack = function (parts, label) {
    const bar = DFlash.make("div", "stack", null, { role: "img", "aria-label": label });
    for (const [classes, share, tip] of parts) {
      const part = DFlash.make("div", "part " + classes);
      part.style.flexGrow = String(Math.max(share, 0));
      if (tip) part.dataset.tip = tip;
      bar.append(part);
    }
    return bar;
  };

  // Tooltips of everything inside `root` that has data-tip: on hover, on keyboard focus and on touch. One bubble serves
  // the whole page, outside of any box that would cut it off.
  DFlash.tips = function (root) {
    if (root.dflashTips) return;
    root.dflashTips = true;
    const explained = (event) => {
      const from = event.target.closest && event.target.closest("[data-tip]");
      return from && root.contains(from) ? from : null;
    };
    root.addEventListener("mouseover", (event) => {
      const from = explained(event);
      if (from === owner) return;
      hide();
      if (from) waiting = setTimeout(place, HOVER_MS, from);
    });
    root.addEventListener("focusin", (event) => {
      const from = explained(event);
      if (from && event.target.matches(":focus-visible")) place(from);
      else hide();
    });
    for (const end of ["mouseleave", "focusout", "pointerdown", "keydown"]) root.addEventListener(end, hide);
  };

  // For panels that replace what they show: hides the bubble where the element it explains is gone.
  DFlash.tidyTips = () => owner && !owner.isConnected && hide();

  const HOVER_MS = 200; // a pointer that only passes by calls no bubble
  let bubble = null, owner = null, waiting = null;
  function hide() {
    clearTimeout(waiting);
    if (bubble) bubble.hidden = true;
    owner = null;
  }
  function place(from) {
    if (!from.isConnected) return;
    clearTimeout(waiting);
    owner = from;
    if (!bubble || !bubble.isConnected) {
      bubble = DFlash.make("div", "dflash-tip", null, { role: "tooltip", id: "dflash-tip" });
      document.body.append(bubble);
    }
    bubble.textContent = from.dataset.tip;
    bubble.hidden = false;
    const box = from.getBoundingClientRect();
    const width = bubble.offsetWidth, height = bubble.offsetHeight;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), window.innerWidth - width - 8);
    const above = box.top - height - 8;
    bubble.style.left = Math.max(8, left) + "px";
    bubble.style.top = (above > 8 ? above : box.bottom + 8) + "px";
    from.setAttribute("aria-describedby", "dflash-tip");
  }

  // Whether the reader asked for less motion.
  DFlash.still = () => window.matchMedia && window.matchMedia("(prefers-reduced-motion: reduce)").matches;
})(window.DFlash);

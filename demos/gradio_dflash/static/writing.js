// The running text of a run, and the line that says what runs. Text is only ever appended, in batches; every token carries
// its fate, and leads back to its round.
(function (DFlash) {
  "use strict";
  const { make, percent, fates } = DFlash;
  const BATCH = 1200; // tokens a frame
  const LONG = 1500; // tokens from which what is out of sight is not laid out
  const REST = 4000; // ms that a reader's own scrolling is left alone

  // `pick(place)` is called with the place in the steps of a token that was chosen.
  DFlash.writing = function (root, pick) {
    const head = make("div", "written-head");
    head.append(make("h3", "", "The text"), DFlash.legend(["accepted", "correction", "bonus", "plain"]));
    const prompt = make("div", "prompt");
    const given = make("p", "given live");
    const more = make("button", "more", "show all of the prompt", { type: "button", "aria-expanded": "false" });
    prompt.append(make("span", "tag", "prompt"), given, more);
    const box = make("div", "live text", null, { role: "group", tabindex: "-1", "aria-label": "Generated text. Arrow keys go from token to token, Enter shows the round of a token." });
    const foot = make("p", "hint foot", "Click a token to see the round it came from. The frame marks the round shown above; what comes after it is paler.");
    root.append(head, prompt, box, foot);

    let tokens = [], spans = [], stretch = null, shown = -1, active = 0, pinned = true, movedAt = -Infinity, source = null, ended = false;

    function reset() {
      [tokens, spans, stretch, shown, active, pinned, ended] = [[], [], null, -1, 0, true, false];
      box.replaceChildren();
    }

    function update(state) {
      const text = state.head ? state.head.prompt || "" : "";
      if (text !== source) {
        source = text;
        given.textContent = text;
        prompt.hidden = !text;
        prompt.classList.remove("open");
        more.hidden = given.scrollHeight <= given.clientHeight + 2;
      }
      ended = Boolean(state.end || state.error);
      box.hidden = foot.hidden = !state.steps.length;
      append(state);
    }

    function append(state) {
      const { steps } = state;
      let left = BATCH;
      const before = spans.length;
      while (spans.length < steps.length && left > 0) {
        left -= steps[spans.length].tokens.length + 1;
        write(steps[spans.length], spans.length);
      }
      if (spans.length === before) return;
      for (let k = before; k < spans.length; k++) mark(k);
      if (spans.length < steps.length) requestAnimationFrame(() => spans.length && (append(state), settle()));
    }

    // Keeps the end in view while text comes. Measures, so it comes after everything else has been written.
    function settle() {
      box.classList.toggle("long", tokens.length > LONG);
      if (pinned && !ended) box.scrollTop = box.scrollHeight;
    }

    // A step's tokens. A stretch of text that ends with a line break is closed, so that later text leaves its lines alone.
    function write(step, place) {
      if (!stretch) {
        stretch = make("div", "stretch", null, { dir: "auto" });
        box.append(stretch);
      }
      const turns = step.tokens.some(([part]) => /[\u202a-\u202e\u2066-\u2069]/.test(part));
      const span = make("span", turns ? "step isolated" : "step");
      span.dataset.place = String(place);
      step.tokens.forEach((token, k) => {
        const element = DFlash.token(token, describe(step, token, k));
        if (!tokens.length) element.tabIndex = 0;
        element.dataset.number = String(tokens.length);
        tokens.push(element);
        span.append(element);
      });
      spans.push(span);
      stretch.append(span);
      const last = step.tokens[step.tokens.length - 1];
      if (last && !last[2] && last[0].endsWith("\n")) close();
    }

    function close() {
      stretch.classList.add("closed");
      stretch = null;
    }

    function mark(place) {
      spans[place].classList.toggle("ahead", shown >= 0 && place > shown);
      spans[place].classList.toggle("shown", place === shown);
    }

    // Marks the round shown; `settled` where no more text comes, so that the box may follow the round instead of the end.
    function select(place, settled) {
      const [from, to] = shown < 0 ? [0, Infinity] : [Math.min(shown, place), Math.max(shown, place)];
      shown = place;
      for (let k = from; k <= Math.min(to, spans.length - 1); k++) mark(k);
      const span = spans[place];
      if (!settled || !span || performance.now() - movedAt < REST || box.scrollHeight <= box.clientHeight) return;
      const [inner, outer] = [span.getBoundingClientRect(), box.getBoundingClientRect()];
      if (inner.top < outer.top + 8) box.scrollTop -= outer.top + 40 - inner.top;
      else if (inner.bottom > outer.bottom - 8) box.scrollTop += inner.bottom - outer.bottom + 60;
    }

    const tokenOf = (event) => event.target.closest && event.target.closest(".token");

    function focus(number) {
      const next = tokens[Math.max(0, Math.min(number, tokens.length - 1))];
      if (!next) return;
      if (tokens[active]) tokens[active].removeAttribute("tabindex");
      next.tabIndex = 0;
      active = Number(next.dataset.number);
      next.focus();
    }

    function choose(token) {
      movedAt = performance.now();
      pick(Number(token.parentElement.dataset.place));
    }

    box.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (!token || String(window.getSelection())) return; // selecting text is not choosing a token
      focus(Number(token.dataset.number));
      choose(token);
    });
    box.addEventListener("keydown", (event) => {
      const token = tokenOf(event);
      if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
      const number = Number(token.dataset.number);
      if (event.key === "ArrowRight" || event.key === "ArrowDown") focus(number + 1);
      else if (event.key === "ArrowLeft" || event.key === "ArrowUp") focus(number - 1);
      else if (event.key === "Home") focus(0);
      else if (event.key === "End") focus(tokens.length - 1);
      else if (event.key === "Enter" || event.key === " ") choose(token);
      else return;
      event.preventDefault();
    });
    box.addEventListener("scroll", () => (pinned = box.scrollTop + box.clientHeight >= box.scrollHeight - 24), { passive: true });
    for (const name of ["wheel", "touchmove", "pointerdown"]) box.addEventListener(name, () => (movedAt = performance.now()), { passive: true });
    more.addEventListener("click", () => {
      const open = prompt.classList.toggle("open");
      more.setAttribute("aria-expanded", String(open));
      more.textContent = open ? "show less of the prompt" : "show all of the prompt";
    });
    return { update, select, settle, reset };
  };

  function describe(step, [text, fate], k) {
    const name = DFlash.stepName(step);
    const half = text ? "" : "\nNo text of its own: it is a part of the next character.";
    if (fate === "accepted") {
      const [, , drafter, target] = step.slots[k] || [];
      return `accepted draft token, ${name}, slot ${k + 1} · drafter ${percent(drafter)} · target ${percent(target)}${half}`;
    }
    const place = fate === "correction" ? `, in place of slot ${k + 1}` : "";
    return `${fate} token, ${name}${place}\n${fates[fate].why}${half}`;
  }

  const FIRST = ["target", "drafter", "backend", "rule"]; // settings that the line itself shows

  // What runs, how far it is, how it ended. Only the words for that are announced, not the counts.
  DFlash.statusLine = function () {
    const element = make("section", "status", null, { "aria-label": "what runs" });
    const line = make("div", "line");
    const word = make("span", "word", "", { role: "status", "aria-live": "polite" });
    const counts = make("span", "counts");
    line.append(make("span", "dot", null, { "aria-hidden": "true" }), word, counts);
    const details = make("details", "settings");
    const summary = make("summary", "", "");
    const list = make("dl", "");
    details.append(summary, list);
    const notes = make("ul", "notes", null, { "aria-label": "notes" });
    const error = make("p", "error", "", { role: "alert" });
    element.append(line, details, error, notes);
    let settings = null, end = null;

    const write = (where, text) => where.textContent !== text && (where.textContent = text);

    function update(state) {
      const kind = state.error ? "failed" : state.end ? (state.end.finish === "cancelled" ? "cancelled" : "ended") : "running";
      element.dataset.kind = kind;
      const ending = { failed: "The run failed.", cancelled: "The run was cancelled.", ended: "The run has ended." }[kind];
      write(word, (state.end && !state.error && state.end.text) || ending || (state.steps.length ? "generating" : state.status || "starting"));
      const tokens = state.steps.reduce((sum, step) => sum + step.tokens.length, 0);
      const rounds = state.steps.reduce((sum, step) => sum + (step.kind === "round"), 0);
      write(counts, tokens ? `${DFlash.tokens(tokens)} · ${rounds.toLocaleString("en")} ${rounds === 1 ? "round" : "rounds"}` : "");
      write(error, state.error);
      error.hidden = !state.error;
      if (!state.head) details.hidden = true;
      else if (state.head.settings !== settings) {
        settings = state.head.settings;
        details.hidden = !(settings && settings.length);
        describeSettings();
      }
      if (state.end === end && notes.dataset.unread === String(state.unread)) return;
      end = state.end;
      notes.dataset.unread = String(state.unread);
      const texts = [...((end && end.notes) || [])];
      if (state.unread) texts.push(`Left out, as they could not be read: ${state.unread} ${state.unread === 1 ? "line" : "lines"} of this trace.`);
      notes.replaceChildren(...texts.map((text) => make("li", "", text)));
      notes.hidden = !texts.length;
    }

    function describeSettings() {
      const found = new Map(settings || []);
      summary.replaceChildren();
      for (const name of FIRST) {
        if (!found.has(name)) continue;
        const pair = make("span", "pair");
        pair.append(make("span", "name", name + " "), make("b", "", found.get(name)));
        summary.append(pair);
      }
      summary.append(make("span", "all-settings", "all settings"));
      list.replaceChildren();
      for (const [name, value] of settings || []) {
        const row = make("div", "");
        row.append(make("dt", "", name), make("dd", "", String(value)));
        list.append(row);
      }
    }
    return { element, update };
  };
})(window.DFlash);

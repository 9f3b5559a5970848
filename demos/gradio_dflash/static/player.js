// The player of one run: reads its lines, and shows block view, running text, timeline and figures. The run goes ahead at
// full speed underneath, while the block view plays it at a pace the eye can follow.
(function (DFlash) {
  "use strict";
  const { make } = DFlash;

  const nothing = () => ({ read: "", head: null, status: "", steps: [], figures: null, end: null, error: "", unread: 0 });

  // What a page shows, derived from the lines of its run and nothing else. `before` is the state of an earlier part of
  // the same text, and saves reading that part again; a text that does not continue it starts over.
  DFlash.trace = function (text, before) {
    const state = before && text.startsWith(before.read) ? before : nothing();
    let from = state.read.length;
    while (from < text.length) {
      let to = text.indexOf("\n", from);
      const complete = to >= 0;
      if (!complete) to = text.length;
      const line = text.slice(from, to).trim();
      const taken = take(state, line);
      if (!taken && !complete) break; // the rest of a last line may still come
      if (!taken) state.unread += 1;
      from = complete ? to + 1 : to;
    }
    state.read = text.slice(0, from);
    return state;
  };

  // Whether the line could be read.
  function take(state, line) {
    if (!line) return true;
    let event = null;
    try {
      event = JSON.parse(line);
    } catch {
      return false;
    }
    if (event.type === "head") state.head = event;
    else if (event.type === "status") state.status = event.text;
    else if (event.type === "step") state.steps.push(event);
    else if (event.type === "figures") state.figures = event.values;
    else if (event.type === "end") state.end = event;
    else if (event.type === "error") state.error = event.text;
    return true;
  }

  const SPEEDS = [0.5, 1, 2, 4];
  const LIVE = 150; // ms from one newest round to the next
  const PACE_STILL = 2600; // ms a step where no motion is wanted and only finished rounds are shown

  DFlash.player = function (root) {
    DFlash.tips(root);
    const empty = emptyState();
    const status = DFlash.statusLine();
    const stage = make("section", "panel stage", null, { "aria-label": "the block, round by round", tabindex: "-1" });
    const bar = transport();
    const waiting = make("p", "hint waiting");
    const written = make("section", "panel written");
    const text = DFlash.writing(written, (place) => stop(place));
    const rounds = make("section", "panel");
    rounds.append(make("h3", "", "Every round"), make("p", "hint", "One bar a round: how many tokens it committed, and below it how long it took (a broken bar took longer than fits). Click a bar to see its block."));
    const numbers = make("section", "panel figures");
    numbers.append(make("h3", "", "Figures"));
    const all = make("div", "all");
    stage.append(bar.element, waiting);
    const blocks = DFlash.blocks(stage);
    const timeline = DFlash.timeline(rounds, (place) => stop(place));
    const figures = DFlash.figures(numbers);
    all.append(status.element, stage, written, rounds, numbers);
    root.append(empty, all);

    let state = nothing();
    let place = -1, moment = 0, moments = []; // what the block view shows
    let playing = false, live = false, speed = 1, timer = 0, queued = false, fresh = true, enteredAt = 0, waited = 0;

    const over = () => Boolean(state.end || state.error);
    const newest = () => state.steps.length - 1;

    function update(value) {
      const next = DFlash.trace(value, state);
      if (next !== state) restart(next);
      if (!queued) {
        queued = true;
        requestAnimationFrame(paint);
      }
    }

    function restart(next) {
      state = next;
      clearTimeout(timer);
      [place, moment, moments, playing, live, fresh, timer] = [-1, 0, [], false, false, true, 0];
      text.reset();
    }

    // The first steps are here: play them from the beginning, unless motion is not wanted and all is there already.
    function begin() {
      fresh = false;
      playing = !(DFlash.still() && over());
      enter(0, playing ? 0 : Infinity);
    }

    function paint() {
      queued = false;
      const blockSize = state.head && state.head.block_size;
      empty.hidden = Boolean(state.head || state.status || state.steps.length || over());
      all.hidden = !empty.hidden;
      const started = state.steps.length > 0;
      written.hidden = !started && (!state.head || Boolean(state.error));
      rounds.hidden = numbers.hidden = blocks.body.hidden = bar.element.hidden = !started;
      waiting.hidden = started;
      waiting.textContent = over() ? "There is no round to show." : "The target is reading the prompt. The first block appears as soon as it is drafted.";
      stage.hidden = !started && Boolean(state.error);
      status.update(state);
      text.update(state);
      if (started) {
        if (fresh) begin();
        if (live) follow();
        timeline.grow(state.steps, blockSize);
        figures.update(state.figures, state.head && state.head.help, blockSize);
        if (playing && !timer) advance();
      }
      controls();
      if (started) blocks.settle();
      text.settle();
    }

    // The newest round, no oftener than an eye can take in.
    function follow() {
      if (place >= newest()) return;
      const rest = enteredAt + LIVE - performance.now();
      if (rest <= 0) enter(newest(), Infinity);
      else if (!waited) waited = setTimeout(() => ((waited = 0), live && follow()), rest);
    }

    // Shows a step from one of its moments on; Infinity is the last one, where all is decided.
    function enter(next, at) {
      place = Math.max(0, Math.min(next, newest()));
      const step = state.steps[place];
      moments = DFlash.moments(step);
      enteredAt = performance.now();
      blocks.load(step, state.head && state.head.block_size);
      timeline.select(place);
      text.select(place, over());
      show(DFlash.still() ? Infinity : at);
      controls();
      blocks.settle();
    }

    function show(at) {
      moment = Math.min(at, moments.length - 1);
      blocks.show(moments[moment]);
      clearTimeout(timer);
      timer = 0;
      if (playing) timer = setTimeout(advance, (DFlash.still() ? PACE_STILL : moments[moment][2]) / speed);
    }

    function advance() {
      timer = 0;
      if (!playing || !root.isConnected) return;
      if (moment < moments.length - 1) show(moment + 1);
      else if (place < newest()) enter(place + 1, 0);
      else if (over()) {
        playing = false;
        controls();
      } // otherwise the next lines will call again
    }

    function stop(next) {
      if (!state.steps.length) return;
      playing = live = false;
      enter(next, Infinity);
    }

    function toggle() {
      if (!state.steps.length) return;
      playing = !playing;
      live = false;
      if (!playing) clearTimeout(timer), (timer = 0);
      else if (place >= newest() && moment >= moments.length - 1 && over()) enter(0, 0);
      else advance();
      controls();
    }

    function controls() {
      if (!state.steps.length) return;
      const last = newest(), step = state.steps[Math.max(place, 0)];
      const name = DFlash.stepName(step), total = state.steps[last].index;
      bar.title.textContent = name[0].toUpperCase() + name.slice(1);
      bar.of.textContent = total ? `of ${total.toLocaleString("en")}${over() ? "" : " so far"}` : "";
      const held = bar.element.contains(document.activeElement) && document.activeElement;
      bar.first.disabled = bar.back.disabled = place <= 0;
      bar.last.disabled = bar.next.disabled = place >= last;
      // A button that is disabled in the hand that pressed it would take the arrow keys with it.
      if (held && (held.disabled || document.activeElement !== held)) stage.focus({ preventScroll: true });
      bar.play.setAttribute("aria-label", playing ? "pause" : "play");
      bar.play.classList.toggle("playing", playing);
      bar.scrub.max = String(last);
      bar.scrub.value = String(place);
      bar.scrub.setAttribute("aria-valuetext", `${name} of ${total}`);
      bar.live.disabled = over();
      bar.live.setAttribute("aria-pressed", String(live));
      for (const [button, value] of bar.speeds) button.setAttribute("aria-pressed", String(value === speed));
    }

    bar.first.addEventListener("click", () => stop(0));
    bar.back.addEventListener("click", () => stop(place - 1));
    bar.play.addEventListener("click", toggle);
    bar.next.addEventListener("click", () => stop(place + 1));
    bar.last.addEventListener("click", () => stop(newest()));
    bar.scrub.addEventListener("input", () => stop(Number(bar.scrub.value)));
    bar.live.addEventListener("click", () => {
      const on = !live;
      stop(newest());
      live = on;
      controls();
    });
    for (const [button, value] of bar.speeds) {
      button.addEventListener("click", () => {
        speed = value;
        if (playing && timer) show(moment);
        controls();
      });
    }
    root.addEventListener("keydown", (event) => {
      const { target, key } = event;
      const typing = target.matches("textarea, select, input:not([type=range]), [contenteditable=true]");
      if (typing || event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      if (key === " " && !target.matches("button, summary, a")) toggle();
      else if (key === "ArrowLeft") stop(place - 1);
      else if (key === "ArrowRight") stop(place + 1);
      else return;
      event.preventDefault();
    });

    all.hidden = true;
    return { update };
  };

  function emptyState() {
    const box = make("section", "panel empty");
    box.append(make("h3", "", "Here a run will play, round by round"));
    const list = make("ol", "");
    list.append(
      make("li", "", "A small model, the drafter, guesses a whole block of tokens in one pass."),
      make("li", "", "The large model, the target, checks all the guesses in one pass of its own: those that it agrees with stand, up to the first that it does not."),
      make("li", "", "The target adds one token of its own, so each round commits at least one token, and the text is what the target alone would have written."),
    );
    box.append(list, make("p", "hint", "Start a prompt, or load a saved trace."));
    return box;
  }

  // Icons as paths in a box of 16 × 16.
  const ICONS = {
    first: "M2 3h2v10H2zM13 3v10L5 8z", back: "M12 3v10L4 8z", play: "M4 2.5v11L13.5 8z", pause: "M4 3h3v10H4zM9 3h3v10H9z",
    next: "M4 3v10l8-5z", last: "M3 3v10l8-5zM12 3h2v10h-2z",
  };

  function icon(name) {
    const space = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
    for (const [key, value] of [["viewBox", "0 0 16 16"], ["class", "icon " + name], ["aria-hidden", "true"]]) picture.setAttribute(key, value);
    path.setAttribute("d", ICONS[name]);
    picture.append(path);
    return picture;
  }

  function transport() {
    const element = make("div", "transport", null, { role: "group", "aria-label": "controls of the block view" });
    const head = make("div", "where");
    const title = make("h3", ""), of = make("span", "hint");
    head.append(title, of);
    const control = (name, label, tip) => {
      const button = make("button", "control " + name, null, { type: "button", "aria-label": label, "data-tip": tip || label });
      button.append(icon(name));
      return button;
    };
    const first = control("first", "to the first step"), back = control("back", "one step back", "one step back (←)"), play = control("play", "play", "play or pause (space)");
    const next = control("next", "one step forward", "one step forward (→)"), last = control("last", "to the newest step");
    play.append(icon("pause"));
    const keys = make("div", "keypad");
    keys.append(first, back, play, next, last);
    const scrub = make("input", "scrub", null, { type: "range", min: "0", max: "0", step: "1", value: "0", "aria-label": "step shown" });
    const pace = make("div", "speeds", null, { role: "group", "aria-label": "speed of the block view" });
    const speeds = SPEEDS.map((value) => {
      const button = make("button", "control", (value === 0.5 ? "½" : value) + "×", { type: "button", "aria-label": `${value} times the speed` });
      pace.append(button);
      return [button, value];
    });
    const live = make("button", "control live-button", "Live", { type: "button", "aria-pressed": "false", "data-tip": "follow the newest round as it comes" });
    element.append(head, keys, scrub, pace, live);
    return { element, title, of, first, back, play, next, last, scrub, speeds, live };
  }
})(window.DFlash);

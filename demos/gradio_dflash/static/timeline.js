// The round timeline: a bar a step, its committed tokens above the axis and its time below. A run can have thousands of
// steps, so only the bars in view have elements.
(function (DFlash) {
  "use strict";
  const { make, seconds } = DFlash;
  const [NEAR, FAR] = [18, 34]; // px from bar to bar: near where there are many, farther apart where there is room
  const TALL = 96; // px for the tokens of a full block
  const DEEP = 44; // px for the longest ordinary time
  const PHASES = ["draft", "verify", "overhead"];

  // `pick(place)` is called with the place in `steps` of a bar that was clicked.
  DFlash.timeline = function (root, pick) {
    root.classList.add("timeline");
    DFlash.tips(root);
    const legend = make("ul", "keys", null, { "aria-label": "what the bars show" });
    const KEYS = [["up accepted", "accepted", "Committed tokens that the drafter had guessed."], ["up correction", "correction", DFlash.fates.correction.why],
      ["up bonus", "bonus", DFlash.fates.bonus.why], ["up plain", "plain", DFlash.fates.plain.why], ["up drafted", "drafted", "The outline is as tall as the draft was long."],
      ["part draft", "draft time", "The drafter's pass."], ["part verify", "verify time", "The target's pass."], ["part overhead", "overhead", "Everything around the two passes."]];
    for (const [swatch, word, tip] of KEYS) {
      const item = make("li", "", null, { "data-tip": tip });
      item.append(make("i", swatch), word);
      legend.append(item);
    }
    const box = make("div", "timeline-box");
    const axis = make("div", "axis", null, { "aria-hidden": "true" });
    const scroller = make("div", "scroller", null, { tabindex: "0", role: "group" });
    const track = make("div", "track");
    scroller.append(track);
    box.append(axis, scroller);
    root.append(legend, box);

    const bars = new Map(); // place in steps → element
    // What the scroller measures is kept here, as asking it would lay the page out anew.
    let steps = [], current = -1, top = 0, longest = 0, pitch = FAR, width = 600, scrolled = 0, sweptAt = -Infinity, queued = false, turned = false;

    // Takes in steps that were added; a list that is shorter than before starts over.
    function grow(all, blockSize) {
      if (all !== steps || all.length < bars.size) reset(all);
      spread();
      scale(blockSize);
      label();
      later();
    }

    function spread() {
      const room = Math.floor((width - 6) / Math.max(1, steps.length));
      pitch = Math.max(NEAR, Math.min(FAR, room));
      track.style.setProperty("--pitch", pitch + "px");
      track.style.width = steps.length * pitch + 6 + "px";
    }

    function reset(all) {
      steps = all;
      current = -1;
      longest = top = 0;
      bars.clear();
      track.replaceChildren();
      scroller.scrollLeft = scrolled = 0;
    }

    // Heights follow two variables of the track, so that a new scale needs no new bars. The prefill and the slowest steps
    // would flatten the rest: the scale is that of the 95th percentile, and what is beyond is cut off and says so.
    function scale(blockSize) {
      const high = Math.max(blockSize || 0, top, ...steps.slice(-64).map((step) => Math.max(step.tokens.length, step.slots.length)), 1);
      const times = steps.filter((step) => step.kind !== "prefill").map(spent).sort((a, b) => a - b);
      const long = times.length ? 1.15 * times[Math.floor(0.95 * (times.length - 1))] : steps.length ? spent(steps[0]) : 0;
      if (high === top && Math.abs(long - longest) < 0.05 * longest) return;
      [top, longest] = [high, long];
      for (const [place, bar] of bars) bar.classList.toggle("longer", spent(steps[place]) > 1.02 * longest);
      track.style.setProperty("--unit", TALL / top + "px");
      track.style.setProperty("--second", longest ? DEEP / longest + "px" : "0px");
      const ticks = [...new Set([0, Math.round(top / 2), top])];
      axis.replaceChildren(...ticks.map((count) => {
        const tick = make("span", "tick", String(count));
        tick.style.bottom = `${DEEP + 22 + (TALL * count) / top}px`;
        return tick;
      }), make("span", "title", "tokens"), make("span", "title below", "time"), make("span", "tick below", longest ? seconds(longest) : ""));
    }

    function label() {
      const rounds = steps.filter((step) => step.kind === "round");
      const tokens = rounds.reduce((sum, step) => sum + step.tokens.length, 0);
      const mean = rounds.length ? `${(tokens / rounds.length).toFixed(2)} tokens a round on average` : "no round yet";
      scroller.setAttribute("aria-label", `Timeline of ${rounds.length} rounds, ${mean}. Arrow keys step through them.`);
    }

    function later() {
      if (queued) return;
      queued = true;
      requestAnimationFrame(() => {
        queued = false;
        draw();
        if (turned) scroller.scrollLeft = scrolled;
        turned = false;
      });
    }

    function draw() {
      const first = Math.max(0, Math.floor(scrolled / pitch) - 4);
      const last = Math.min(steps.length - 1, Math.ceil((scrolled + width) / pitch) + 4);
      for (const [place, bar] of bars) {
        if (place >= first && place <= last) continue;
        bar.remove();
        bars.delete(place);
      }
      const added = document.createDocumentFragment();
      for (let place = first; place <= last; place++) {
        if (bars.has(place)) continue;
        const bar = build(steps[place], place);
        bar.classList.toggle("current", place === current);
        bars.set(place, bar);
        added.append(bar);
      }
      if (added.childElementCount) track.append(added);
    }

    function build(step, place) {
      const bar = make("div", "bar " + step.kind);
      bar.style.setProperty("--place", String(place));
      bar.dataset.place = String(place);
      bar.dataset.tip = describe(step);
      const up = make("div", "up");
      up.style.setProperty("--n", String(step.slots.length));
      for (const [count, fate] of DFlash.sum(step)) {
        const part = make("i", "up " + fate);
        part.style.setProperty("--n", String(count));
        up.append(part);
      }
      const down = make("div", "down");
      for (const phase of PHASES) {
        const part = make("i", "part " + phase);
        part.style.setProperty("--t", String(step[phase] || 0));
        down.append(part);
      }
      if (spent(step) > 1.02 * longest) bar.classList.add("longer");
      bar.append(up, make("span", "index", step.index % 5 === 0 ? String(step.index) : ""), down);
      return bar;
    }

    // Marks the step shown, and brings it into view unless the reader has just scrolled the timeline.
    function select(place) {
      if (bars.has(current)) bars.get(current).classList.remove("current");
      current = place;
      if (bars.has(current)) bars.get(current).classList.add("current");
      const left = place * pitch;
      const out = left < scrolled + pitch || left + 2 * pitch > scrolled + width;
      if (out && performance.now() - sweptAt > 4000) {
        const wanted = left < scrolled + pitch ? left - width / 2 : left - width / 3;
        scrolled = Math.max(0, Math.min(wanted, steps.length * pitch + 6 - width));
        turned = true;
        later();
      }
    }

    scroller.addEventListener("scroll", () => !turned && ((scrolled = scroller.scrollLeft), later()), { passive: true });
    for (const name of ["wheel", "touchmove", "pointerdown"]) scroller.addEventListener(name, () => (sweptAt = performance.now()), { passive: true });
    scroller.addEventListener("click", (event) => {
      const bar = event.target.closest(".bar");
      if (bar) pick(Number(bar.dataset.place));
    });
    if (window.ResizeObserver) new ResizeObserver(() => ((width = scroller.clientWidth || width), spread(), later())).observe(scroller);
    return { grow, select };
  };

  const spent = (step) => (step.draft || 0) + (step.verify || 0) + (step.overhead || 0);

  function describe(step) {
    const name = DFlash.stepName(step);
    const parts = DFlash.sum(step).map(([count, fate]) => `${count} ${fate}`).join(" + ") || "nothing";
    const drafted = step.slots.length ? `${DFlash.tokens(step.slots.length)} drafted\n` : "";
    const joined = step.kind === "round" && !step.draft && step.verify > 0;
    const times = joined ? `draft and verify ${seconds(step.verify)}` : (step.slots.length ? `draft ${seconds(step.draft)}\n` : "") + `verify ${seconds(step.verify)}`;
    return `${name}\n${drafted}${parts} = ${DFlash.tokens(step.tokens.length)}\n${times}\noverhead ${seconds(step.overhead)}\ntogether ${seconds(spent(step))}`;
  }
})(window.DFlash);

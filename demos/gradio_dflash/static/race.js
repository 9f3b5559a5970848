// The race: one prompt decoded plainly and by DFlash, one after the other, replayed side by side on one clock.
// DFlash.race(root) returns {update(json)}; the value is one JSON object as a string, or "" before there is any.
(function (DFlash) {
  "use strict";
  const make = DFlash.make;
  const SPEEDS = [0.25, 0.5, 1, 2, 4];
  const WORDS = { 0.25: "¼", 0.5: "½" };
  const CHUNK = 100; // tokens in a block of text before the next line break ends it
  const LATE = 20, AIM = 15; // seconds: a race longer than LATE starts at the speed that shows it in about AIM

  const times = (speed) => (WORDS[speed] || String(speed)) + "×";
  const clockText = (seconds) => seconds.toFixed(seconds < 100 ? 2 : 1) + " s";
  const arms = [["plain", "Plain decoding"], ["dflash", "DFlash"]];

  // Sets text only where it changes, so that a frame in which nothing new happened costs no layout.
  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function startSpeed(total) {
    if (total <= LATE) return 1;
    const wanted = total / AIM;
    const round = [2, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 1000];
    return round.reduce((best, one) => (Math.abs(Math.log(one / wanted)) < Math.abs(Math.log(best / wanted)) ? one : best));
  }

  // The place where the two texts part, or -1. Found in the texts, so it does not depend on how places are counted.
  function parting(lanes) {
    const [one, two] = lanes.map((arm) => arm.steps.flatMap(([, tokens]) => tokens));
    for (let place = 0; place < Math.max(one.length, two.length); place++) {
      if (!one[place] || !two[place] || one[place][0] !== two[place][0]) return place;
    }
    return -1;
  }

  // One lane. at(t) shows the state t seconds after the request began, forwards or backwards, at the cost of the
  // difference to the last state only.
  function lane(arm, differs) {
    const tokens = [], stamps = [];
    for (const [time, list] of arm.steps) for (const token of list) tokens.push(token), stamps.push(time);
    const end = arm.seconds, first = stamps.length ? stamps[0] : end;

    const element = make("section", "panel lane " + (arm.name === "plain" ? "by-plain" : "by-dflash"), null, { "aria-label": arm.label });
    const head = make("div", "head");
    const state = make("span", "state", "ready");
    head.append(make("h3", "", arm.label), state);

    const numbers = make("div", "numbers");
    const number = (name, unit, tip) => {
      const box = make("div", "number " + name, null, { tabindex: "0" }), value = make("span", "value", "–");
      box.append(value, make("span", "unit", unit));
      box.dataset.tip = tip;
      numbers.append(box);
      return value;
    };
    const clock = number("clock", "since the request", "Seconds since the request began. Both lanes run on this one clock.");
    const count = number("count", tokens.length === 1 ? "of 1 token" : "of " + tokens.length + " tokens", "Tokens written so far, of all that this lane wrote.");
    const rate = number("rate", "tok/s so far", "Tokens written so far ÷ seconds since the request began, the wait for the first token included.");

    const bar = make("div", "progress", null, { role: "progressbar", "aria-label": arm.label + ": share of its tokens", "aria-valuemin": "0", "aria-valuemax": "100" });
    const fill = make("div", "fill");
    bar.append(fill);

    // The box is laid out bottom up (column-reverse), so that it stays at its newest line without any scripted scrolling.
    const box = make("div", "text mono", null, { tabindex: "0", role: "region", "aria-label": arm.label + ": the text so far" });
    const text = make("div", "live");
    box.append(text);
    element.append(head, numbers, bar, box);

    const spans = []; // of the tokens ever shown; made once, taken out and put back when the clock goes back and forth
    let shown = 0, chunks = [];

    function span(place) {
      if (!spans[place]) {
        const fate = DFlash.fates[tokens[place][1]] || DFlash.fates.plain;
        let tip = "token " + (place + 1) + ", " + fate.word + ", after " + DFlash.seconds(stamps[place]) + "\n" + fate.why;
        if (place === differs) tip += "\nHere the two lanes differ for the first time.";
        spans[place] = DFlash.token(tokens[place], tip);
        if (place === differs) spans[place].classList.add("differs");
      }
      return spans[place];
    }

    // Text grows in blocks that end at line breaks: the browser then lays out the last block again, not the whole text.
    function grow(target) {
      for (; shown < target; shown++) {
        const last = chunks[chunks.length - 1], before = tokens[shown - 1];
        if (!last || (shown - last.from >= CHUNK && !before[2] && before[0].endsWith("\n"))) {
          chunks.push({ from: shown, element: make("div", "chunk") });
          text.append(chunks[chunks.length - 1].element);
        }
        chunks[chunks.length - 1].element.append(span(shown));
      }
    }
    function shrink(target) {
      while (chunks.length && chunks[chunks.length - 1].from >= target) chunks.pop().element.remove();
      if (chunks.length) {
        const { from, element: last } = chunks[chunks.length - 1];
        while (last.childNodes.length > target - from) last.lastChild.remove();
      }
      shown = target;
    }

    // How many tokens stand at second t: near the number shown while playing, far from it after a jump.
    function standing(t) {
      if (t >= end) return tokens.length;
      let low = 0, high = tokens.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (stamps[middle] <= t) low = middle + 1;
        else high = middle;
      }
      return low;
    }

    function at(t, running) {
      const target = standing(t), done = t >= end, now = Math.min(t, end);
      if (target < shown) shrink(target);
      else grow(target);
      const share = tokens.length ? shown / tokens.length : done ? 1 : 0;
      fill.style.transform = "scaleX(" + share.toFixed(4) + ")";
      const percent = String(Math.round(100 * share));
      if (bar.getAttribute("aria-valuenow") !== percent) bar.setAttribute("aria-valuenow", percent);
      write(clock, clockText(now));
      write(count, String(shown));
      write(rate, shown && now > 0 ? (shown / now).toFixed(1) : "–");
      write(state, done ? "finished after " + clockText(end) : t <= 0 && !running ? "ready" : now < first ? "reads the prompt" : "writes");
      element.classList.toggle("done", done);
      element.classList.toggle("writing", !done && t > 0);
      element.classList.toggle("silent", done && !tokens.length);
    }
    return { element, at, end, arm };
  }

  // ---- the figures under the lanes ----

  function result(data, tip) {
    const element = make("section", "panel result", null, { "aria-label": "result of the race", "aria-live": "polite" });
    const cards = make("div", "cards");

    const card = (name, key, words, fallback) => {
      const box = make("div", "card " + name);
      const title = make("div", "title", words, { tabindex: "0" });
      title.dataset.tip = tip(key, fallback);
      box.append(title);
      cards.append(box);
      return box;
    };

    const speed = card("speed", "speedup", "speedup", "Time of plain decoding ÷ time of DFlash, from the request to the last token.");
    const known = typeof data.speedup === "number";
    const even = known && Math.abs(data.speedup - 1) < 0.005;
    const big = make("div", "big", known ? data.speedup.toFixed(2) + " ×" : "–");
    big.append(make("span", "small", !known ? " not measured" : even ? " equally fast" : data.speedup > 1 ? " as fast" : ": slower"));
    speed.classList.add(!known || even ? "is-even" : data.speedup > 1 ? "is-good" : "is-bad");
    speed.append(big, pace(data.arms));

    const same = card("same", "identical", "identical tokens", "Whether both arms wrote the same tokens in the same order.");
    const yes = data.identical === true, no = data.identical === false;
    same.classList.add(yes ? "is-good" : no ? "is-bad" : "is-even");
    const answer = make("div", "big", yes ? "✓ yes" : no ? "✗ no" : "–");
    if (!yes && !no) answer.append(make("span", "small", " not compared"));
    if (no && typeof data.first_difference === "number") answer.append(make("span", "small", " first difference at token " + data.first_difference));
    same.append(answer, make("p", "hint", data.verdict || ""));

    const drafted = data.arms.find((arm) => typeof arm.tau === "number");
    const both = drafted && typeof data.break_even === "number";
    const need = card("need " + (!both ? "is-even" : drafted.tau >= data.break_even ? "is-good" : "is-bad"), "break_even", "τ beside its break-even", "τ is the mean number of tokens a round commits. At its break-even a round costs as much time as plain decoding of the same tokens.");
    need.append(...balance(drafted ? drafted.tau : null, data.break_even, tip));

    element.append(make("h3", "", "Result"), cards);
    if (data.reading) element.append(make("p", "reading", data.reading));
    return element;
  }

  // The two times as bars of one scale.
  function pace(list) {
    const box = make("div", "pace"), longest = Math.max(...list.map((arm) => arm.seconds), 1e-9);
    for (const arm of list) {
      const row = make("div", "row " + (arm.name === "plain" ? "by-plain" : "by-dflash"), null, { tabindex: "0" });
      const track = make("div", "track"), fill = make("div", "fill");
      fill.style.width = (100 * arm.seconds) / longest + "%";
      track.append(fill);
      row.append(make("span", "who", arm.label), track, make("span", "value", clockText(arm.seconds)));
      row.dataset.tip = arm.label + ": " + arm.tokens + (arm.tokens === 1 ? " token" : " tokens") + " in " + clockText(arm.seconds) +
        (typeof arm.ttft === "number" ? ", the first after " + DFlash.seconds(arm.ttft) : "");
      box.append(row);
    }
    return box;
  }

  // τ as a bar, its break-even as a line across it.
  function balance(tau, even, tip) {
    const big = make("div", "big", tau === null ? "–" : tau.toFixed(2));
    if (typeof even !== "number" || tau === null) {
      big.append(make("span", "small", tau === null ? " no rounds" : " tokens a round"));
      return [big, make("p", "hint", typeof even === "number" ? "Break-even at " + even.toFixed(2) + "." : "The break-even is not known.")];
    }
    const above = tau >= even, top = 1.15 * Math.max(tau, even);
    big.append(make("span", "small", (above ? " is above " : " is below ") + even.toFixed(2)));
    const gauge = make("div", "gauge " + (above ? "above" : "below"), null, { tabindex: "0", role: "img", "aria-label": "τ " + tau.toFixed(2) + ", break-even " + even.toFixed(2) });
    const fill = make("div", "fill"), line = make("div", "line"), label = make("div", "label", "break-even " + even.toFixed(2));
    fill.style.width = (100 * tau) / top + "%";
    line.style.left = (100 * even) / top + "%";
    // The label hangs on the side of the line where there is room for it.
    label.style[even > top / 2 ? "right" : "left"] = (even > top / 2 ? 100 - (100 * even) / top : (100 * even) / top) + "%";
    gauge.append(fill, line, label);
    gauge.dataset.tip = tip("tau", "τ, mean acceptance length: committed tokens ÷ rounds, the correction or bonus included");
    const words = above ? "A round brought more tokens than plain decoding writes in the same time." : "A round brought fewer tokens than plain decoding writes in the same time.";
    return [big, gauge, make("p", "hint", words)];
  }

  // ---- the replay: both lanes, one clock ----

  function replay(root, data) {
    const tip = (key, fallback) => (data.help && data.help[key] ? data.help[key].join(": ") : fallback);
    const differs = data.identical === false && data.arms.length === 2 ? parting(data.arms) : -1;
    const lanes = data.arms.map((arm) => lane(arm, differs));
    const total = Math.max(...lanes.map((one) => one.end), 0.001), first = startSpeed(total);
    let t = 0, speed = first, playing = false, last = 0, handle = 0, watcher = null;

    const top = make("section", "panel course", null, { "aria-label": "the replay" });
    const intro = make("p", "hint", "The same prompt, decoded twice, one after the other. The replay puts both on one clock, so their lengths of time keep their true relation.");
    const used = ["plain", "accepted", "correction", "bonus"].filter((fate) => data.arms.some((arm) => arm.steps.some(([, list]) => list.some((token) => token[1] === fate))));
    const controls = make("div", "controls");
    const button = (classes, text, label, act) => {
      const one = make("button", "control " + classes, text, { type: "button", "aria-label": label });
      one.addEventListener("click", act);
      one.dataset.tip = label;
      return one;
    };
    const play = button("play", "", "play", () => (playing ? pause() : start()));
    delete play.dataset.tip; // its word says it
    const restart = button("", "↺", "restart from the beginning", () => (seek(0), start()));
    const finish = button("", "⇥", "to the end", () => (pause(), seek(total)));

    const slider = make("input", "scrubber", null, { type: "range", min: "0", max: String(total), step: "any", "aria-label": "time in the race" });
    slider.addEventListener("input", () => (pause(), seek(Number(slider.value), true)));
    const rail = make("div", "rail");
    rail.append(slider);
    for (const one of lanes) {
      const mark = make("span", "end " + (one.arm.name === "plain" ? "by-plain" : "by-dflash"));
      mark.style.setProperty("--at", String(one.end / total));
      mark.dataset.tip = one.arm.label + " finished after " + clockText(one.end);
      rail.append(mark);
    }
    const when = make("span", "when");

    const speeds = make("div", "speeds", null, { role: "group", "aria-label": "speed of the replay" });
    const choices = (SPEEDS.includes(first) ? SPEEDS : [...SPEEDS, first]).map((value) => {
      const one = button("", times(value), value === 1 ? "real time" : times(value) + " real time", () => choose(value));
      one.speed = value;
      return one;
    });
    speeds.append(...choices);
    const note = make("p", "hint note", null, { role: "status" });
    controls.append(play, restart, finish, rail, when, speeds); // on a phone the style sheet puts the rail below
    top.append(make("h3", "", "Plain decoding against DFlash"), intro, controls, note, DFlash.legend(used));

    const track = make("div", "lanes");
    track.append(...lanes.map((one) => one.element));
    const outcome = result(data, tip);
    outcome.hidden = true;
    root.replaceChildren(top, track, outcome);

    function choose(value) {
      speed = value;
      for (const one of choices) one.setAttribute("aria-pressed", String(one.speed === value));
      const shown = value === 1 ? "Shown in real time." : "Shown at " + times(value) + " speed" + (value < 1 ? ", slow motion." : ".");
      const why = value === first && first > 1 ? " In real time the slower lane took " + clockText(total) + "." : value === 1 && total < 3 ? " It is soon over: choose ¼× for slow motion." : "";
      write(note, shown + why);
    }
    function buttons() {
      write(play, playing ? "❚❚ Pause" : t >= total ? "▶\ufe0e Again" : "▶\ufe0e Play");
      play.setAttribute("aria-label", playing ? "pause" : t >= total ? "play again from the beginning" : "play");
      finish.disabled = t >= total;
    }
    function seek(to, dragged) {
      t = Math.min(Math.max(to, 0), total);
      for (const one of lanes) one.at(t, playing);
      if (!dragged) slider.value = String(t);
      const words = clockText(t) + " of " + clockText(total);
      slider.setAttribute("aria-valuetext", words);
      write(when, words);
      if (t >= total) outcome.hidden = false; // it stays: whoever has seen the end may look back with it in view
      if (!playing) buttons();
    }
    function frame(now) {
      handle = 0;
      if (!playing || !root.isConnected) return;
      // A page in the background gets no frames: go on from there instead of jumping.
      const to = t + (Math.min(now - last, 250) / 1000) * speed;
      last = now;
      if (to >= total) playing = false;
      seek(to);
      if (playing) handle = requestAnimationFrame(frame);
    }
    function start() {
      if (playing) return;
      forget();
      if (t >= total) seek(0);
      playing = true;
      last = performance.now();
      handle = requestAnimationFrame(frame);
      buttons();
    }
    function pause() {
      forget();
      playing = false;
      if (handle) cancelAnimationFrame(handle);
      handle = 0;
      buttons();
    }
    function forget() {
      if (watcher) watcher.disconnect();
      watcher = null;
    }

    choose(first);
    seek(DFlash.still() ? total : 0);
    // The race starts by itself, but not before it can be seen (it may stand in a closed tab or further down).
    if (!DFlash.still() && window.IntersectionObserver) {
      watcher = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && start(), { threshold: 0.2 });
      watcher.observe(track);
    } else if (!DFlash.still()) start();
    return { stop: pause };
  }

  // ---- before, during and instead of a race ----

  function empty(root) {
    DFlash.message(root, "", "A race, not yet run", [
      "The race answers the same prompt twice, once by plain decoding, one token for each pass of the target, and once by DFlash, and replays both side by side at their true relative speed, to show how much time was won and whether the tokens are the same.",
      "The two run one after the other and not at once, because on a shared machine they would slow each other and neither time would be true.",
    ]);
  }

  function running(root) {
    const box = make("section", "panel message is-running"), list = make("ol", "stages"), text = make("p", "now", "", { role: "status" });
    const stages = [...arms, ["replay", "Replay side by side"]].map(([name, label]) => {
      const item = make("li", "stage", label);
      list.append(item);
      return [name, item];
    });
    box.append(make("h3", "", "The race is being run"), list, text, make("p", "hint", "One after the other, so that neither slows the other; the replay begins when both are done."));
    root.replaceChildren(box);
    return (arm, words) => {
      const place = stages.findIndex(([name]) => name === arm);
      stages.forEach(([, item], index) => {
        item.classList.toggle("past", index < place);
        item.classList.toggle("current", index === place);
        if (index === place) item.setAttribute("aria-current", "step");
        else item.removeAttribute("aria-current");
      });
      write(text, words || "");
    };
  }

  DFlash.race = function (root) {
    root.classList.add("dflash", "race");
    DFlash.tips(root);
    let before = null, current = null, progress = null;

    function update(value) {
      if (value === before) return;
      before = value;
      const data = DFlash.record(value, "the race");
      if (data.state === "running" && progress) return progress(data.arm, data.text);
      if (current) current.stop();
      current = progress = null;
      if (data.state === "running") (progress = running(root))(data.arm, data.text);
      else if (data.state === "done") current = replay(root, data);
      else if (data.state === "error") DFlash.message(root, "is-error", "The race did not finish", [data.text], { role: "alert" });
      else empty(root);
    }
    update("");
    return { update };
  };
})(window.DFlash);

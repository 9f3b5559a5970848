// The block view: one step of a run as cells, shown moment by moment. Only the step in view has elements.
(function (DFlash) {
  "use strict";
  const { make, percent, seconds, visible, fates } = DFlash;

  // The moments of a step, each [name, cells judged so far, milliseconds at speed 1]. A draft is one pass, so all
  // guesses appear at once; the target judges them in one pass too, and the sweep only lets the eye follow.
  DFlash.moments = function (step) {
    if (step.kind !== "round") return [["verify", 0, 700], ["done", 0, 1300]];
    const judged = step.slots.filter(([, fate]) => fate === "accepted" || fate === "rejected").length;
    const pace = Math.min(120, 1200 / Math.max(judged, 1));
    const sweep = Array.from({ length: judged }, (_, k) => ["verify", k + 1, pace]);
    return [["masks", 0, 650], ["guesses", 0, 950], ["verify", 0, 300], ...sweep, ["settled", judged, 750], ["done", judged, 1700]];
  };

  // "Prefill", "Round 7", "Plain step 7": the name of a step. Its index counts steps from the prefill, which is 0.
  DFlash.stepName = function (step) {
    return step.kind === "prefill" ? "prefill" : (step.kind === "plain" ? "plain step " : "round ") + step.index;
  };

  // How the committed tokens of a step add up: [[count, fate], …].
  DFlash.sum = function (step) {
    const counts = new Map();
    for (const [, fate] of step.tokens) counts.set(fate, (counts.get(fate) || 0) + 1);
    return ["accepted", "correction", "bonus", "plain"].filter((fate) => counts.has(fate)).map((fate) => [counts.get(fate), fate]);
  };

  const whole = new Intl.NumberFormat("en"); // one for all: making one takes longer than anything else here
  DFlash.tokens = (count) => whole.format(count) + (count === 1 ? " token" : " tokens");

  const ACTS = [["draft", "Draft"], ["verify", "Verify"], ["commit", "Commit"]];
  const CAPTIONS = {
    round: ["one pass of the small model fills every slot", "one pass of the target checks all of them", "what stood, and one token of the target's own"],
    cut: ["one pass of the small model fills every slot", "one pass of the target checks all of them", "what stood, up to the end of the output"],
    prefill: ["not yet: nothing is written", "one pass of the target reads the prompt", "the first token, the target's own"],
    plain: ["none in this step", "one pass of the target, with nothing to check", "one token, the target's own"],
  };
  const ACT_OF = { masks: "draft", guesses: "draft", verify: "verify", settled: "verify", done: "commit" };
  const NONE = "◌"; // a token without text of its own, such as the first half of a character

  DFlash.blocks = function (root) {
    const body = make("div", "blocks");
    const acts = make("ol", "acts", null, { "aria-label": "the three acts of a round" });
    const grid = make("ol", "cells");
    const say = make("p", "say hint");
    const result = make("div", "result");
    const sum = make("p", "sum");
    const story = make("p", "story");
    const words = make("div", "words");
    result.append(sum, story);
    words.append(say, result);
    body.append(acts, grid, words);
    root.append(body);

    const actOf = new Map();
    ACTS.forEach(([name, title], number) => {
      const act = make("li", "act " + name);
      const head = make("span", "head");
      head.append(make("span", "number", String(number + 1)), make("span", "title", title), make("span", "time mono"));
      act.append(head, make("span", "caption"));
      acts.append(act);
      actOf.set(name, act);
    });

    let step = null, cells = [], seats = 0, width = 0, tall = 0;

    // Columns so that the rows come out equally long, and cells no narrower than their figures need.
    function arrange() {
      if (!width || !seats) return;
      const tight = width < 480 && seats > 10;
      body.classList.toggle("tight", tight);
      const least = tight ? 80 : 94;
      const rows = Math.ceil(seats / Math.max(1, Math.floor((width + 6) / least)));
      const columns = `repeat(${Math.ceil(seats / rows)}, minmax(0, ${rows > 1 ? "1fr" : "136px"}))`;
      if (grid.style.gridTemplateColumns !== columns) grid.style.gridTemplateColumns = columns;
    }

    // The panel keeps its tallest height, so that what stands below it does not jump from round to round. Measures, so it
    // comes after everything else has been written.
    function settle() {
      const height = body.offsetHeight;
      if (height > tall) body.style.minHeight = (tall = height) + "px";
    }

    if (window.ResizeObserver) {
      new ResizeObserver(() => {
        if (body.clientWidth === width) return;
        [width, tall] = [body.clientWidth, 0];
        body.style.minHeight = "0";
        arrange();
        settle();
      }).observe(body);
    }

    // Shows `next` from its first moment on. `blockSize` keeps a place for every cell of a block, used or not.
    function load(next, blockSize) {
      step = next;
      const round = step.kind === "round";
      cells = round ? roundCells(step) : singleCells(step);
      grid.replaceChildren(...cells.map((cell) => cell.element));
      grid.setAttribute("aria-label", DFlash.stepName(step) + " as cells");
      seats = round ? Math.max((blockSize || 0) + 1, cells.length) : cells.length;
      body.classList.toggle("single", !round);
      times(step);
      sum.replaceChildren(...sumParts(step));
      story.textContent = step.story || "";
      DFlash.tidyTips();
      arrange();
    }

    function times({ kind, next, draft, verify, overhead }) {
      const write = (name, text, tip) => {
        actOf.get(name).querySelector(".time").textContent = text;
        actOf.get(name).dataset.tip = tip;
      };
      const joined = kind === "round" && !draft && verify > 0;
      ACTS.forEach(([name], k) => (actOf.get(name).querySelector(".caption").textContent = CAPTIONS[kind === "round" && !next ? "cut" : kind][k]));
      actOf.get("draft").classList.toggle("unused", kind !== "round");
      if (kind !== "round") write("draft", "", "No draft in this step: the target writes one token by itself.");
      else if (joined) write("draft", "", "The drafter writes every slot of the block in one pass. Its time is part of the time of “verify” here.");
      else write("draft", seconds(draft), `The drafter wrote every slot of the block in one pass, in ${seconds(draft)}.`);
      write("verify", seconds(verify), joined ? `Draft and verify took ${seconds(verify)} together.` : `The target's pass took ${seconds(verify)}.`);
      write("commit", seconds(overhead), `Everything around the two passes (deciding, rewinding the caches, reading the tokens) took ${seconds(overhead)}.`);
    }

    // Moves the step in view to one of its moments.
    function show([moment, judged]) {
      const act = ACT_OF[moment];
      for (const [name, element] of actOf) {
        element.classList.toggle("lit", name === act);
        if (name === act) element.setAttribute("aria-current", "step");
        else element.removeAttribute("aria-current");
      }
      body.dataset.moment = moment;
      say.textContent = narrate(step, moment);
      for (const cell of cells) cell.show(moment, judged);
    }

    return { load, show, settle, body };
  };

  // What happens at a moment that comes before the result.
  function narrate({ kind, slots, next }, moment) {
    const many = slots.length === 1 ? "one slot" : `${slots.length} slots`;
    if (moment === "done") return "";
    if (kind === "prefill") return "The target reads the whole prompt at once …";
    if (kind === "plain") return "The target reads its newest token …";
    if (moment === "masks") return `Behind the anchor stand ${many} with nothing in them yet.`;
    if (moment === "guesses") return "One pass of the drafter, and every slot has its guess.";
    if (moment === "verify") return "One pass of the target says of every guess whether it would have written it; what counts is the row up to the first that it would not.";
    if (!next) return "The output ends here, so nothing behind it counts.";
    if (next[1] === "bonus") return "Every guess stood, so the target's word on the next place is a token more, for nothing.";
    return "At the first disagreement the target's own token takes the place. The guesses behind it were built on a wrong one, and go.";
  }

  function sumParts(step) {
    const parts = [];
    for (const [count, fate] of DFlash.sum(step)) {
      if (parts.length) parts.push(make("span", "op", "+"));
      const part = make("span", "term " + fate);
      part.append(make("b", "", String(count)), ` ${fate}`);
      part.dataset.tip = fates[fate].why;
      parts.push(part);
    }
    if (!parts.length) parts.push(make("span", "term", "nothing"));
    const last = make("span", "total");
    last.append(make("b", "", DFlash.tokens(step.tokens.length)), " for one pass of the target");
    parts.push(make("span", "op", "="), last);
    const waste = step.slots.length - step.tokens.filter(([, fate]) => fate === "accepted").length;
    const aside = [];
    if (step.kind === "round" && !step.next) aside.push("the output ended inside this round");
    if (waste > 0) aside.push(`${waste} ${waste === 1 ? "guess" : "guesses"} thrown away`);
    if (aside.length) parts.push(make("span", "aside", aside.join(" · ")));
    return parts;
  }

  // A chance as a labelled bar; `write(known)` shows it, or that it is not known yet.
  function odds(label, share) {
    const row = make("span", "odds " + label);
    const value = make("span", "value", "");
    const bar = make("span", "bar"), fill = make("i");
    bar.append(fill);
    row.append(make("span", "label", label), value, bar);
    const write = (known) => {
      value.textContent = known ? percent(share) : "";
      fill.style.width = known && share > 0 ? `max(2px, ${100 * Math.min(share, 1)}%)` : "0";
    };
    return { row, write };
  }

  function frame(classes, place, text) {
    const element = make("li", "cell " + classes);
    const card = make("div", "card"), top = make("div", "top");
    const mark = make("span", "mark", "");
    const word = make("bdi", "word mono", text);
    top.append(make("span", "place", place), mark);
    card.append(top, word);
    element.append(card);
    return { element, card, mark, word };
  }

  // What a cell adds to the output, below it.
  function outcome(why, text, fate) {
    const fall = make("div", "fall " + fate);
    const chip = make("span", "chip");
    chip.append(make("span", "mark", fates[fate].mark), make("bdi", "mono", text));
    fall.append(make("span", "why", why), chip);
    fall.dataset.tip = `“${text}” · ${fates[fate].word}\n${fates[fate].why}`;
    return fall;
  }

  const shown = (text) => visible(text) || NONE;
  const exact = (share) => (share === null || share === undefined ? "not known" : (100 * share).toPrecision(4) + "%");

  function anchorCell(step, label, why) {
    const text = step.anchor ? shown(step.anchor[0]) : NONE;
    const cell = frame("anchor", label, text);
    if (label === "anchor") cell.mark.textContent = fates.anchor.mark;
    cell.card.append(make("span", "note", why));
    cell.card.dataset.tip = `“${text}” · ${label}\n${label === "anchor" ? fates.anchor.why : "The last token of the prompt."}`;
    return { element: cell.element, show() {} };
  }

  function roundCells(step) {
    const cells = [anchorCell(step, "anchor", "committed before this round")];
    const end = step.slots.findIndex(([, fate]) => fate !== "accepted");
    step.slots.forEach((slot, k) => cells.push(slotCell(step, slot, k, end < 0 ? step.slots.length : end)));
    cells.push(bonusCell(step));
    return cells;
  }

  function slotCell(step, [text, fate, drafter, target], k, end) {
    const token = shown(text);
    const cell = frame("slot", `slot ${k + 1}`, "");
    const ours = odds("drafter", drafter), theirs = odds("target", target);
    cell.card.append(ours.row, theirs.row);
    const kept = fate === "accepted";
    const corrected = fate === "rejected" && step.next;
    const fall = kept ? outcome("commits", token, "accepted") : corrected ? outcome("target wants", shown(step.next[0]), step.next[1]) : null;
    if (fall) cell.element.append(fall);
    const guess = `“${token}” · slot ${k + 1}\nthe drafter gave it ${exact(drafter)}`;
    const behind = !kept && !step.next ? "Behind the end of the output, so thrown away." : fates[fate].why;
    function show(moment, judged) {
      const masked = moment === "masks";
      const settled = moment === "settled" || moment === "done";
      const known = settled || (moment === "verify" && k < judged && k <= end);
      const point = known && fate === "rejected" ? " point" : "";
      cell.element.className = "cell slot " + (known ? fate + point : masked ? "masked" : "guessed");
      cell.word.textContent = masked ? "▒▒" : token;
      cell.mark.textContent = known ? fates[fate].mark : "";
      ours.write(!masked);
      theirs.write(known);
      if (fall) fall.classList.toggle("out", kept ? moment === "done" : settled);
      cell.card.dataset.tip = masked ? `slot ${k + 1}\nA mask: the drafter will guess what stands here.`
        : !known ? `${guess}\nThe target has not judged it yet.`
        : `${guess}, the target ${exact(target)}\n${fates[fate].word}: ${behind}`;
    }
    return { element: cell.element, show };
  }

  // The place behind the last slot: a token of the target's own, if all the guesses stood.
  function bonusCell(step) {
    const won = Boolean(step.next && step.next[1] === "bonus");
    const text = won ? shown(step.next[0]) : "";
    const cell = frame("extra", "bonus", "");
    const fall = won ? outcome("target adds", text, "bonus") : null;
    const note = make("span", "note");
    cell.card.append(note);
    if (fall) cell.element.append(fall);
    function show(moment) {
      const out = won && (moment === "settled" || moment === "done");
      cell.element.className = "cell extra " + (out ? "bonus" : "vacant");
      cell.mark.textContent = out ? fates.bonus.mark : "";
      cell.word.textContent = out ? text : "";
      note.textContent = out ? "from the same pass of the target" : "one more token, if all guesses stand";
      if (fall) fall.classList.toggle("out", out);
      cell.card.dataset.tip = (out ? `“${text}” · bonus\n` : "bonus\n") + fates.bonus.why;
    }
    return { element: cell.element, show };
  }

  // Prefill and plain steps: the token read last, and the one the target wrote by itself.
  function singleCells(step) {
    const first = step.kind === "prefill";
    const cells = [anchorCell(step, first ? "prompt" : "anchor", first ? "the last token read" : "committed before")];
    for (const [text, fate] of step.tokens) {
      const token = shown(text);
      const cell = frame("slot", "target writes", "");
      const fall = outcome("commits", token, fate);
      const note = make("span", "note", "no draft in this step");
      cell.card.append(note);
      cell.element.append(fall);
      cell.card.dataset.tip = `“${token}” · ${fates[fate].word}\n${fates[fate].why}`;
      const show = (moment) => {
        const done = moment === "done";
        cell.element.className = "cell slot " + (done ? fate : "masked");
        cell.word.textContent = done ? token : "▒▒";
        cell.mark.textContent = done ? fates[fate].mark : "";
        fall.classList.toggle("out", done);
      };
      cells.push({ element: cell.element, show });
    }
    return cells;
  }
})(window.DFlash);

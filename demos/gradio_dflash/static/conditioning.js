// Conditioning made visible: one round drafted with the context's features and once more with them zeroed, and where
// each slot's attention goes, layer by layer. DFlash.conditioning(root) returns {update(json)}; the value is one JSON
// object as a string, or "" before there is any.
(function (DFlash) {
  "use strict";
  const make = DFlash.make, percent = DFlash.percent;

  // What a slot can look at, in the order of the bar. Marks and patterns say again what the colours say.
  const PLACES = {
    context: { mark: "▤", word: "context", why: "The features of the context tokens shown below: what the target computed when it read them." },
    earlier: { mark: "…", word: "earlier context", why: "All context tokens that stand before the ones shown below, together." },
    anchor: { mark: "⚓", word: "anchor", why: "The newest committed token, the first cell of the block." },
    self: { mark: "◆", word: "itself", why: "The slot's own cell of the block." },
    before: { mark: "◀", word: "slots before", why: "The drafted slots of the block that stand before this one." },
    after: { mark: "▶", word: "slots after", why: "The drafted slots of the block that stand after this one. All slots are drafted at once, so each sees the later ones too." },
  };
  const sum = (list) => list.reduce((total, one) => total + one, 0);
  const slotName = (place) => (place ? "slot " + place : "the anchor");
  const plural = (count, word) => count + " " + word + (count === 1 ? "" : "s");

  // The shares of one row of one layer; they sum to 1. For the anchor's row the anchor is "itself".
  function shares(row, place) {
    return {
      context: sum(row.context), earlier: row.earlier, anchor: place ? row.block[0] : 0, self: row.block[place],
      before: sum(row.block.slice(1, Math.max(place, 1))), after: sum(row.block.slice(place + 1)),
    };
  }

  // Row `place` of layer `layer`, or of the mean of all layers for -1.
  function rowOf(layers, layer, place) {
    const rows = (layer < 0 ? layers : [layers[layer]]).map((one) => ({ context: one.context[place], block: one.block[place], earlier: one.earlier[place] }));
    const mean = (lists) => lists[0].map((_, index) => sum(lists.map((list) => list[index])) / lists.length);
    return { context: mean(rows.map((row) => row.context)), block: mean(rows.map((row) => row.block)), earlier: sum(rows.map((row) => row.earlier)) / rows.length };
  }

  // One of a group has the Tab stop, the arrow keys move it. `choose(index)` is called where moving also chooses.
  // Up and down move by `stride`, where the items stand in rows.
  function roving(group, items, choose, stride = 1) {
    const stop = (index) => items.forEach((item, place) => (item.tabIndex = place === index ? 0 : -1));
    group.addEventListener("keydown", (event) => {
      const place = items.indexOf(event.target);
      const step = { ArrowRight: 1, ArrowDown: stride, ArrowLeft: -1, ArrowUp: -stride, Home: -place, End: items.length - 1 - place }[event.key];
      if (place < 0 || step === undefined) return;
      event.preventDefault();
      const next = Math.min(Math.max(place + step, 0), items.length - 1);
      if (choose) choose(next);
      stop(next);
      items[next].focus();
    });
    stop(0);
    return stop;
  }

  // ---- the same round, twice ----

  function cell(classes, place, row, text, mark, below, tip) {
    const box = make("div", "cell " + classes, null, { role: "cell" });
    box.style.setProperty("--place", String(place));
    box.style.setProperty("--row", String(row));
    const word = make("span", "word mono", DFlash.visible(text));
    box.append(make("span", "mark", mark), word);
    if (below) box.append(make("span", "below", below));
    if (tip) {
      box.dataset.tip = tip;
      box.tabIndex = -1;
    }
    return box;
  }

  function twice(data) {
    const panel = make("section", "panel twice", null, { "aria-label": "the same round with and without conditioning" });
    const count = data.slots.length, box = make("div", "frame"), table = make("div", "grid", null, { role: "table", "aria-label": "the round, slot by slot" });
    const focusable = [];
    table.style.setProperty("--cells", String(count + 1));

    const line = (name, row, heading) => {
      const element = make("div", "line " + name, null, { role: "row" });
      heading.setAttribute("role", "rowheader");
      heading.style.setProperty("--row", String(row));
      element.append(heading);
      table.append(element);
      return element;
    };
    const numbers = line("numbers", 1, make("div", "heading", "slot"));
    for (let place = 0; place <= count; place++) {
      const number = make("div", "count", place ? String(place) : "⚓", { role: "columnheader", "aria-label": slotName(place) });
      number.style.setProperty("--place", String(place));
      numbers.append(number);
    }

    const target = make("div", "heading");
    target.append(make("strong", "", "what the target writes"), make("span", "hint", "by itself, token for token"));
    const wanted = line("wanted", 2, target);
    const given = cell("given anchor", 0, 2, data.anchor, "", "anchor", "The anchor, " + DFlash.visible(data.anchor) + "\n" + DFlash.fates.anchor.why);
    wanted.append(given);
    focusable.push(given);
    for (let place = 1; place <= count; place++) {
      const text = data.wanted[place - 1], known = text !== undefined && text !== null;
      const box = known
        ? cell("plain", place, 2, text, "", "", "The target's own token of slot " + place + ": " + DFlash.visible(text))
        : cell("unknown", place, 2, "?", "", "", "Not known: the target has not written as far as slot " + place + ".");
      wanted.append(box);
      focusable.push(box);
    }

    const arm = (name, row, words, run) => {
      const heading = make("div", "heading " + name), big = make("span", "big", String(run.accepted));
      big.append(make("span", "small", " of " + count + " accepted"));
      heading.append(make("strong", "", words), big, make("span", "hint", commits(run)));
      const element = line(name, row, heading);
      run.slots.forEach(([text, fate, probability], index) => {
        const known = DFlash.fates[fate] || DFlash.fates.discarded;
        const sure = typeof probability === "number" ? percent(probability) : "";
        const tip = "slot " + (index + 1) + ": " + DFlash.visible(text) + ", " + known.word + (sure ? "\nThe drafter gave it " + sure + "." : "") + "\n" + known.why;
        const box = cell(fate, index + 1, row, text, known.mark, sure, tip);
        box.setAttribute("aria-label", tip);
        element.append(box);
        focusable.push(box);
      });
    };
    arm("with", 3, "with conditioning", data.with);
    arm("without", 4, "without conditioning (zeroed features)", data.without);
    roving(table, focusable, null, count);

    box.append(table);
    measured(box, (width) => table.classList.toggle("down", width < 170 + 63 * (count + 1)));
    const used = ["accepted", "rejected", "discarded"].filter((fate) => [...data.with.slots, ...data.without.slots].some((slot) => slot[1] === fate));
    const title = "Round " + data.index + (data.rounds ? " of " + data.rounds : "") + ", drafted twice";
    panel.append(
      make("h3", "", title),
      make("p", "hint", "The drafter sees the context through features that the target computed when it read it: its conditioning. Here it drafts the same block once with them and once with every feature set to zero."),
      box, DFlash.legend(used),
    );
    if (data.reading) panel.append(make("p", "reading", data.reading));
    return panel;
  }

  // What a round commits beyond its accepted tokens, in words.
  function commits(run) {
    if (!run.next) return "commits " + plural(run.accepted, "token");
    const known = DFlash.fates[run.next[1]] || DFlash.fates.correction;
    return "then " + known.mark + " " + DFlash.visible(run.next[0]).slice(0, 24) + " (" + known.word + "): commits " + plural(run.accepted + 1, "token");
  }

  // Calls act(width) now and whenever the width of `element` changes, also when a closed tab that holds it is opened.
  function measured(element, act) {
    if (window.ResizeObserver) new ResizeObserver(() => element.clientWidth && act(element.clientWidth)).observe(element);
    else requestAnimationFrame(() => act(element.clientWidth));
  }

  // ---- where a slot looks ----

  // The context as running text: white space stays, a line break is also shown.
  const running = (text) => DFlash.visible(text).replace(/␣/g, " ").replace(/⏎/g, "⏎\n");

  function attention(data) {
    const panel = make("section", "panel attention", null, { "aria-label": "where a slot looks" });
    panel.append(make("h3", "", "Where each slot looks"));
    if (!data.layers || !data.layers.length) {
      panel.append(make("p", "hint", "This drafter gave no attention weights, so nothing can be shown here."));
      return panel;
    }
    const names = [data.anchor, ...data.slots];
    let slot = Math.min(1, names.length - 1), layer = -1;

    const chips = make("div", "chips", null, { role: "radiogroup", "aria-label": "slot" });
    const slots = names.map((text, place) => {
      const chip = make("button", "control chip", null, { type: "button", role: "radio", "aria-label": slotName(place) + ", " + DFlash.visible(text) });
      chip.append(make("span", "name", place ? "slot " + place : "⚓ anchor"), make("span", "word mono", DFlash.visible(text)));
      chip.addEventListener("click", () => pick(place, layer));
      chips.append(chip);
      return chip;
    });
    const slotStop = roving(chips, slots, (place) => pick(place, layer));

    const list = make("div", "layers", null, { role: "radiogroup", "aria-label": "layer" });
    const rows = [-1, ...data.layers.keys()].map((index) => {
      const row = make("div", "layer", null, { role: "radio" }), name = make("span", "name", index < 0 ? "mean of layers" : "draft layer " + (index + 1));
      const content = make("div", "content");
      row.append(name, content);
      row.addEventListener("click", () => pick(slot, index));
      row.addEventListener("keydown", (event) => (event.key === " " || event.key === "Enter") && (event.preventDefault(), pick(slot, index)));
      list.append(row);
      return { row, content, index, name: name.textContent };
    });
    const layerStop = roving(list, rows.map((one) => one.row), (place) => pick(slot, rows[place].index));

    const key = make("ul", "legend places", null, { "aria-label": "what the colours and marks mean" });
    for (const [place, { mark, word, why }] of Object.entries(PLACES)) {
      if (place === "earlier" && !data.earlier) continue;
      const item = make("li", "swatch", null, { tabindex: "0" });
      item.append(make("span", "pattern to-" + place), make("span", "", mark + " " + word));
      item.dataset.tip = why;
      key.append(item);
    }

    const heat = make("div", "heat"), heading = make("p", "heading"), strongest = make("p", "hint"), scale = make("div", "scale", null, { "aria-hidden": "true" });
    const strip = make("div", "strip live mono", null, { role: "group", "aria-label": "the context tokens" });
    const before = make("span", "before", "", { tabindex: "-1" });
    const pieces = data.context.map((text) => make("span", "piece", running(text)));
    strip.append(...(data.earlier ? [before] : []), ...pieces);
    const block = make("div", "block", null, { role: "group", "aria-label": "the block" });
    const cells = names.map((text, place) => {
      const box = make("span", "piece cell");
      box.append(make("span", "name", place ? String(place) : "⚓"), make("span", "word mono", DFlash.visible(text)), make("span", "below"));
      block.append(box);
      return box;
    });
    const tokens = [...(data.earlier ? [before] : []), ...pieces, ...cells], tokenStop = roving(heat, tokens);
    heat.append(heading, scale, make("p", "label", data.earlier ? "the context, its newest " + plural(data.context.length, "token") : "the context, " + plural(data.context.length, "token")), strip, make("p", "label", "the block"), block, strongest);

    function draw() {
      slots.forEach((chip, place) => chip.setAttribute("aria-checked", String(place === slot)));
      slotStop(slot);
      layerStop(layer + 1);
      for (const { row, content, index, name } of rows) {
        row.setAttribute("aria-checked", String(index === layer));
        const part = shares(rowOf(data.layers, index, slot), slot);
        content.replaceChildren(bar(part), figures(part));
        row.setAttribute("aria-label", name + ": " + Object.keys(part).filter((place) => part[place]).map((place) => PLACES[place].word + " " + percent(part[place])).join(", "));
      }
      warm();
    }

    function bar(part) {
      const kinds = Object.keys(PLACES).filter((place) => part[place] > 0);
      const stack = DFlash.stack(kinds.map((place) => ["to-" + place, part[place], PLACES[place].mark + " " + PLACES[place].word + ": " + percent(part[place]) + "\n" + PLACES[place].why]), "shares of the attention");
      kinds.forEach((place, index) => part[place] >= 0.09 && stack.children[index].append(make("span", "pill", percent(part[place], 0))));
      return stack;
    }
    function figures(part) {
      const line = make("div", "figures");
      for (const place of Object.keys(PLACES)) {
        const absent = { earlier: !data.earlier, anchor: !slot, before: slot < 2, after: slot === data.slots.length };
        if (absent[place]) continue;
        line.append(make("span", "figure", PLACES[place].mark + " " + PLACES[place].word + " " + percent(part[place])));
      }
      return line;
    }

    // Colours context and block by the weights of the chosen row, against the largest of them. The square root keeps
    // small weights visible beside one that takes nearly all; the scale says which colour stands for which weight.
    function warm() {
      const row = rowOf(data.layers, layer, slot), weights = [...row.context, ...row.block];
      const top = Math.max(...weights, 1e-12), all = [...pieces, ...cells];
      const order = row.context.map((weight, index) => [weight, index]).filter(([weight]) => weight > 0).sort((one, two) => two[0] - one[0]).slice(0, 3);
      const label = (index) => (index < pieces.length ? DFlash.visible(data.context[index]) : slotName(index - pieces.length) + " " + DFlash.visible(names[index - pieces.length]));
      all.forEach((piece, index) => {
        const back = pieces.length - index;
        piece.style.setProperty("--heat", Math.sqrt(weights[index] / top).toFixed(3));
        piece.dataset.tip = label(index) + ": " + (100 * weights[index]).toFixed(3) + "% of the attention of " + slotName(slot) + (back > 0 ? "\n" + plural(back, "token") + " before the anchor" : "");
        piece.classList.toggle("strong", order.some(([, place]) => place === index));
        if (back <= 0) piece.lastChild.textContent = percent(weights[index]);
        piece.classList.toggle("own", index - pieces.length === slot);
      });
      if (data.earlier) {
        before.textContent = "… " + plural(data.earlier, "earlier token") + ", " + percent(row.earlier) + " together ";
        before.dataset.tip = "The context is longer than what is shown: " + plural(data.earlier, "token") + " before these got " + (100 * row.earlier).toFixed(3) + "% of the attention, all together.";
      }
      heading.replaceChildren(make("strong", "", "What " + slotName(slot) + " looks at"), ", " + (layer < 0 ? "mean of all layers" : "draft layer " + (layer + 1)));
      scale.replaceChildren("share of one token: ", ...[0, 0.25, 0.5, 0.75, 1].map((share) => {
        const swatch = make("span", "step", percent(top * share * share));
        swatch.style.setProperty("--heat", String(share));
        return swatch;
      }));
      const most = order.map(([weight, index]) => label(index).slice(0, 40) + " (" + percent(weight) + ")").join(", ");
      strongest.textContent = (most ? "Underlined, the strongest of the context: " + most + "." : "") +
        (data.earlier ? " Earlier: the " + plural(data.earlier, "token") + " before the shown ones got " + percent(row.earlier) + " together." : "");
      tokenStop(Math.max(tokens.length - names.length - 1, 0));
    }
    function pick(place, index) {
      slot = place;
      layer = index;
      draw();
    }

    panel.append(
      make("p", "hint", "To guess its token a slot reads the context's features and the other cells of the block; attention says how much of each. Every bar is 100% of one slot's attention in one layer of the drafter, averaged over its heads."),
      make("p", "step-title", "1. Choose a slot"), chips, make("p", "step-title", "2. Choose a layer"), key, list, heat,
    );
    draw();
    let settled = false; // once, the newest tokens are scrolled into view
    measured(strip, () => settled || ((settled = true), (strip.scrollTop = strip.scrollHeight)));
    return panel;
  }

  // ---- all rounds ----

  function others(data) {
    const panel = make("section", "panel others", null, { "aria-label": "all rounds looked at" }), { rounds, mean_with: mean, mean_without: bare } = data.others;
    const top = Math.max(1, mean || 0, bare || 0), high = Math.max(1, ...rounds.map(([, one, two]) => Math.max(one, two)));
    const means = make("div", "means");
    for (const [name, words, value] of [["with", "with conditioning", mean], ["without", "without", bare]]) {
      const row = make("div", "mean " + name), track = make("div", "track"), fill = make("div", "fill");
      fill.style.width = (100 * (value || 0)) / top + "%";
      track.append(fill);
      const number = make("span", "value", typeof value === "number" ? value.toFixed(2) : "–");
      row.append(make("span", "who", words), track, number);
      means.append(row);
    }
    const chart = make("div", "chart", null, { role: "list", "aria-label": "accepted tokens by round, with and without conditioning" }), pairs = [];
    for (const [index, one, two] of rounds) {
      const pair = make("div", "pair", null, { role: "listitem" }), bars = make("div", "bars");
      for (const [name, value] of [["with", one], ["without", two]]) {
        const fill = make("div", "fill " + name);
        fill.style.height = (100 * value) / high + "%";
        bars.append(fill);
      }
      pair.append(bars, make("span", "number", String(index)));
      pair.dataset.tip = "round " + index + ": " + one + " accepted with conditioning, " + two + " without";
      pair.setAttribute("aria-label", pair.dataset.tip);
      if (index === data.index) pair.classList.add("current");
      chart.append(pair);
      pairs.push(pair);
    }
    roving(chart, pairs);
    const axis = make("div", "axis", null, { "aria-hidden": "true" }), frame = make("div", "plot");
    axis.append(make("span", "", String(high)), make("span", "", "0"));
    frame.append(axis, chart);
    panel.append(
      make("h3", "", "All rounds looked at"), make("p", "hint", "Mean tokens a round commits: the accepted ones and the target's own one behind them."), means,
      make("p", "hint gap", "Accepted tokens, round by round: the full bar with conditioning, the striped bar without." + (rounds.some(([index]) => index === data.index) ? " The round above is framed." : "")), frame,
    );
    return panel;
  }

  DFlash.conditioning = function (root) {
    root.classList.add("dflash", "conditioning");
    DFlash.tips(root);
    let before = null;

    function update(value) {
      if (value === before) return;
      before = value;
      const data = DFlash.record(value, "the round");
      if (data.state === "error") DFlash.message(root, "is-error", "This could not be shown", [data.text], { role: "alert" });
      else if (data.state === "running") DFlash.message(root, "is-running", "Looking into the drafter", [data.text], { role: "status" });
      else if (data.state !== "done") {
        DFlash.message(root, "", "What the drafter sees", [
          "A DFlash drafter guesses a whole block at once. It can do so because the target hands it features of the context: its conditioning.",
          "Here one round is drafted twice, with these features and with zeros in their place, to see how many guesses still stand; below, for every slot, how much of its attention goes to which context token and how much to the rest of the block.",
        ]);
      } else {
        root.replaceChildren(twice(data), attention(data), ...(data.others && data.others.rounds.length ? [others(data)] : []));
      }
    }
    update("");
    return { update };
  };
})(window.DFlash);

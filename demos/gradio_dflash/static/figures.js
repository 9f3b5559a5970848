// The figures of a run: cards with their definitions on hover, and three small charts.
(function (DFlash) {
  "use strict";
  const { make, percent, seconds } = DFlash;

  const known = (value) => value !== null && value !== undefined;
  const whole = (value) => (known(value) ? value.toLocaleString("en") : "–");
  const rate = (value) => (known(value) ? value.toFixed(value < 10 ? 2 : 1) : "–");
  const time = (value) => (known(value) ? seconds(value) : "–");

  function memory(bytes) {
    if (!bytes) return "–";
    return bytes < 1e9 ? (bytes / 1e6).toFixed(0) + " MB" : (bytes / 1e9).toFixed(2) + " GB";
  }

  // Each card: [key of the figure and of its definition, name where the head brings none, value, what stands below it].
  const CARDS = [
    ["mean_acceptance_length", "τ, mean acceptance length", (f) => rate(f.mean_acceptance_length), (f, block) => "tokens a round" + (block ? `, ${block} at best` : "")],
    ["draft_acceptance_rate", "draft acceptance rate", (f) => (known(f.draft_acceptance_rate) ? percent(f.draft_acceptance_rate, 1) : "–"),
      (f) => (known(f.num_draft_tokens) ? `= ${whole(f.num_accepted_draft_tokens)}/${whole(f.num_draft_tokens)} drafted tokens` : "no drafts yet")],
    ["speedup", "speedup", (f) => (known(f.speedup) ? rate(f.speedup) + " ×" : "–"), (f) => (known(f.speedup) ? "plain time ÷ DFlash time" : "the race measures it")],
    ["num_tokens", "tokens", (f) => whole(f.num_tokens), (f) => (known(f.num_prompt_tokens) ? `after ${whole(f.num_prompt_tokens)} of the prompt` : "")],
    ["num_spec_steps", "rounds", (f) => whole(f.num_spec_steps), () => "one pass of the target each"],
    ["ttft", "TTFT", (f) => time(f.ttft), () => "until the first token"],
    ["decode_tokens_per_second", "decode tok/s", (f) => rate(f.decode_tokens_per_second), (f) => (known(f.tpot) ? `${time(f.tpot)} a token` : "after the first token")],
    ["end_to_end_tokens_per_second", "end-to-end tok/s", (f) => rate(f.end_to_end_tokens_per_second), (f) => (known(f.total_seconds) ? `in ${time(f.total_seconds)} altogether` : "")],
    ["peak_memory", "peak memory", (f) => memory(f.peak_memory), () => "at the most"],
  ];

  DFlash.figures = function (root) {
    DFlash.tips(root);
    const cards = make("dl", "cards");
    const charts = make("div", "charts");
    root.append(cards, charts);
    const slots = CARDS.map(([key], number) => {
      const card = make("div", "card" + (number < 3 ? " main" : ""), null, { tabindex: "0" });
      const [name, value, note] = [make("dt", "name"), make("dd", "value", "–"), make("dd", "note")];
      card.dataset.key = key;
      card.append(name, value, note);
      cards.append(card);
      return { card, name, value, note };
    });
    const positions = columns("Acceptance by slot", "slot of the block", "% of rounds that accepted it");
    const histogram = columns("How many guesses stood", "accepted in one round", "rounds");
    const share = shares();
    charts.append(positions.element, histogram.element, share.element);

    // `values` as the figures line brings them, null while there are none; `help` as in the head; tokens in a block.
    function update(values, help, blockSize) {
      const figures = values || {};
      const define = (key, name) => (help && help[key]) || [name, name];
      CARDS.forEach(([key, fallback, value, note], number) => {
        const slot = slots[number];
        const [name, definition] = define(key, fallback);
        write(slot.name, name);
        write(slot.value, value(figures));
        write(slot.note, note(figures, blockSize));
        slot.card.dataset.tip = definition;
      });
      const byPosition = figures.acceptance_rate_per_position || [];
      positions.update(byPosition.map((part, k) => [k + 1, part || 0, part === null ? "–" : Math.round(100 * part), `slot ${k + 1}: accepted in ${percent(part, 1)} of the rounds that drafted it`]),
        1, define("acceptance_rate_per_position", "acceptance rate per position")[1]);
      const counts = figures.acceptance_histogram || [];
      const rounds = counts.reduce((sum, count) => sum + count, 0);
      histogram.update(counts.map((count, n) => [n, count, count, `${n} accepted: ${whole(count)} of ${whole(rounds)} rounds (${percent(rounds ? count / rounds : 0)})`]),
        Math.max(1, ...counts), define("acceptance_histogram", "acceptance histogram")[1]);
      share.update(figures, define);
    }
    return { update };
  };

  function write(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  function chart(title, note) {
    const element = make("figure", "chart", null, { tabindex: "0" });
    const caption = make("figcaption", "", title);
    if (note) caption.append(make("span", "hint", note));
    element.append(caption);
    return element;
  }

  // A small chart of upright bars; `rows` are [name, height, label, tooltip].
  function columns(title, across, upright) {
    const element = chart(title, upright);
    const plot = make("div", "plot", null, { role: "img" });
    const none = make("p", "hint", "nothing yet");
    element.append(plot, none, make("div", "across", across));
    let bars = [];
    function update(rows, top, definition) {
      element.dataset.tip = definition;
      none.hidden = rows.length > 0;
      plot.hidden = !rows.length;
      if (rows.length !== bars.length) {
        bars = rows.map(([name]) => {
          const column = make("div", "column");
          const [label, bar] = [make("span", "label"), make("div", "bar")];
          column.append(label, bar, make("span", "tick", String(name)));
          return { column, label, bar };
        });
        plot.replaceChildren(...bars.map(({ column }) => column));
        plot.classList.toggle("dense", rows.length > 9);
      }
      rows.forEach(([, height, label, tip], k) => {
        write(bars[k].label, typeof label === "number" ? short(label) : label);
        bars[k].bar.style.height = `${72 * (height / top)}px`;
        bars[k].column.dataset.tip = tip;
      });
      plot.setAttribute("aria-label", `${title}: ` + rows.map(([, , , tip]) => tip).join("; "));
    }
    return { element, update };
  }

  const short = (count) => (count < 1000 ? String(count) : (count / 1000).toFixed(1) + "k");

  // Where a round's time goes.
  function shares() {
    const element = chart("Where the time of the rounds goes");
    const box = make("div", "shares");
    element.append(box);
    const PHASES = [["draft", "draft"], ["verify", "verify"], ["overhead", "overhead"]];
    let last = "";
    function update(figures, define) {
      const spent = PHASES.map(([phase]) => figures[phase + "_seconds"] || 0);
      const whole = spent.reduce((sum, part) => sum + part, 0);
      if (spent.join() === last && box.childElementCount) return;
      last = spent.join();
      element.dataset.tip = "A round is one pass of the drafter, one pass of the target, and what stands around them.";
      if (!whole) return box.replaceChildren(make("p", "hint", "nothing yet"));
      const joined = spent[0] === 0 && spent[1] > 0;
      const rows = PHASES.map(([phase, word], k) => {
        const name = joined && phase === "verify" ? "draft and verify" : word;
        return [phase, spent[k], `${name}: ${seconds(spent[k])}, ${percent(spent[k] / whole, 1)}`, name, define(phase + "_seconds", name)[1]];
      }).filter(([phase]) => !(joined && phase === "draft"));
      const list = make("ul", "keys");
      for (const [phase, part, , name, definition] of rows) {
        const item = make("li", "", null);
        item.append(make("i", "part " + phase), make("span", "name", name), make("b", "", percent(part / whole)), make("span", "hint", seconds(part)));
        item.dataset.tip = definition;
        list.append(item);
      }
      box.replaceChildren(DFlash.stack(rows.map(([phase, part, text]) => [phase, part / whole, text]), rows.map(([, , text]) => text).join("; ")), list);
    }
    return { element, update };
  }
})(window.DFlash);

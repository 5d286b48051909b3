// Samples: every answer that was kept, searched, filtered and sorted; a group side by side; a prompt over time.
(function (T) {
  "use strict";

  const PAGE = 50;
  const COLUMNS = [
    ["step", "step"], ["reward", "reward"], ["advantage", "adv."], ["length", "length"], ["lag", "lag"], ["finish", "finish"],
  ];
  const BOUNDS = ["reward", "advantage", "length", "lag", "step", "version"];
  const view = { run: null, kind: "train", text: "", sort: "-step", offset: 0, where: [], prompts: false, cursor: 0 };
  let asked = 0;

  T.views.samples = {
    show(root) {
      read();
      view.bar = T.el("div", { class: "bar" });
      view.chips = T.el("div", { class: "chips" });
      view.list = T.el("section", { class: "card" });
      root.append(view.bar, view.chips, view.list);
      drawBar();
      load();
    },
    changed(what, name) {
      if (what === "state" && name === view.run && view.offset === 0 && view.sort === "-step" && !view.prompts) load();
    },
    focus() { document.getElementById("search").focus(); },
    key(key) {
      if (key === "j" || key === "ArrowDown") move(1);
      else if (key === "k" || key === "ArrowUp") move(-1);
      else if (key === "Enter") open(view.cursor);
      else if (key === "n") turn(1);
      else if (key === "p") turn(-1);
      else return false;
      return true;
    },
  };

  // The address says what is shown, so that it can be sent on and gone back to.
  function read() {
    const words = new URLSearchParams(location.hash.split("?")[1] || "");
    const kept = T.runs.filter((run) => Object.keys(run.samples).length);
    view.run = T.runs.some((run) => run.name === words.get("run")) ? words.get("run") : (kept[0] || T.runs[0]).name;
    view.kind = words.get("kind") || "train";
    view.text = words.get("text") || "";
    view.sort = words.get("sort") || "-step";
    view.prompts = words.get("prompts") === "1";
    view.offset = Number(words.get("offset")) || 0;
    try { view.where = JSON.parse(words.get("where") || "[]"); } catch { view.where = []; }
  }

  function change(changes) {
    Object.assign(view, { offset: 0, cursor: 0, prompts: false }, changes);
    const words = { run: view.run, kind: view.kind, text: view.text, sort: view.sort, where: JSON.stringify(view.where) };
    if (view.offset) words.offset = view.offset;
    if (view.prompts) words.prompts = 1;
    history.replaceState(null, "", `#samples?${new URLSearchParams(words)}`);
    drawChips();
    load();
  }

  function without(name) {
    return view.where.filter(([own]) => own !== name);
  }

  async function drawBar() {
    const search = T.el("input", { type: "search", id: "search", placeholder: "text in prompt, answer, failure, a judge's reply", value: view.text,
      "aria-label": "search" });
    search.addEventListener("change", () => change({ text: search.value }));
    const choices = await T.source.choices(view.run, view.kind);
    const sorts = [...["step", "reward"], ...choices.parts, ...["advantage", "length", "lag", "trained_tokens", "uid", "finish", "failure"]]
      .flatMap((name) => [[`-${name}`, `${name} ↓`], [name, `${name} ↑`]]);
    const some = (name, values) => [["", "all"], ["*", "any"], ...values.map((value) => [value, value.slice(0, 60)])];
    const equal = (name) => (view.where.find(([own, sign]) => own === name && sign === "=") || [])[2] || "";
    const choose = (name) => (value) => change({ where: value ? [...without(name), [name, "=", value]] : without(name) });
    const failures = [["", "all"], ["*", "any failure"],
      ...choices.failures.map((row) => [row.failure, `${row.count} × ${row.failure.slice(0, 60)}`])];
    view.bar.replaceChildren(
      T.select("run", T.runs.map((run) => [run.name]), view.run, (run) => { change({ run, where: [] }); drawBar(); }),
      T.select("of", [["train", "training"], ["eval", "evaluations"]], view.kind, (kind) => { change({ kind }); drawBar(); }),
      search,
      T.select("sort", sorts, view.sort, (sort) => change({ sort })),
      T.select("failure", failures, equal("failure"), choose("failure")),
      T.select("finish", some("finish", choices.finish), equal("finish"), choose("finish")),
      choices.data_source.length > 1
        ? T.select("source", some("data_source", choices.data_source), equal("data_source"), choose("data_source")) : "",
      bound([...BOUNDS, ...choices.parts]),
      T.el("button", { id: "fell", onclick: () => change({ prompts: !view.prompts }) }, "prompts whose reward fell"));
    drawChips();
  }

  function bound(bounds) {
    const name = T.el("select", { "aria-label": "number" }, bounds.map((own) => T.el("option", {}, own)));
    const sign = T.el("select", { "aria-label": "sign" }, [">=", "<="].map((own) => T.el("option", { value: own }, own === ">=" ? "≥" : "≤")));
    const value = T.el("input", { type: "number", step: "any", "aria-label": "bound", class: "short" });
    value.addEventListener("change", () => {
      if (value.value === "") return;
      const rest = view.where.filter(([own, mark]) => own !== name.value || mark !== sign.value);
      change({ where: [...rest, [name.value, sign.value, Number(value.value)]] });
      value.value = "";
    });
    return T.el("label", {}, name, sign, value);
  }

  function drawChips() {
    view.chips.replaceChildren(...view.where.map((own) => T.el("button", { class: "chip", title: "remove",
      onclick: () => { change({ where: view.where.filter((other) => other !== own) }); drawBar(); } },
    `${own[0]} ${own[1]} `, T.visible(String(own[2]).slice(0, 60)), " ×")));
  }

  async function load() {
    const mine = ++asked;
    try {
      const query = { kind: view.kind, text: view.text, sort: view.sort, where: view.where, offset: view.offset, limit: PAGE };
      const found = view.prompts ? await T.source.prompts(view.run, view.kind) : await T.source.samples(view.run, query);
      if (mine !== asked) return; // another question was asked meanwhile
      if (view.prompts) drawPrompts(found);
      else drawList(found);
    } catch (error) {
      if (mine === asked) view.list.replaceChildren(T.el("p", { class: "bad" }, String(error.message)));
    }
  }

  function drawList(found) {
    view.rows = found.rows;
    const rows = found.rows.map((row, place) => {
      const made = T.el("tr", { tabindex: 0, "aria-selected": place === view.cursor, onclick: () => open(place) },
        COLUMNS.map(([name]) => T.el("td", { class: name === "finish" ? "" : "n" },
          typeof row[name] === "string" ? row[name] : T.number(row[name]))),
        T.el("td", { class: "clip" }, row.failure ? T.el("span", { class: "bad" }, T.visible(row.failure.slice(0, 200)), " ") : null,
          T.visible(row.response.slice(0, 300))),
        T.el("td", { class: "clip" }, T.visible(row.prompt.slice(-200))));
      made.addEventListener("focus", () => { view.cursor = place; });
      return made;
    });
    const sortable = COLUMNS.map(([name, label]) => T.el("button", { class: "plain", onclick: () => {
      change({ sort: view.sort === `-${name}` ? name : `-${name}` });
      drawBar();
    } }, label + (view.sort === `-${name}` ? " ↓" : view.sort === name ? " ↑" : "")));
    const run = T.runs.find((own) => own.name === view.run), steps = (run.samples[view.kind] || []).length;
    const last = Math.min(found.total, view.offset + found.rows.length);
    const shown = found.total ? `${view.offset + 1} to ${last} of ${found.total.toLocaleString("en")}` : "none";
    const whole = `${found.of.toLocaleString("en")} ${T.embedded ? "in this file" : "kept"}, of ${steps} ${view.kind === "train" ? "steps" : "evaluations"}`;
    view.list.replaceChildren(
      T.el("h2", {}, `Samples `, T.el("small", { id: "count" }, `${shown} (${whole})`)),
      rows.length ? T.table([...sortable, "answer", "prompt"], rows, { id: "samples" })
        : T.el("p", { class: "soft" }, found.of ? "No sample is like that." : "This run keeps no samples (trainer.samples.every)."),
      T.el("div", { class: "bar" },
        T.el("button", { onclick: () => turn(-1), disabled: view.offset === 0 }, "‹ before"),
        T.el("button", { onclick: () => turn(1), disabled: last >= found.total }, "after ›")));
  }

  function drawPrompts(found) {
    const rows = found.map((row) => T.el("tr", { tabindex: 0, onclick: () => choosePrompt(row.uid),
      onkeydown: (event) => { if (event.key === "Enter") choosePrompt(row.uid); } },
    T.el("td", {}, T.visible(row.uid)), T.el("td", { class: "n" }, T.number(row.first)), T.el("td", { class: "n" }, T.number(row.last)),
    T.el("td", { class: `n ${row.change < 0 ? "bad" : ""}` }, T.number(row.change)), T.el("td", { class: "n" }, String(row.steps)),
    T.el("td", { class: "n" }, `${row.step_first} – ${row.step_last}`)));
    view.list.replaceChildren(T.el("h2", {}, "Prompts by the change of their reward ",
      T.el("small", {}, "mean over the scored answers, first step against last")),
    rows.length ? T.table(["prompt", "first", "last", "change", "steps", "from – to"], rows, { id: "prompts" })
      : T.el("p", { class: "soft" }, "No prompt was answered in more than one step."));
  }

  function choosePrompt(uid) {
    change({ where: [["uid", "=", uid]], sort: "step" });
    drawBar();
  }

  function turn(by) {
    const next = view.offset + by * PAGE;
    if (next >= 0 && (by < 0 || (view.rows || []).length === PAGE)) change({ offset: next });
  }

  function move(by) {
    const rows = view.list.querySelectorAll("tbody tr");
    view.cursor = Math.max(0, Math.min(rows.length - 1, view.cursor + by));
    rows.forEach((row, place) => row.setAttribute("aria-selected", place === view.cursor));
    if (rows[view.cursor]) rows[view.cursor].focus();
  }

  // --- one group ------------------------------------------------------------------------------------------------------

  async function open(place) {
    const row = (view.rows || [])[place];
    if (!row || view.prompts) return;
    view.cursor = place;
    const [group, time] = await Promise.all([
      T.source.group(view.run, view.kind, row.step, row.group), T.source.prompt(view.run, view.kind, row.uid)]);
    if (!group.length) return T.dialog(`step ${row.step}`, T.el("p", {}, "These samples were thinned out meanwhile."));
    const first = group[0];
    const facts = [`row ${first.uid}`, first.data_source, `ground truth: ${first.ground_truth.slice(0, 300)}`].filter(Boolean).join(" · ");
    const body = T.el("div", {}, T.el("p", { class: "soft" }, T.visible(facts)), 
      T.el("p", { class: "shown" }, (first.images || []).map((url) => T.el("img", { alt: "image of the prompt", src: url }))),
      T.block(first.prompt, 1500));
    if (time.length > 1) {
      const line = (key, colour) => ({ label: key, colour: T.colour(colour), dots: true,
        points: [time.map((own) => own.step), time.map((own) => own[`${key}_mean`])] });
      body.append(T.el("div", { class: "charts" },
        T.chart("This prompt's reward over time", "mean of the scored answers", [line("reward", 0)], { plain: true, x: "step" }),
        T.chart("Its answers' length", "tokens", [line("length", 1)], { plain: true, x: "step" })));
    }
    body.append(T.el("div", { class: "cards" }, group.map((own) => card(own, own.sample === row.sample))));
    body.append(T.el("button", { onclick: () => { T.closeDialog(); choosePrompt(first.uid); } }, "all answers to this prompt"));
    T.dialog(`step ${row.step}, group ${row.group}`, body);
  }

  function card(row, chosen) {
    const fact = (label, value) => (value === null || value === undefined ? null
      : T.el("div", {}, T.el("dt", {}, label), T.el("dd", {}, typeof value === "number" ? T.number(value) : T.visible(String(value)))));
    const parts = Object.entries(row.scores || {}).map(([name, value]) => fact(name, value));
    const notes = Object.entries(row.notes || {}).map(([name, text]) =>
      T.el("details", {}, T.el("summary", {}, T.visible(name)), T.block(text)));
    return T.el("article", { class: chosen ? "card chosen" : "card" },
      T.el("dl", {}, fact("reward", row.reward), parts, fact("advantage", row.advantage), fact("length", row.length),
        fact("finish", row.finish), fact("lag", row.lag), fact("version", row.version), row.counted ? null : fact("counted", "no")),
      row.failure ? T.el("p", { class: "bad" }, T.visible(row.failure)) : null,
      row.tokens ? T.tokens(row.tokens, row.logprobs, row.sampled) : T.block(row.response, undefined, row.inserted || []),
      (row.cut || []).includes("response") ? T.el("p", { class: "soft" }, "The file has only its beginning.") : null,
      notes);
  }
})(window.Tandem);

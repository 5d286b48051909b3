// Runs: how they stand, what differs between their configs, and their curves side by side.
(function (T) {
  "use strict";

  const FIRST = [
    ["Reward", "per scored sample", ["reward/mean"]],
    ["Held-out reward", "", ["eval/reward"]],
    ["Answers scored", "share; the others are in no mean", ["reward/scored_share"]],
    ["KL to the reference", "nats per token", ["kl/mean"]],
    ["Entropy", "nats per token", ["entropy/mean"]],
    ["Response length", "tokens", ["length/mean"]],
    ["Loss", "", ["loss/policy", "loss/sft"]],
    ["Gradient norm", "", ["grad/norm"]],
    ["Fraction of the best possible step", "", ["limit/fraction"]],
    ["Memory", "MB", ["system/memory_mb"]],
  ];
  const view = { filter: "", figures: [] };

  T.views = T.views || {};
  T.views.runs = {
    show(root) {
      view.list = T.el("section", { class: "card" });
      view.config = T.el("section", { class: "card" });
      view.charts = T.el("div", { class: "charts" });
      const filter = T.el("input", { type: "search", placeholder: "filter metrics, such as time/", value: view.filter,
        "aria-label": "filter metrics", id: "filter" });
      filter.addEventListener("input", () => { view.filter = filter.value; drawCharts(); });
      const options = T.chartOptions(drawCharts);
      options.append(filter);
      root.append(view.list, view.config, options, view.charts);
      drawList();
      drawConfig();
      drawCharts();
    },
    changed(what) {
      if (what === "state") drawList();
      else refreshCharts();
    },
    focus() { document.getElementById("filter").focus(); },
  };

  function drawList() {
    const rows = T.runs.map((run, index) => {
      const start = run.starts[run.starts.length - 1] || {};
      const box = T.el("input", { type: "checkbox", "aria-label": `show ${run.name}` });
      box.checked = T.selected.has(run.name);
      box.addEventListener("change", () => {
        if (box.checked) T.selected.add(run.name);
        else T.selected.delete(run.name);
        drawConfig();
        drawCharts();
      });
      const versions = Object.entries(start.versions || {}).map(([name, version]) => `${name} ${version}`).join(", ");
      return T.el("tr", { "data-run": run.name },
        T.el("td", {}, box, " ", T.el("i", { class: "dot", style: { background: T.colour(index) } }), " ",
          T.el("b", {}, T.visible(run.name))),
        T.el("td", {}, T.el("span", { class: `state ${run.state}`, title: run.words }, run.state),
          ["failed", "died"].includes(run.state) ? T.el("small", {}, " ", T.visible(run.words.slice(0, 300))) : null),
        T.el("td", { class: "n" }, String(run.step)),
        T.el("td", { class: "n" }, reward(run)),
        T.el("td", { class: "n" }, T.number(valueOf(run, "eval/reward"))),
        T.el("td", {}, start.began || "–"),
        T.el("td", {}, T.visible([start.host, versions].filter(Boolean).join(" · "))),
        T.el("td", {}, start.commit || "–"),
        T.el("td", {}, T.el("code", {}, T.visible((start.command || []).join(" ")))));
    });
    const head = ["run", "state", "step", "reward", "eval", "began", "host and versions", "commit", "command"];
    view.list.replaceChildren(T.el("h2", {}, "Runs"), T.table(head, rows, { id: "runs" }));
  }

  function valueOf(run, key) {
    const column = T.curves[run.name] && T.curves[run.name].columns[key];
    for (let i = (column || []).length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
    return null;
  }

  // A reward says of how many answers it is, wherever it stands.
  function reward(run) {
    const share = valueOf(run, "reward/scored_share");
    const of = share !== null && share < 1 ? ` of ${Math.round(share * 100)} % scored` : "";
    return T.number(valueOf(run, "reward/mean")) + of;
  }

  function drawConfig() {
    const shown = chosen();
    const keys = [...new Set(shown.flatMap((run) => Object.keys(run.config)))].sort();
    const text = (run, key) => (key in run.config ? JSON.stringify(run.config[key]) : "–");
    const differing = keys.filter((key) => new Set(shown.map((run) => text(run, key))).size > 1);
    const rows = (listed) => listed.map((key) =>
      T.el("tr", {}, T.el("th", { scope: "row" }, key), shown.map((run) => T.el("td", {}, T.visible(text(run, key).slice(0, 400))))));
    const head = ["key", ...shown.map((run) => run.name)];
    const words = shown.length < 2 ? "Config" : `Differences of the configs (${differing.length} of ${keys.length} keys)`;
    const all = T.el("details", {}, T.el("summary", {}, "all keys"));
    all.addEventListener("toggle", () => { if (all.open && all.children.length < 2) all.append(T.table(head, rows(keys))); });
    view.config.replaceChildren(T.el("h2", {}, words),
      shown.length > 1 && differing.length ? T.table(head, rows(differing), { id: "differences" }) : "", all);
  }

  function chosen() {
    return T.runs.filter((run) => T.selected.has(run.name));
  }

  function linesOf(keys) {
    const shown = chosen();
    return shown.flatMap((run) => keys.filter((key) => key in T.curves[run.name].columns).map((key) => ({
      label: keys.length > 1 ? `${run.name} ${key}` : run.name,
      points: T.curves[run.name].points(key, T.axes.x),
      colour: T.colour(T.runs.indexOf(run)),
      dots: key.startsWith("eval/"),
    })));
  }

  function panels() {
    const known = new Set(chosen().flatMap((run) => T.curves[run.name].keys()));
    if (view.filter) {
      const words = view.filter.toLowerCase();
      return [...known].filter((key) => key.toLowerCase().includes(words)).sort().map((key) => [key, "", [key]]);
    }
    const first = FIRST.filter(([, , keys]) => keys.some((key) => known.has(key)));
    const told = new Set(first.flatMap(([, , keys]) => keys));
    return [...first, ...[...known].filter((key) => !told.has(key)).sort().map((key) => [key, "", [key]])];
  }

  function drawCharts() {
    view.figures = panels().map(([title, unit, keys]) => [keys, T.chart(title, unit, linesOf(keys))]);
    view.charts.replaceChildren(...view.figures.map(([, figure]) => figure));
  }

  function refreshCharts() {
    const wanted = panels().map(([title]) => title).join("\n");
    if (wanted !== view.figures.map(([, figure]) => figure.dataset.title).join("\n")) return drawCharts();
    for (const [keys, figure] of view.figures) figure.chart.update(linesOf(keys));
  }
})(window.Tandem);

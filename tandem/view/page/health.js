// Health: what is off, in words, and the curves that show it.
(function (T) {
  "use strict";

  const PANELS = [
    ["Reward and its spread", "per scored sample", [/^reward\/(mean|std)$/, /^eval\/reward$/]],
    ["Groups without spread", "groups of equal rewards", [/^reward\/groups_without_signal$/]],
    ["Scorings", "outcomes", [/^reward\/(scored|failed|timed_out|excluded)$/]],
    ["Advantages", "", [/^advantage\//]],
    ["Entropy", "nats per token", [/^entropy\//]],
    ["KL", "nats per token", [/^kl\/(mean|reward)$/, /^loss\/ppo_kl$/]],
    ["Clipped tokens", "fraction", [/^loss\/clipfrac/]],
    ["Gradient norm", "", [/^grad\/norm$/, /^value\/grad_norm$/]],
    ["Length", "tokens", [/^length\/(mean|max|p\d+)$/]],
    ["Truncated", "fraction of the answers", [/^length\/truncated$/]],
    ["Lag", "versions", [/^lag\/(mean|max)$/]],
    ["Engine against trainer", "log-probs of the same tokens", [/^mismatch\/(abs|kl|k3)/]],
    ["Fraction of the best step", "1 is all of it", [/^limit\/fraction$/]],
    ["Throughput", "tokens per second", [/^throughput\//]],
    ["Engines", "seconds at work", [/^rollout\//]],
    ["Processors and devices", "share in use", [/^system\/.*_share$/]],
    ["Memory", "GB", [/^system\/.*_gb$/]],
    ["Updates left out", "", [/^optim\/(skipped_steps|empty_mini_batches)$/]],
    ["Critic", "", [/^value\/(loss|explained_variance|mean|returns)$/]],
  ];
  const view = { run: null };

  T.views.health = {
    show(root) {
      view.run = view.run || T.runs[0].name;
      view.found = T.el("section", { class: "card" });
      view.charts = T.el("div", { class: "charts" });
      const bar = T.chartOptions(drawCharts);
      bar.prepend(T.select("run", T.runs.map((run) => [run.name]), view.run, (run) => {
        view.run = run;
        drawFindings();
        drawCharts();
      }));
      root.append(bar, view.found, view.charts);
      drawFindings();
      drawCharts();
    },
    changed(what, name) {
      if (name !== view.run) return;
      if (what === "curves") refreshCharts();
      drawFindings();
    },
    focus() {},
  };

  async function drawFindings() {
    const run = T.runs.find((own) => own.name === view.run);
    const findings = await T.source.findings(view.run);
    const items = findings.map((found) => T.el("li", {}, T.el("b", {}, found.title), ": ", T.visible(found.words), ". ",
      T.el("code", {}, found.key), " ", T.el("span", { class: "soft" }, `What to do: ${found.page}`)));
    const failures = (await T.source.choices(view.run, "train")).failures.slice(0, 5).map((row) =>
      T.el("li", {}, `${row.count} × `, T.visible(row.failure.slice(0, 300))));
    view.found.replaceChildren(T.el("h2", {}, "What to look at"),
      T.el("p", {}, T.el("span", { class: `state ${run.state}` }, run.state), " ", T.visible(run.words)),
      items.length ? T.el("ul", { id: "findings" }, items) : T.el("p", { class: "soft", id: "findings" }, "Nothing is off in these curves."),
      failures.length ? T.el("h3", {}, "What scorers failed with") : "", failures.length ? T.el("ul", {}, failures) : "");
  }

  function panels() {
    const curves = T.curves[view.run], keys = curves.keys();
    const found = PANELS.map(([title, unit, patterns]) => {
      const own = keys.filter((key) => patterns.some((pattern) => pattern.test(key)));
      const lines = own.map((key, i) => ({ label: key, points: curves.points(key, T.axes.x), colour: T.colour(i), dots: key.startsWith("eval/") }));
      return [title, unit, lines, {}];
    }).filter(([, , lines]) => lines.length);
    const parts = timeParts(curves);
    if (parts.length) found.push(["Where the time of a step goes", "seconds, on top of each other", stacked(curves, parts), {}]);
    const lags = keys.filter((key) => /^lag\/count_\d+$/.test(key));
    if (lags.length > 1) found.push(["Samples by lag", "on top of each other", stacked(curves, lags), {}]);
    return found;
  }

  // Parts of the loop's own thread have processor seconds beside them; the others went on at the same time.
  function timeParts(curves) {
    return curves.keys().filter((key) => key.startsWith("time/") && key !== "time/step" && key.replace("time/", "cpu/") in curves.columns);
  }

  function stacked(curves, keys) {
    const rows = (curves.columns.step || []).length, along = curves.along(T.axes.x), floor = new Array(rows).fill(0);
    const lines = keys.map((key, i) => {
      const values = curves.columns[key];
      for (let row = 0; row < rows; row++) floor[row] += values[row] || 0;
      return { label: key, points: [along, floor.slice()], colour: T.colour(i), fill: T.colour(i) + "66" };
    });
    return lines.reverse(); // what is lower is drawn over what it is a part of
  }

  function drawCharts() {
    view.figures = panels().map(([title, unit, lines, options]) => T.chart(title, unit, lines, options));
    view.charts.replaceChildren(...view.figures);
  }

  function refreshCharts() {
    const next = panels();
    if (next.map(([title]) => title).join() !== view.figures.map((figure) => figure.dataset.title).join()) return drawCharts();
    next.forEach(([, , lines], i) => view.figures[i].chart.update(lines));
  }
})(window.Tandem);

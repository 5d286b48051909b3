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
    ["Engines on this partition", "seconds at work", [/^rollout\//]],
    ["Processors", "share of all cores that was busy", [/^system\/cpu$/]],
    ["Memory", "MB", [/^system\/(gpu_)?memory_(left_)?mb$/]],
    ["Disk", "MB left", [/^system\/disk_left_mb$/]],
    ["Updates left out", "", [/^optim\/(skipped_steps|empty_mini_batches)$/]],
    ["Critic", "", [/^value\/(loss|explained_variance|mean|returns)$/]],
  ];
  const view = { run: null };

  T.views.health = {
    show(root) {
      view.run = view.run || T.runs[0].name;
      view.found = T.el("section", { class: "card" });
      view.time = T.el("section", { class: "card", id: "timeline" });
      view.charts = T.el("div", { class: "charts" });
      const bar = T.chartOptions(drawCharts);
      bar.prepend(T.select("run", T.runs.map((run) => [run.name]), view.run, (run) => {
        view.run = run;
        drawFindings();
        drawTimeline();
        drawCharts();
      }));
      root.append(bar, view.found, view.time, view.charts);
      drawFindings();
      drawTimeline();
      drawCharts();
    },
    changed(what, name) {
      if (name !== view.run) return;
      if (what === "curves") {
        refreshCharts();
        drawTimeline();
      }
      drawFindings();
    },
    focus() {},
  };

  async function drawFindings() {
    const run = T.runs.find((own) => own.name === view.run);
    const findings = await T.source.findings(view.run);
    const items = findings.map((found) => T.el("li", {}, T.el("b", {}, found.title), ": ", T.visible(found.words), ". ",
      T.el("code", {}, found.key), " ",
      T.el("button", { class: "link", onclick: () => showPage(found.page) }, `What to do: ${found.page}`)));
    const failures = (await T.source.choices(view.run, "train")).failures.slice(0, 5).map((row) =>
      T.el("li", {}, `${row.count} × `, T.visible(row.failure.slice(0, 300))));
    view.found.replaceChildren(T.el("h2", {}, "What to look at"),
      T.el("p", {}, T.el("span", { class: `state ${run.state}` }, run.state), " ", T.visible(run.words)),
      items.length ? T.el("ul", { id: "findings" }, items) : T.el("p", { class: "soft", id: "findings" }, "Nothing is off in these curves."),
      failures.length ? T.el("h3", {}, "What scorers failed with") : "", failures.length ? T.el("ul", {}, failures) : "");
  }

  async function showPage(name) {
    T.dialog(name, T.page(await T.source.page(name)));
  }

  // --- who worked and who waited --------------------------------------------------------------------------------------

  const WINDOWS = [["1", "the last step"], ["5", "the last 5 steps"], ["20", "the last 20 steps"], ["all", "all that is kept"]];
  let asked = 0;

  async function drawTimeline() {
    const own = ++asked, lanes = await T.source.timeline(view.run);
    if (own !== asked) return; // another run was chosen meanwhile
    view.lanes = lanes;
    if (!lanes.length) {
      view.time.replaceChildren(T.el("h2", {}, "Who worked, who waited"),
        T.el("p", { class: "soft" }, "This run keeps no timeline: trainer.trace=true does."));
      return;
    }
    const steps = T.select("time", WINDOWS, view.window || "5", (value) => { view.window = value; drawLanes(); });
    view.tracks = T.el("div", { class: "lanes" });
    view.time.replaceChildren(T.el("div", { class: "bar" }, T.el("h2", {}, "Who worked, who waited"), steps), view.tracks);
    drawLanes();
  }

  function drawLanes() {
    const every = view.lanes.flatMap((lane) => lane.spans), count = Number(view.window || "5");
    const steps = every.filter((span) => span[3] === "step").map((span) => span[0]).sort((a, b) => a - b);
    const begin = count && steps.length > count ? steps[steps.length - count] : 0;
    const end = Math.max(...every.map((span) => span[0] + span[1])), whole = end - begin || 1;
    view.tracks.replaceChildren(...view.lanes.map((lane) => {
      const spans = lane.spans.filter((span) => span[0] + span[1] > begin);
      const deepest = Math.max(0, ...spans.map((span) => span[2]));
      const track = T.el("div", { class: "track", style: { height: `${(deepest + 1) * 16}px` } }, spans.map(([from, seconds, depth, name]) => {
        const left = Math.max(0, from - begin) / whole, right = Math.min(end, from + seconds) - begin;
        const kind = name.startsWith("wait") ? "waits" : name.startsWith("push") ? "pushes" : depth < deepest ? "works outer" : "works";
        return T.el("i", { class: kind, title: `${name}: ${T.number(seconds)} s`, "data-name": name,
          style: { left: `${left * 100}%`, width: `${(right / whole - left) * 100}%`, top: `${depth * 16}px` } },
        (right / whole - left) > 0.06 ? name : "");
      }));
      return T.el("div", { class: "lane", "data-lane": lane.name },
        T.el("div", {}, T.visible(lane.name), " ", T.el("small", {}, `at work ${Math.round(lane.busy * 100)} %`)), track);
    }), T.el("p", { class: "soft" }, `${T.number(whole)} s; full: at work, pale: the whole of it, striped: it waits`));
  }

  // --- curves ---------------------------------------------------------------------------------------------------------

  function panels() {
    const curves = T.curves[view.run], keys = curves.keys();
    const found = PANELS.map(([title, unit, patterns]) => {
      const own = keys.filter((key) => patterns.some((pattern) => pattern.test(key)));
      const lines = own.map((key, i) => ({ label: key, points: curves.points(key, T.axes.x), colour: T.colour(i), dots: key.startsWith("eval/") }));
      return [title, unit, lines, {}];
    }).filter(([, , lines]) => lines.length);
    const atWork = working(curves);
    if (atWork.length) found.push(["Engines at work", "share of the step", atWork, {}]);
    const parts = timeParts(curves);
    if (parts.length) found.push(["Where the time of a step goes", "seconds, on top of each other", stacked(curves, parts), {}]);
    const lags = keys.filter((key) => /^lag\/count_\d+$/.test(key));
    if (lags.length > 1) found.push(["Samples by lag", "on top of each other", stacked(curves, lags), {}]);
    return found;
  }

  // How much of a step's time engines generated, for whichever partitions.
  function working(curves) {
    const { "time/rollout": worked, "time/step": whole } = curves.columns, xs = [], ys = [], along = curves.along(T.axes.x);
    for (let i = 0; worked && whole && i < whole.length; i++) {
      if (worked[i] === null || !whole[i] || (xs.length && along[i] <= xs[xs.length - 1])) continue;
      xs.push(along[i]);
      ys.push(worked[i] / whole[i]);
    }
    return xs.length ? [{ label: "time/rollout of time/step", points: [xs, ys], colour: T.colour(0) }] : [];
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

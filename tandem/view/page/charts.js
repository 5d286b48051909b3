// Curves: several runs in one chart, a crosshair and a zoom that all charts share.
(function (T) {
  "use strict";

  T.axes = { x: "step", smooth: 0, log: false };

  const charts = new Set(); // those on the page
  let zooming = false;

  // The curves of a run: rows by key, added to as they come, and the x of each row.
  T.Curves = class {
    constructor() {
      this.columns = {};
      this.rows = 0;
      this.generation = -1;
    }
    take(found) {
      if (found.generation !== this.generation || found.first === 0) this.columns = {};
      const had = (this.columns.step || []).length, added = found.columns.step.length;
      for (const key of Object.keys(found.columns)) {
        if (!(key in this.columns)) this.columns[key] = new Array(had).fill(null);
      }
      for (const [key, values] of Object.entries(this.columns)) {
        const more = found.columns[key] || new Array(added).fill(null);
        for (const value of more) values.push(value);
      }
      this.rows = found.rows;
      this.generation = found.generation;
      this.thinned = this.thinned || found.thinned;
    }
    keys() {
      return Object.keys(this.columns).filter((key) => key !== "step").sort();
    }
    // Points of one key: [xs, ys], of several values for one x the last.
    points(key, x) {
      const values = this.columns[key] || [], along = this.along(x), xs = [], ys = [];
      for (let i = 0; i < values.length; i++) {
        if (values[i] === null || along[i] === null) continue;
        if (xs.length && xs[xs.length - 1] === along[i]) ys[ys.length - 1] = values[i];
        else if (!xs.length || along[i] > xs[xs.length - 1]) {
          xs.push(along[i]);
          ys.push(values[i]);
        }
      }
      return [xs, ys];
    }
    // The x of each row: its step, or the hours or tokens of all steps up to it.
    along(x) {
      const steps = this.columns.step || [];
      if (x === "step") return steps;
      const seconds = this.columns["time/step"] || [], rate = this.columns["throughput/tokens_per_second"] || [];
      let sum = 0;
      return steps.map((_, i) => {
        const own = seconds[i] || 0;
        sum += x === "hours" ? own / 3600 : own * (rate[i] || 0);
        return sum;
      });
    }
  };

  T.smoothed = function (values, weight) {
    let mean = null;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      mean = mean === null ? value : weight * mean + (1 - weight) * value;
      return mean;
    });
  };

  T.colour = function (index) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--s${(index % 8) + 1}`).trim();
  };

  function faint(colour) {
    return colour + "55";
  }

  // lines: [{label, points: [xs, ys], colour, dots}]. A chart is drawn once it is seen.
  T.chart = function (title, unit, lines, options = {}) {
    const plot = T.el("div", { class: "plot" });
    const figure = T.el("figure", { "data-title": title },
      T.el("h3", {}, title, " ", T.el("small", {}, unit || "")), plot);
    const own = { figure, plot, lines, options, drawn: null };
    own.update = (next) => {
      own.lines = next;
      if (own.drawn) draw(own);
    };
    figure.chart = own;
    new IntersectionObserver((seen, watcher) => {
      if (!seen.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      draw(own);
      new ResizeObserver(() => {
        if (own.drawn && plot.clientWidth) own.drawn.setSize({ width: plot.clientWidth, height: 220 });
      }).observe(plot);
    }, { rootMargin: "200px" }).observe(figure);
    return figure;
  };

  function draw(own) {
    const lines = own.lines.filter((line) => line.points[0].length);
    if (own.drawn) {
      charts.delete(own.drawn);
      own.drawn.destroy();
      own.drawn = null;
    }
    for (const chart of charts) if (!chart.root.isConnected) charts.delete(chart); // of a view that was left
    own.plot.replaceChildren();
    if (!lines.length) {
      own.plot.append(T.el("p", { class: "soft" }, "no values"));
      return;
    }
    const smooth = own.options.plain ? 0 : T.axes.smooth;
    const joined = uPlot.join(lines.map((line) => line.points));
    const series = [{ label: own.options.x || T.axes.x, value: (_, v) => T.number(v) }], data = [joined[0]];
    lines.forEach((line, i) => {
      const smoothes = smooth > 0 && !line.dots;
      const look = { label: line.label, spanGaps: true, value: (_, v) => T.number(v), points: { show: Boolean(line.dots) } };
      if (smoothes) {
        series.push({ ...look, label: line.label, stroke: faint(line.colour), width: 1 });
        data.push(joined[i + 1]);
        series.push({ ...look, label: `${line.label}, smoothed`, stroke: line.colour, width: 2 });
        data.push(T.smoothed(joined[i + 1], smooth));
      } else {
        const single = line.points[0].length === 1;
        series.push({ ...look, stroke: line.colour, width: 2, fill: line.fill, points: { show: single || Boolean(line.dots) } });
        data.push(joined[i + 1]);
      }
    });
    const ink = getComputedStyle(own.plot).color, rule = getComputedStyle(own.plot).borderColor;
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
    const log = T.axes.log && !own.options.plain && data.slice(1).every((values) => values.every((v) => v == null || v > 0));
    own.drawn = new uPlot({
      width: own.plot.clientWidth || 400,
      height: 220,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? "" : T.number(v))) }],
      series,
      cursor: { sync: own.options.plain ? undefined : { key: "tandem" }, drag: { x: true, y: false } },
      hooks: { setScale: [(chart, scale) => { if (scale === "x" && !own.options.plain) zoomAll(chart); }] },
    }, data, own.plot);
    charts.add(own.drawn);
  }

  // All charts show the same stretch; a double click shows everything again: what each has, for they begin and end apart.
  function zoomAll(source) {
    if (zooming || !charts.has(source)) return;
    zooming = true;
    const { min, max } = source.scales.x, whole = min <= source.data[0][0] && max >= source.data[0].at(-1);
    for (const chart of charts) {
      if (chart === source || !chart.cursor.sync || !chart.cursor.sync.key) continue;
      const own = chart.data[0];
      if (!whole) chart.setScale("x", { min, max });
      else if (own.length > 1) chart.setScale("x", { min: own[0], max: own.at(-1) });
    }
    zooming = false;
  }

  // What is above every set of charts.
  T.chartOptions = function (redraw) {
    const smooth = T.el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: T.axes.smooth, "aria-label": "smoothing" });
    smooth.addEventListener("input", () => { T.axes.smooth = Number(smooth.value); redraw(); });
    const log = T.el("input", { type: "checkbox", "aria-label": "logarithmic" });
    log.checked = T.axes.log;
    log.addEventListener("change", () => { T.axes.log = log.checked; redraw(); });
    return T.el("div", { class: "bar" },
      T.select("along", [["step", "steps"], ["hours", "hours in steps"], ["tokens", "tokens"]], T.axes.x,
        (value) => { T.axes.x = value; redraw(); }),
      T.el("label", {}, T.el("span", {}, "smooth"), smooth),
      T.el("label", {}, log, T.el("span", {}, "log")),
      T.el("span", { class: "soft" }, "drag to zoom, double click to zoom out"));
  };
})(window.Tandem);

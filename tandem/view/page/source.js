// Where the page gets what it shows: a server, or what stands in the page itself. Both answer the same questions.
(function (T) {
  "use strict";

  class ServerSource {
    async ask(what, parameters) {
      const words = new URLSearchParams(parameters || {});
      const answer = await fetch(`api/${what}?${words}`);
      if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
      return answer.json();
    }
    runs() { return this.ask("runs"); }
    curves(run) { return this.ask("curves", { run }); }
    findings(run) { return this.ask("findings", { run }); }
    timeline(run) { return this.ask("timeline", { run }); }
    async page(name) { return (await fetch(name)).text(); }
    samples(run, query) { return this.ask("samples", { run, ...query, where: JSON.stringify(query.where || []) }); }
    group(run, kind, step, group) { return this.ask("group", { run, kind, step, group }); }
    prompts(run, kind) { return this.ask("prompts", { run, kind }); }
    prompt(run, kind, uid) { return this.ask("prompt", { run, kind, uid }); }
    choices(run, kind) { return this.ask("failures", { run, kind }); }

    // Calls back with what is new, from where the page stands; begins again by itself where a connection was lost.
    listen(have, oncurves, onstate, onlive) {
      const open = () => {
        const events = new EventSource(`api/events?have=${encodeURIComponent(JSON.stringify(have()))}`);
        events.addEventListener("curves", (event) => oncurves(JSON.parse(event.data)));
        events.addEventListener("state", (event) => onstate(JSON.parse(event.data)));
        events.onopen = () => onlive(true);
        events.onerror = () => {
          onlive(false);
          events.close();
          setTimeout(open, 2000);
        };
      };
      open();
    }
  }

  class EmbeddedSource {
    constructor(data) {
      this.data = Object.fromEntries(data.runs.map((run) => [run.name, run]));
      this.pages = data.pages || {};
    }
    async runs() { return Object.values(this.data); }
    async curves(run) { return this.data[run].curves; }
    async findings(run) { return this.data[run].findings; }
    async timeline(run) { return this.data[run].timeline || []; }
    async page(name) { return this.pages[name] || ""; }
    async samples(run, query) {
      const every = this.data[run].kept[query.kind];
      const text = (query.text || "").toLowerCase();
      const chosen = every.filter((row) =>
        (query.where || []).every(([name, sign, value]) => holds(valueOf(row, name), sign, value)) &&
        (!text || [row.prompt, row.response, row.failure, row.ground_truth, ...Object.values(row.notes || {})].some(
          (words) => (words || "").toLowerCase().includes(text))));
      const name = query.sort.replace(/^-/, ""), turn = query.sort.startsWith("-") ? -1 : 1;
      chosen.sort((a, b) => compare(valueOf(a, name), valueOf(b, name), turn) || b.step - a.step || a.group - b.group || a.sample - b.sample);
      return { total: chosen.length, of: every.length, rows: chosen.slice(query.offset, query.offset + query.limit) };
    }
    async group(run, kind, step, group) {
      return this.data[run].kept[kind].filter((row) => row.step === step && row.group === group);
    }
    async prompts(run, kind) { return this.data[run].prompts[kind]; }
    async prompt(run, kind, uid) {
      const steps = new Map();
      for (const row of this.data[run].kept[kind]) {
        if (row.uid === uid) steps.set(row.step, [...(steps.get(row.step) || []), row]);
      }
      return [...steps].sort((a, b) => a[0] - b[0]).map(([step, rows]) => {
        const scored = rows.filter((row) => row.reward !== null);
        const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
        return {
          step, reward_count: scored.length,
          reward_mean: mean(scored.map((row) => row.reward)), length_mean: mean(rows.map((row) => row.length)),
        };
      });
    }
    async choices(run, kind) {
      const named = (name) => [...new Set(this.data[run].kept[kind].map((row) => row[name]).filter(Boolean))].sort();
      const parts = [...new Set(this.data[run].kept[kind].flatMap((row) => Object.keys(row.scores || {})))].sort().map((name) => PART + name);
      return { failures: this.data[run].failures[kind], parts, finish: named("finish"), data_source: named("data_source") };
    }
    listen() {}
  }

  const PART = "part: "; // as in samples.py

  function valueOf(row, name) {
    if (!name.startsWith(PART)) return row[name];
    const found = (row.scores || {})[name.slice(PART.length)];
    return found === undefined ? null : found;
  }

  function holds(value, sign, bound) {
    if (value === null || value === undefined) return false;
    if (sign === "=") return bound === "*" || value === bound;
    return sign === ">=" ? value >= Number(bound) : value <= Number(bound);
  }

  function compare(a, b, turn) {
    if (a === b) return 0;
    if (a === null) return 1; // nothing stands at the end, whichever way
    if (b === null) return -1;
    return (a < b ? -1 : 1) * turn;
  }

  const embedded = document.getElementById("data");
  T.embedded = embedded !== null;
  T.source = T.embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new ServerSource();
})(window.Tandem);

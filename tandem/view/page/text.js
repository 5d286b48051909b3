// Elements and texts. What a model wrote is only ever set as text, never as markup.
(function (T) {
  "use strict";

  // el("p", {class: "soft", onclick: f}, "text", child ...)
  T.el = function (tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(made.style, value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  };

  // Control characters, ANSI escapes, marks that turn the direction of a text, and other characters that can't be seen.
  const UNSEEN =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
  const FIRST = 4000, MORE = 20000;

  function named(letter) {
    const code = letter.charCodeAt(0).toString(16).toUpperCase();
    return code.length < 3 ? `\\x${code.padStart(2, "0")}` : `U+${code.padStart(4, "0")}`;
  }

  // The text as nodes, with a visible name in place of each character that can't be seen.
  T.visible = function (text) {
    const nodes = [];
    let last = 0;
    for (const match of text.matchAll(UNSEEN)) {
      if (match.index > last) nodes.push(text.slice(last, match.index));
      nodes.push(T.el("span", { class: "unseen" }, named(match[0])));
      last = match.index + match[0].length;
    }
    if (last < text.length) nodes.push(text.slice(last));
    return nodes;
  };

  // A part of a text as nodes; what was not sampled (inserted: start, end, start, end ...) is marked.
  function marked(text, from, to, inserted) {
    const nodes = [];
    let last = from;
    for (let i = 0; i < inserted.length; i += 2) {
      const start = Math.max(last, inserted[i]), end = Math.min(to, inserted[i + 1]);
      if (start >= end) continue;
      nodes.push(...T.visible(text.slice(last, start)));
      nodes.push(T.el("span", { class: "inserted", title: "not sampled" }, T.visible(text.slice(start, end))));
      last = end;
    }
    return [...nodes, ...T.visible(text.slice(last, to))];
  }

  // A block of text of any length: its beginning, and more on request.
  T.block = function (text, first = FIRST, inserted = []) {
    const body = T.el("pre", { class: "text", dir: "ltr" }, marked(text, 0, Math.min(first, text.length), inserted));
    if (text.length <= first) return body;
    let shown = first;
    const rest = () => `more (${(text.length - shown).toLocaleString("en")} characters)`;
    const button = T.el("button", { class: "more" }, rest());
    button.addEventListener("click", () => {
      const end = Math.min(text.length, shown + MORE);
      body.append(...marked(text, shown, end, inserted));
      shown = end;
      if (shown >= text.length) button.remove();
      else button.textContent = rest();
    });
    return T.el("div", {}, body, button);
  };

  // The answer token by token, each the darker the less likely it was; those that were not sampled are marked.
  T.tokens = function (tokens, logprobs, sampled) {
    const body = T.el("pre", { class: "text", dir: "ltr" });
    let shown = 0;
    const button = T.el("button", { class: "more" }, "more tokens");
    function add() {
      for (const end = Math.min(tokens.length, shown + 1500); shown < end; shown++) {
        if (sampled && !sampled[shown]) {
          body.append(T.el("span", { class: "inserted", title: "not sampled" }, T.visible(tokens[shown])));
          continue;
        }
        const surprise = Math.min(1, -logprobs[shown] / 5);
        const title = `log-prob ${T.number(logprobs[shown])}, p ${T.number(Math.exp(logprobs[shown]))}`;
        const shade = `rgb(from var(--bad) r g b / ${(surprise * 0.6).toFixed(2)})`;
        body.append(T.el("span", { title, style: { background: shade } }, T.visible(tokens[shown])));
      }
      if (shown >= tokens.length) button.remove();
    }
    button.addEventListener("click", add);
    const whole = T.el("div", {}, body, button);
    add();
    return whole;
  };

  T.number = function (value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return String(value);
    if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
    return size >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  };

  T.select = function (label, choices, value, onchange) {
    const options = choices.map(([name, text]) =>
      T.el("option", { value: name, selected: name === value }, text === undefined ? name : text));
    const made = T.el("select", { "aria-label": label, onchange: () => onchange(made.value) }, options);
    return T.el("label", {}, T.el("span", {}, label), made);
  };

  // A page of the documentation: headings, tables and code of its Markdown; the rest is text as it is written.
  T.page = function (markdown) {
    const parts = T.el("div", { class: "page" }), lines = markdown.split("\n");
    const cells = (line) => line.split(/(?<!\\)\|/).slice(1, -1).map((cell) => plain(cell.trim()));
    // What begins at ``from`` and goes on as long as ``same`` says.
    const run = (from, same) => {
      let end = from;
      while (end < lines.length && same(lines[end])) end++;
      return lines.slice(from, end);
    };
    for (let i = 0; i < lines.length;) {
      const head = /^(#+) (.*)/.exec(lines[i]);
      let taken = [lines[i]];
      if (head) parts.append(T.el("h3", {}, plain(head[2])));
      else if (lines[i].startsWith("```")) {
        taken = [lines[i], ...run(i + 1, (line) => !line.startsWith("```")), "```"];
        parts.append(T.el("pre", { class: "text" }, taken.slice(1, -1).join("\n")));
      } else if (lines[i].startsWith("|")) {
        taken = run(i, (line) => line.startsWith("|"));
        parts.append(T.table(cells(taken[0]), taken.slice(2).map((line) =>
          T.el("tr", {}, cells(line).map((cell) => T.el("td", {}, cell))))));
      } else if (lines[i].trim()) {
        taken = run(i, (line) => line.trim() && !/^(#+ |```|\|)/.test(line));
        parts.append(T.el("p", {}, plain(taken.join(" "))));
      }
      i += taken.length;
    }
    return parts;
  };

  function plain(markdown) {
    return markdown.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[`]|\*\*/g, "").replace(/\\\|/g, "|");
  }

  T.table = function (head, rows, attributes) {
    return T.el("div", { class: "wide" }, T.el("table", attributes || {},
      T.el("thead", {}, T.el("tr", {}, head.map((cell) => T.el("th", { scope: "col" }, cell)))),
      T.el("tbody", {}, rows)));
  };
})((window.Tandem = window.Tandem || {}));

// The page: tabs, keys, and what comes in while runs go on.
(function (T) {
  "use strict";

  const KEYS = [
    ["1 2 3", "Runs, Samples, Health"], ["/", "search or filter"], ["j k", "next and previous sample"],
    ["Enter", "open its group"], ["n p", "next and previous page"], ["Esc", "close"], ["?", "this list"],
  ];
  const TABS = ["runs", "samples", "health"];

  T.runs = [];
  T.curves = {};
  T.selected = new Set();

  T.dialog = function (title, body) {
    const dialog = document.getElementById("dialog");
    const close = T.el("button", { "aria-label": "close", onclick: () => dialog.close() }, "×");
    dialog.replaceChildren(T.el("div", { class: "bar" }, T.el("h2", {}, title), close), body);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };

  T.closeDialog = function () {
    document.getElementById("dialog").close();
  };

  function tab() {
    const name = location.hash.slice(1).split("?")[0];
    return TABS.includes(name) ? name : "runs";
  }

  function show() {
    const root = document.getElementById("view");
    root.replaceChildren();
    for (const button of document.querySelectorAll("[data-tab]")) {
      button.setAttribute("aria-selected", button.dataset.tab === tab());
    }
    T.views[tab()].show(root);
  }

  function go(name) {
    if (location.hash.slice(1).split("?")[0] === name) return;
    location.hash = name;
  }

  function onkey(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("dialog").open) return;
    if (event.key >= "1" && event.key <= "3") go(TABS[Number(event.key) - 1]);
    else if (event.key === "/") T.views[tab()].focus();
    else if (event.key === "?") help();
    else if (!(T.views[tab()].key && T.views[tab()].key(event.key))) return;
    event.preventDefault();
  }

  function help() {
    T.dialog("Keys", T.table(["key", "what it does"], KEYS.map(([key, words]) =>
      T.el("tr", {}, T.el("td", {}, T.el("kbd", {}, key)), T.el("td", {}, words)))));
  }

  function listen() {
    const live = document.getElementById("live");
    T.source.listen(
      () => T.runs.map((run) => [run.name, T.curves[run.name].rows, T.curves[run.name].generation]),
      (found) => {
        T.curves[found.run].take(found);
        T.views[tab()].changed("curves", found.run);
      },
      (state) => {
        const place = T.runs.findIndex((run) => run.name === state.name);
        T.runs[place] = state;
        T.views[tab()].changed("state", state.name);
      },
      (connected) => {
        live.textContent = connected ? "live" : "connection lost";
        live.className = connected ? "good" : "bad";
      });
  }

  async function start() {
    document.querySelectorAll("[data-tab]").forEach((button) => button.addEventListener("click", () => go(button.dataset.tab)));
    document.getElementById("help").addEventListener("click", help);
    document.addEventListener("keydown", onkey);
    window.addEventListener("hashchange", show);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
    try {
      T.runs = await T.source.runs();
      for (const run of T.runs) {
        T.curves[run.name] = new T.Curves();
        T.selected.add(run.name);
      }
      await Promise.all(T.runs.map(async (run) => T.curves[run.name].take(await T.source.curves(run.name))));
      show();
      if (!T.embedded) listen();
      document.body.dataset.ready = "yes";
    } catch (error) {
      document.getElementById("view").replaceChildren(T.el("p", { class: "bad" }, String(error.message)));
    }
  }

  start();
})(window.Tandem);

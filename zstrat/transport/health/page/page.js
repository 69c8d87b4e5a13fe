"use strict";
/* What the page shows of a run, and how it hears of it.

   It hears frames: a whole one, then changes, which have of what only grows the new alone
   (history, scalars, lines of the log). When the program ends, the last picture stays. */

const KEPT = { history: 1440, scalars: 1000, logs: 200 };
const ROWS = 48;
const COLUMNS_OF_STALENESS = 20;
const PHASES = ["wait", "draw", "pull", "compute", "push"];
const STATES = {
  none: "no run here yet", waits: "waits", runs: "live", hangs: "hangs", ended: "the run has ended",
  gone: "connection lost", refused: "not shown",
};
const GONE_WORDS = "The run has ended, or cannot be reached: this is its last picture. It is looked for again.";

const at = (id) => document.getElementById(id);
const entries = (value) => Object.entries(value ?? {});
const colorOf = (name) => `var(--${name})`;

let frame = null; // the last whole frame, with all changes to it
let isStale = false; // whether it has to be drawn
const charts = new Map();

/* ---- frames ------------------------------------------------------------------------ */

function merged(before, change) {
  if (change.kind === "whole" || before === null) return change;
  const scalars = {};
  for (const [name, points] of entries(change.metrics.scalars)) {
    scalars[name] = [...(before.metrics.scalars?.[name] ?? []), ...points].slice(-KEPT.scalars);
  }
  const logs = [...(before.metrics.logs ?? []), ...(change.metrics.logs ?? [])].slice(-KEPT.logs);
  const history = [...before.history, ...change.history].slice(-KEPT.history);
  return { ...change, history, metrics: { ...change.metrics, scalars, logs } };
}

function take(told) {
  frame = merged(frame, told);
  say(frame.state, frame.words);
  stale();
}

function stale() {
  if (isStale) return;
  isStale = true;
  if (!document.hidden) requestAnimationFrame(drawNow);
}

function drawNow() {
  if (!isStale || frame === null) return;
  isStale = false;
  show(frame);
}

function say(state, words = "") {
  setText(at("status"), STATES[state] ?? state);
  setAttribute(at("status"), "data-state", state);
  const fuller = {
    none: "This process has no run to show. A program is shown from its ClusterCoordinator on.",
    ended: "The run has ended; this is its last picture.",
  }[state] ?? words;
  setText(at("words"), fuller);
  at("words").hidden = !fuller;
}

/* ---- the picture ------------------------------------------------------------------- */

function show({ metrics, history, since, held_up, name, seconds: now }) {
  setText(at("name"), name);
  setText(at("elapsed"), elapsed(now));
  document.title = name ? `${name} · zstrat` : "zstrat";
  const tasks = entries(metrics.tasks).sort(inOrder);
  const workers = tasks.filter(([, task]) => task.phases);
  const servers = tasks.filter(([task]) => task.startsWith("ps:"));
  showTiles(metrics, tasks);
  showAlerts(tasks, since, now);
  showHeldUp(held_up ?? []);
  showHistory(history);
  showScalars(metrics.scalars);
  showPhases(workers);
  showStaleness(metrics.staleness);
  showRounds(entries(metrics.rounds));
  showLeases(entries(metrics.leases));
  showBytes(servers);
  showMemory(tasks);
  showTable(tasks, since, now);
  showLogs(metrics.logs ?? []);
  const there = {
    history: history.length, phases: workers.length, staleness: metrics.staleness?.buckets?.length,
    rounds: entries(metrics.rounds).length, leases: entries(metrics.leases).length, bytes: servers.length, memory: tasks.length, tasks: tasks.length, logs: metrics.logs?.length,
  };
  for (const card of document.querySelectorAll("[data-needs]")) card.hidden = !there[card.dataset.needs];
}

/** By job, parameter servers first, and by number. */
function inOrder([one], [other]) {
  const place = (name) => { const [job, index] = name.split(":"); return [job === "ps" ? 0 : 1, job, Number(index)]; };
  const [a, b] = [place(one), place(other)];
  return a[0] - b[0] || (a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : a[2] - b[2]);
}

function showTiles(metrics, tasks) {
  const open = tasks.filter(([, task]) => task.state === "open").length;
  const memory = tasks.reduce((all, [, task]) => all + (numberOf(task.memory) || 0), 0);
  const tiles = [
    ["steps_per_s", "Steps per second", metrics.steps_per_s, plain],
    ["examples_per_s", "Examples per second", metrics.examples_per_s, plain],
    ["scheduled_closures", "Steps scheduled", metrics.scheduled_closures, (value) => value.toLocaleString("en")],
    ["queued_closures", "Waiting to be given out", metrics.queued_closures, plain],
    ["inflight_closures", "At workers", metrics.inflight_closures, plain],
    ["staleness_p50", "Staleness, median", metrics.staleness?.p50, plain],
    ["largest_lead", "Largest lead of a worker, in closures", metrics.largest_lead, plain],
    ["open_tasks", `Tasks open, of ${tasks.length}`, tasks.length ? open : null, plain],
    ["memory", "Memory of all tasks", tasks.length ? memory : null, bytes],
  ].filter(([, , value]) => value !== null && value !== undefined);
  keyed(at("tiles"), tiles, ([key]) => key, ([key]) => make("div", {}, make("dt"), make("dd", {}, make("data", { id: `tile-${key}` }))),
    (node, [, label, value, words]) => {
      setText(node.firstChild, label);
      setText(node.lastChild.firstChild, words(numberOf(value)));
      setAttribute(node.lastChild.firstChild, "value", value);
    });
}

const isThere = (state) => !["lost", "crashed"].includes(state);

function forHowLong(name, since, now) {
  const from = numberOf(since?.[name]);
  return Number.isFinite(from) ? `for ${elapsed(Math.max(0, now - from))}` : "";
}

const times = new Map();

/** The time of day when a task came into its state: the same words each second, for they
    are read aloud when they change. */
function sinceWhen(name, since, now) {
  const from = numberOf(since?.[name]), key = `${name} ${from}`;
  if (!Number.isFinite(from)) return "";
  if (!times.has(key)) times.set(key, new Date(Date.now() - (now - from) * 1000).toLocaleTimeString());
  return `since ${times.get(key)}`;
}

function showAlerts(tasks, since, now) {
  const gone = tasks.filter(([, task]) => !isThere(task.state)).slice(0, 8);
  keyed(at("alerts"), gone, ([name]) => name, () => make("li"), (node, [name, task]) => {
    const why = task.last_error ? `: ${task.last_error}` : "";
    setText(node, `${name} is ${task.state} ${sinceWhen(name, since, now)}${why}`);
  });
}

function showHeldUp(heldUp) {
  at("held-up").hidden = !heldUp.length;
  keyed(at("held-up"), heldUp.map((each, index) => [index, each]), ([index]) => index, () => make("li"),
    (node, [index, { task, why }]) => setText(node, `${index ? "And: " : "What holds it up: "}${task} ${why}`));
}

function line(key, holder, name, points, options) {
  if (!charts.has(key)) charts.set(key, new LineChart(holder, { name, ...options }));
  charts.get(key).show(points);
  return charts.get(key);
}

/* What a row of the history has behind its seconds, and how it is shown. */
const LINES = [
  ["rate", "Steps per second", ([rate]) => rate, plain, 190],
  ["bytes-line", "Bytes per second, all parameter servers", ([, into, out]) => into + out, bytesPerSecond, 110],
  ["memory-line", "Memory of all tasks", ([, , , memory]) => memory, bytes, 110],
];

function showHistory(history) {
  for (const [id, name, of, yWords, height] of LINES) {
    const points = history.map(([when, ...row]) => [when, of(row.map(numberOf))]);
    line(id, at(id), name, points, { xWords: elapsed, xSteps: OF_CLOCKS, yWords, height, fromZero: true });
  }
}

function showScalars(scalars) {
  const shown = entries(scalars).slice(0, 12);
  const forget = new Set([...charts.keys()].filter((key) => key.startsWith("scalar ")));
  keyed(at("scalars"), shown, ([name]) => name, ([name]) => {
    const toggle = make("button", { type: "button", "aria-pressed": "false" }, "log scale");
    const holder = make("div", { class: "chart" });
    toggle.addEventListener("click", () => {
      const chart = charts.get(`scalar ${name}`);
      chart.isLog = !chart.isLog;
      setAttribute(toggle, "aria-pressed", chart.isLog);
      chart.draw();
    });
    return make("section", { class: "card" }, make("div", { class: "title" }, make("h2", {}, name), toggle), holder);
  }, (card, [name, points]) => {
    forget.delete(`scalar ${name}`);
    const pairs = points.map(([step, , value]) => [numberOf(step), numberOf(value)]);
    line(`scalar ${name}`, card.lastChild, name, pairs, { xWords: (step, axis) => `step ${plain(step, axis)}`, yWords: plain });
  });
  for (const key of forget) charts.delete(key);
}

function showPhases(workers) {
  legend(at("legend"), PHASES.map((phase) => [phase, colorOf(phase)]));
  const rows = workers.map(([name, task]) => {
    const steps = numberOf(task.phases.compute?.count) || 1;
    const parts = PHASES.map((phase) => {
      // Not every step draws or pulls: of all seconds, those for each step.
      const { mean = 0, count = 0 } = task.phases[phase] ?? {};
      return { name: phase, value: (numberOf(mean) * count) / steps || 0, color: colorOf(phase) };
    });
    return { name, parts };
  });
  const slowest = [...rows].sort((one, other) => sumOf(other) - sumOf(one)).slice(0, ROWS);
  bars(at("phases"), rows.filter((row) => slowest.includes(row)), seconds);
}

function showStaleness(staleness) {
  const all = (staleness?.buckets ?? []).map(([upper, count]) => [plain(numberOf(upper)), numberOf(count)]);
  const pairs = all.slice(0, COLUMNS_OF_STALENESS);
  const rest = all.slice(COLUMNS_OF_STALENESS).reduce((sum, [, count]) => sum + count, 0);
  if (rest) pairs.push(["more", rest]);
  columns(at("staleness"), pairs);
  const known = ["mean", "p50", "p90", "p99", "max"].filter((key) => Number.isFinite(numberOf(staleness?.[key])));
  setText(at("staleness-words"), known.map((key) => `${key} ${plain(numberOf(staleness[key]))}`).join(" · "));
}

function showRounds(optimizers) {
  const rows = optimizers.flatMap(([optimizer, { waited_for }]) => entries(waited_for).map(([worker, wait]) => (
    { name: optimizers.length > 1 ? `${worker}, ${optimizer}` : worker, parts: [{ name: "waited", value: numberOf(wait.seconds) || 0, color: colorOf("wait") }] }
  )));
  bars(at("waited"), rows.slice(0, ROWS), seconds);
  keyed(at("rounds"), optimizers, ([optimizer]) => optimizer, () => make("li"), (node, [optimizer, rounds]) => {
    const counts = (what) => entries(rounds[what]).slice(0, 8).map(([worker, count]) => `${worker} ${plain(numberOf(count))}`).join(", ") || "none";
    setText(node, `${optimizer}: ${plain(numberOf(rounds.per_s))} rounds per second · ${plain(numberOf(rounds.closed))} closed · `
      + `${plain(numberOf(rounds.waiting))} of ${plain(numberOf(rounds.workers))} contributions wait · late: ${counts("late")} · dropped: ${counts("dropped")}`);
  });
}

function showLeases(datasets) {
  const ended = datasets.filter(([, { total }]) => numberOf(total));
  bars(at("leased"), ended.map(([name, leases]) => (
    { name, parts: [{ name: "done", value: (numberOf(leases.done) || 0) / numberOf(leases.total), color: colorOf("compute") }] }
  )), percent);
  keyed(at("leases"), datasets, ([name]) => name, () => make("li"), (node, [name, leases]) => {
    const count = (what) => plain(numberOf(leases[what]) || 0);
    setText(node, `${name}: epoch ${count("epoch")} · ${count("done")} examples done · ${count("open")} leases open · ${count("skipped")} skipped`);
  });
}

function showBytes(servers) {
  const kinds = [["in", "bytes_in_per_s", colorOf("pull")], ["out", "bytes_out_per_s", colorOf("draw")]];
  legend(at("bytes-legend"), kinds.map(([name, , color]) => [name, color]));
  bars(at("bytes"), servers.slice(0, ROWS).map(([name, task]) => {
    return { name, parts: kinds.map(([kind, key, color]) => ({ name: kind, value: numberOf(task[key]) || 0, color })) };
  }), bytesPerSecond);
}

function showMemory(tasks) {
  const known = tasks.filter(([, task]) => task.memory);
  const largest = [...known].sort(([, one], [, other]) => (other.memory || 0) - (one.memory || 0)).slice(0, ROWS);
  bars(at("memory"), known.filter((task) => largest.includes(task)).map(([name, task]) => (
    { name, parts: [{ name: "memory", value: numberOf(task.memory) || 0, color: colorOf("accent") }] }
  )), bytes);
}

/* By unit: how a number is shown, and one per second. */
const WORDS = { counts: [plain, plain], bytes: [bytes, bytesPerSecond], seconds: [seconds, percent] };

/* Heading, kind, and what a task has there: a number with its words, or words. `NUMBERS` are
   those of zstrat.telemetry. */
const COLUMNS = [
  ["Task", "", (name) => name],
  ["State", "state", (name, task, howLong) => `${task.state === "open" ? "●" : task.state === "lost" ? "✕" : "○"} ${task.state}${isThere(task.state) ? "" : ` ${howLong}`}`],
  ...NUMBERS.map(([title, key, unit, isRate]) => [title, "number", (name, task) => [task[key], WORDS[unit][Number(isRate)]]]),
  ["Address", "place", (name, task) => task.address ?? ""],
  ["Last error, log file", "words", (name, task) => [task.last_error, task.log].filter(Boolean).join("\n")],
];

function showTable(tasks, since, now) {
  const head = at("columns");
  if (!head.firstChild) {
    head.append(make("tr", {}, ...COLUMNS.map(([title, kind]) => make("th", { scope: "col", class: kind }, title))));
  }
  keyed(at("tasks"), tasks.slice(0, 500), ([name]) => name,
    () => make("tr", {}, ...COLUMNS.map(([title, kind]) => make("td", { class: kind, "data-label": title }))),
    (row, [name, task]) => {
      setAttribute(row, "data-task", name);
      setAttribute(row, "data-state", task.state);
      COLUMNS.forEach(([, , told], index) => fill(row.children[index], told(name, task, forHowLong(name, since, now)), task.state === "lost"));
    });
}

function fill(cell, told, isLost) {
  const [known, words] = Array.isArray(told) ? told : [told, String];
  const value = isLost && Array.isArray(told) ? null : known; // nobody knows it any more
  const isThere = value !== null && value !== undefined && value !== "";
  if (isThere) cell.removeAttribute("data-empty");
  else setAttribute(cell, "data-empty", "");
  setAttribute(cell, "data-value", Array.isArray(told) && isThere ? value : "");
  setText(cell, isThere ? words(words === String ? value : numberOf(value)) : "");
}

function showLogs(logs) {
  const select = at("log-task"), list = at("logs");
  const names = ["", ...new Set(logs.map(([, task]) => String(task)))].sort();
  keyed(select, names, (name) => name, (name) => make("option", { value: name }, name || "all"), () => {});
  const wanted = at("log-text").value.toLowerCase();
  const seen = new Map();
  const lines = logs.map(([when, task, level, text]) => {
    // Lines may be alike; each is counted, so that it keeps its place in the list.
    const line = JSON.stringify([when, task, level, text]);
    seen.set(line, (seen.get(line) ?? 0) + 1);
    return { key: `${seen.get(line)} ${line}`, when, task: String(task), level: String(level), text: String(text) };
  }).filter(({ task, text }) => (!select.value || task === select.value) && text.toLowerCase().includes(wanted));
  const isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
  keyed(list, lines, (line) => line.key, ({ when, task, level, text }) =>
    make("li", { "data-level": level }, make("span", { class: "of" }, `${elapsed(numberOf(when))} ${task} ${level} `), text), () => {});
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

/* ---- how it hears ------------------------------------------------------------------ */

const AGAIN = 3000;

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.addEventListener("end", () => {
    source.close();
    say("ended");
    setTimeout(listen, AGAIN);
  });
  source.onerror = () => {
    if (at("status").dataset.state !== "ended") say("gone", frame ? GONE_WORDS : "Nobody answers; it is tried again.");
    if (source.readyState === EventSource.CLOSED) ask();
  };
}

/** The browser gave up: it was refused, in words that only an own request can read. */
async function ask() {
  try {
    const stop = new AbortController();
    const reply = await fetch("events", { signal: stop.signal });
    if (!reply.ok) say("refused", await reply.text());
    stop.abort();
  } catch {
    // Nobody answers, as the words say already.
  }
  setTimeout(listen, AGAIN);
}

document.addEventListener("visibilitychange", drawNow);
at("log-task").addEventListener("change", stale);
at("log-text").addEventListener("input", stale);
listen();

"use strict";
/* Pictures of numbers: lines as SVG, bars and columns as elements.

   Law of the file: a text becomes a text node, never markup. Names of tasks, lines of logs
   and errors come from processes that may be anybody's. What is there is changed, not made
   again, so that a selection, a focus and a position stay. */

const NAMESPACE = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings among these are text. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function drawn(tag, attributes = {}, text = "") {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Makes the children of `parent` those of `items`, one for each key, in this order. */
function keyed(parent, items, keyOf, create, update) {
  const known = parent.byKey ?? new Map();
  const present = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const node = known.get(key) ?? create(item);
    present.set(key, node);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  for (const [key, node] of known) if (!present.has(key)) node.remove();
  parent.byKey = present;
}

/* ---- numbers for people ------------------------------------------------------------ */

/** A number of the run: those that JSON does not have come as words. */
function numberOf(value) {
  return value === null || value === undefined || value === "" ? NaN : Number(value);
}

/* Numbers on one axis have one unit, and as many digits as tell them apart: `axis` has the
   `most` of them, and the `step` from one to the next. */

function plain(value, axis) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value), most = axis?.most || size;
  const digits = axis?.step ? Math.min(12, Math.max(4, Math.ceil(Math.log10(most / axis.step)) + 1)) : 4;
  if (size !== 0 && (most < 1e-3 || most >= 1e9)) return value.toExponential(digits - 2);
  if (size >= 1000 && digits === 4) return Math.round(value).toLocaleString("en");
  return (value || 0).toLocaleString("en", { maximumSignificantDigits: digits }); // no -0
}

function scaled(value, base, units, most) {
  if (!Number.isFinite(value)) return "–";
  let at = 0;
  while (Math.abs(most) >= base && at < units.length - 1) { value /= base; most /= base; at += 1; }
  return `${value.toLocaleString("en", { maximumSignificantDigits: value >= 100 ? 4 : 3 })} ${units[at]}`;
}

const bytes = (value, axis) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], axis?.most || value);
const bytesPerSecond = (value, axis) => Number.isFinite(value) ? `${bytes(value, axis)}/s` : "–";
const percent = (value) => Number.isFinite(value) ? `${Math.round(100 * value)} %` : "–";

function seconds(value, axis) {
  if (!Number.isFinite(value)) return "–";
  const most = axis?.most || value;
  return most < 1 ? scaled(value * 1e6, 1000, ["µs", "ms"], most * 1e6) : `${plain(value)} s`;
}

/** Of a clock: 42 s, 3:05, 2:03:05, 1 d 02:03. */
function elapsed(value, axis) {
  if (!Number.isFinite(value)) return "";
  const whole = Math.floor(value), most = Math.max(whole, axis?.most ?? 0);
  const two = (number) => String(number).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60), whole % 60];
  if (most >= 86400) return `${Math.floor(h / 24)} d ${two(h % 24)}:${two(m % 60)}`;
  return most >= 3600 ? `${h}:${two(m % 60)}:${two(s)}` : most >= 60 ? `${m}:${two(s)}` : `${s} s`;
}

/* ---- lines ------------------------------------------------------------------------- */

/** What steps of an axis of time are round: seconds, minutes, hours, days. */
const OF_CLOCKS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function roundSteps(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power);
}

/** A round step from `low` to `high` for `count` marks or fewer; of bytes, round in KiB, MiB, ... */
function stepFor(low, high, count, areBytes = false, of = null) {
  const unit = areBytes && high >= 1 ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1;
  const rough = (high - low) / unit / Math.max(1, count);
  const steps = of === null || rough > of[of.length - 1] ? roundSteps(rough) : of;
  return unit * steps.find((each) => each >= rough);
}

function ticks(low, high, step) {
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step || 0);
  return found;
}

const LEFT = 58, RIGHT = 10, TOP = 24, BOTTOM = 24;
const FLAT = 1e-6; // how much a float32 that stays the same may seem to change

const axisOf = ([low, high], step) => ({ most: Math.max(Math.abs(low), Math.abs(high)), step });

/** One line over time or steps, with a cursor for the pointer and the arrow keys. */
class LineChart {
  constructor(holder, { name, xWords, xSteps = null, yWords, fromZero = false, height = 190 }) {
    Object.assign(this, { holder, name, xWords, xSteps, yWords, fromZero, height, isLog: false, points: [], cursor: null });
    this.svg = drawn("svg", { role: "img", tabindex: 0, height });
    this.said = make("p", { class: "said", "aria-live": "off" });
    holder.append(this.svg, this.said);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(holder);
  }

  /** `points` are [x, y]; y may be NaN or infinite, which is marked at the bottom. */
  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!width) return;
    this.svg.replaceChildren();
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${this.height}`);
    this.scales(width);
    this.axes(width);
    this.curve();
    this.moveTo(this.cursor);
    setAttribute(this.svg, "aria-label", this.summary());
  }

  scales(width) {
    const usable = ([, y]) => Number.isFinite(y) && (!this.isLog || y > 0);
    const ys = this.points.filter(usable).map(([, y]) => (this.isLog ? Math.log10(y) : y));
    const xs = this.points.map(([x]) => x);
    let [low, high] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
    if (this.fromZero && !this.isLog) low = Math.min(0, low);
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (high - low <= FLAT * size) { // it is in the middle, and its axis is as large as it is
      const around = this.isLog || !size ? 0.5 : size / 2;
      [low, high] = this.fromZero ? [low, low + 1] : [low - around, high + around];
    }
    const pad = this.fromZero && !this.isLog ? 0 : (high - low) * 0.05;
    this.y = [low - pad, high + (high - low) * 0.05];
    this.x = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] ?? 0, (xs[0] ?? 0) + 1];
    const across = width - LEFT - RIGHT, down = this.height - TOP - BOTTOM;
    this.toX = (x) => LEFT + ((x - this.x[0]) / (this.x[1] - this.x[0] || 1)) * across;
    this.toY = (y) => TOP + (1 - ((this.isLog ? Math.log10(y) : y) - this.y[0]) / (this.y[1] - this.y[0])) * down;
    this.usable = usable;
  }

  axes(width) {
    const areBytes = [bytes, bytesPerSecond].includes(this.yWords);
    const yStep = stepFor(...this.y, (this.height - TOP - BOTTOM) / 22, areBytes);
    const yAxis = this.isLog ? undefined : axisOf(this.y, yStep);
    for (const y of ticks(...this.y, yStep)) {
      const at = this.toY(this.isLog ? 10 ** y : y);
      this.svg.append(drawn("line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
        drawn("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.yWords(this.isLog ? 10 ** y : y, yAxis)));
    }
    const wide = (words) => 6.5 * words.length; // about
    const room = wide(this.xWords(Math.round(this.x[1]), axisOf(this.x))) + 16;
    const xStep = stepFor(...this.x, Math.floor((width - LEFT - RIGHT) / room), false, this.xSteps);
    this.xAxis = axisOf(this.x, xStep);
    for (const x of ticks(...this.x, xStep)) {
      const words = this.xWords(x, this.xAxis), at = Math.min(this.toX(x), width - wide(words) / 2);
      this.svg.append(drawn("text", { x: at, y: this.height - 6, "text-anchor": "middle" }, words));
    }
  }

  curve() {
    const floor = this.height - BOTTOM;
    let line = "", under = "", before = null;
    for (const point of this.points) {
      const x = this.toX(point[0]).toFixed(1);
      if (this.usable(point)) {
        const y = this.toY(point[1]).toFixed(1);
        line += `${before === null ? "M" : "L"}${x} ${y}`;
        under += before === null ? `M${x} ${floor}L${x} ${y}` : `L${x} ${y}`;
        before = x;
        continue;
      }
      if (before !== null) under += `L${before} ${floor}Z`;
      before = null;
      this.svg.append(drawn("line", { class: "odd", x1: x, x2: x, y1: floor - 8, y2: floor }));
    }
    if (before !== null) under += `L${before} ${floor}Z`;
    this.svg.append(drawn("path", { class: "under", d: under }), drawn("path", { class: "curve", d: line }));
  }

  point(offset) {
    let nearest = null, best = Infinity;
    this.points.forEach(([x], at) => {
      const far = Math.abs(this.toX(x) - offset);
      if (far < best) [nearest, best] = [at, far];
    });
    this.moveTo(nearest);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.moveTo(Math.min(last, Math.max(0, (this.cursor ?? last) + by)));
  }

  moveTo(index) {
    this.cursor = index !== null && index < this.points.length ? index : null;
    this.svg.querySelectorAll(".cursor, .dot").forEach((node) => node.remove());
    const point = this.points[this.cursor ?? this.points.length - 1];
    setText(this.said, point ? `${this.yWords(point[1])} at ${this.xWords(point[0], this.xAxis)}` : "");
    if (this.cursor === null) return;
    const x = this.toX(point[0]);
    this.svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
    if (this.usable(point)) this.svg.append(drawn("circle", { class: "dot", cx: x, cy: this.toY(point[1]), r: 4 }));
  }

  summary() {
    const known = this.points.filter(([, y]) => Number.isFinite(y)).map(([, y]) => y);
    if (!known.length) return `${this.name}: nothing yet`;
    const last = this.points[this.points.length - 1][1];
    return `${this.name}: ${this.yWords(last)} now; from ${this.yWords(Math.min(...known))} to ${this.yWords(Math.max(...known))}`;
  }
}

/* ---- bars and columns -------------------------------------------------------------- */

const sumOf = (row) => row.parts.reduce((all, part) => all + (part.value || 0), 0);

/** Rows `{name, parts: [{name, value, color}]}`; all have one scale, and one unit of `words`. */
function bars(list, rows, words) {
  const most = Math.max(...rows.map(sumOf), Number.MIN_VALUE), axis = { most };
  keyed(list, rows, (row) => row.name, () => make("li", {}, make("span", { class: "who" }),
    make("span", { class: "track", "aria-hidden": "true" }), make("data", { class: "sum" })), (node, row) => {
    const [who, track, sum] = node.children;
    setText(who, row.name);
    setAttribute(who, "title", row.name);
    keyed(track, row.parts, (part) => part.name, () => make("i"), (bar, part) => {
      bar.style.setProperty("--of", part.color);
      bar.style.width = `${(100 * (part.value || 0)) / most}%`;
      setAttribute(bar, "title", `${part.name}: ${words(part.value, axis)}`);
    });
    setText(sum, sumOf(row) || words !== seconds ? words(sumOf(row), axis) : "–");
    setAttribute(sum, "value", sumOf(row));
    setAttribute(node, "aria-label", `${row.name}: ${row.parts.map((part) => `${part.name} ${words(part.value, axis)}`).join(", ")}`);
  });
}

/** Columns of `[label, count]`. */
function columns(list, pairs) {
  const most = Math.max(...pairs.map(([, count]) => count), 1);
  keyed(list, pairs, ([label]) => label, () => make("li", {}, make("data"), make("i"), make("span")), (node, [label, count]) => {
    const [words, bar, below] = node.children;
    // Between many narrow columns there is room for what is said of the high ones.
    const isSaid = count && (pairs.length <= 10 || count > most / 12);
    setText(words, isSaid ? count.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 2 }) : "");
    setAttribute(words, "value", count);
    bar.style.height = `${(75 * count) / most}%`;
    setText(below, label);
    setAttribute(node, "aria-label", `${label}: ${count}`);
  });
}

function legend(list, entries) {
  keyed(list, entries, ([name]) => name, ([name]) => make("li", {}, name), (node, [, color]) => node.style.setProperty("--of", color));
}

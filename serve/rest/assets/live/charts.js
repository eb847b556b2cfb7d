// Plots of the points: lines that differ in colour and dashes, a keyboard cursor, and their numbers.
import { bytes, clock, count, figures, interval, make, ms, percent } from "./text.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2, 5, 6], [14, 4]];
const STEPS_S = [5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600];
/** Distances of ticks in bytes: powers of two, so that they are round in KiB and MiB. */
const BYTES = Array.from({ length: 45 }, (_, i) => 2 ** i);
/** Distances of ticks where there are no parts of one. */
const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const SVG = "http://www.w3.org/2000/svg";
const rate = (value) => (value == null ? "–" : `${figures(value)}/s`);
const perSecond = (value) => (point, width) => value(point) / width;
const share = (part, all) => (all ? part / all : null);

/** Point of the server's stream, by name. */
export function named(point) {
  const [at, requests, answered, late, p50, p99, p999, over50, over99, busy, queue, reserved, causes] = point;
  return { at, requests, answered, late, p50, p99, p999, over50, over99, busy, queue, reserved, causes };
}

const CAUSES = ["queue", "prepare", "interference", "estimate", "overload", "network"];
export const PLOTS = [
  { id: "requests", title: "Requests a second", format: rate, lines: [
    ["in time", perSecond((p) => p.answered - p.late)],
    ["late", perSecond((p) => p.late)],
    ["without a result", perSecond((p) => p.requests - p.answered)]] },
  { id: "late", title: "Share of late answers, with its 95 % interval", format: percent, band: true, colours: [2, 2, 2], lines: [
    ["late", (p) => share(p.late, p.answered)],
    ["at most", (p) => interval(p.late, p.answered)[1]],
    ["at least", (p) => interval(p.late, p.answered)[0]]] },
  { id: "latency", title: "Latency", format: ms, log: true, lines: [
    ["p50", (p) => p.p50], ["p99", (p) => p.p99], ["p99.9", (p) => p.p999]] },
  { id: "over", title: "Latency ÷ target (late above 1)", format: figures, log: true, limit: () => 1, lines: [
    ["p50", (p) => p.over50], ["p99", (p) => p.over99]] },
  { id: "causes", title: "Late answers a second, by cause", format: rate,
    lines: CAUSES.map((name, i) => [name, perSecond((p) => p.causes[i])]) },
  { id: "queue", title: "Requests waiting for a lane, at most", format: (v) => (v == null ? "–" : count(Math.round(v))), steps: COUNTS, lines: [
    ["waiting", (p) => p.queue ?? 0]] },
  { id: "lanes", title: "Requests running at once, mean", format: figures, limit: (seen) => seen.server?.lanes, lines: [
    ["running", (p) => p.busy]] },
  { id: "memory", title: "Memory reserved by running requests, at most", format: bytes, steps: BYTES, limit: (seen) => seen.server?.budget_bytes, near: true, lines: [
    ["reserved", (p) => p.reserved ?? 0]] },
];

const hours = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const hour = (seconds) => (seconds % 60 ? clock(seconds) : hours.format(new Date(1000 * seconds)));
/** Leaves a grid line and a label at powers of ten only. */
const decades = (u, splits) => splits.map((v) => (Math.abs(Math.log10(v) % 1) < 1e-9 ? v : null));
/** Returns a number's text without zeros behind the point. */
const short = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Resolves a custom property, system colours too, to what a canvas takes. */
function colour(name) {
  const probe = make("i");
  probe.style.color = style(name);
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export class Chart {
  /** `opened(from, until)` is called with the seconds of the point that is chosen; without it none is. */
  constructor(spec, opened = null) {
    this.spec = spec;
    this.opened = opened;
    this.keys = spec.lines.map(() => make("output"));
    const legend = make("ul", { class: "legend" }, ...spec.lines.map(([name], i) => {
      const sample = document.createElementNS(SVG, "svg");
      const path = document.createElementNS(SVG, "path");
      sample.setAttribute("viewBox", "0 0 27 10");
      sample.setAttribute("aria-hidden", "true");
      path.setAttribute("d", "M0 5H27");
      path.setAttribute("stroke-dasharray", DASHES[i].join(" "));
      path.style.setProperty("--c", `var(--c${this.tone(i)})`);
      sample.append(path);
      return make("li", {}, sample, `${name} `, this.keys[i]);
    }));
    this.box = make("div", { class: "plot", id: `plot-${spec.id}`, tabindex: 0, role: "slider", "aria-label":
      `${spec.title}: arrow keys move along time${opened ? ", Enter lists the requests" : ""}`, "aria-valuemin": 0, "aria-valuenow": 0,
      onkeydown: (event) => this.pressed(event), onblur: () => this.move(null) });
    this.numbers = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Numbers: ${spec.title}` });
    this.details = make("details", { ontoggle: () => this.tabulate() }, make("summary", {}, "Numbers"), this.numbers);
    this.element = make("figure", { class: "card", style: null }, make("h2", {}, spec.title), legend, this.box, this.details);
    this.element.style.margin = "0";
    this.at = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  tone(i) { return this.spec.colours?.[i] ?? i + 1; }
  size() { return { width: Math.max(this.box.clientWidth, 50), height: Math.max(this.box.clientHeight, 80) }; }

  /** Builds the plot anew, as after a change of colours. */
  build() {
    this.plot?.destroy();
    const { spec } = this, soft = colour("--soft"), grid = { stroke: colour("--grid"), width: 1 };
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const tick = { stroke: soft, grid, font, ticks: { show: false } };
    const first = (u) => u.data[0][0], last = (u) => u.data[0].at(-1);
    this.plot = new uPlot({
      ...this.size(), legend: { show: false }, padding: [8, 20, 0, 0],
      cursor: { drag: { setScale: false }, sync: { key: "time" }, points: { size: 7 } },
      select: { show: false },
      scales: {
        x: { range: (u) => (u.data[0].length ? [first(u), last(u)] : [0, 1]) },
        y: spec.log
          ? { distr: 3, range: (u, low, high) => logRange(low, high, this.limit) }
          : { range: (u, low, high) => [0, 1.08 * (Math.max(high || 0, spec.near && (high || 0) < this.limit / 3 ? 0 : this.limit || 0) || 1)] },
      },
      axes: [
        { ...tick, size: 26, space: 56, incrs: STEPS_S, values: (u, splits) => splits.map((at) => hour(at)) },
        { ...tick, size: 62, space: 34, ...(spec.steps && { incrs: spec.steps }), ...(spec.log && { filter: decades }), values: (u, splits) => splits.map((v) => (v == null ? "" : short(spec.format(v)))) },
      ],
      series: [{}, ...spec.lines.map(([name], i) => ({
        label: name, stroke: colour(`--c${this.tone(i)}`), width: spec.band && i ? 0 : 1.7, dash: DASHES[i],
        points: { show: (u) => u.data[i + 1].filter((v) => v != null).length < 3, size: 5 } }))],
      bands: spec.band ? [{ series: [2, 3], fill: colour("--band") }] : [],
      hooks: { draw: [(u) => this.drawLimit(u)], setCursor: [(u) => this.told(u.cursor.idx)] },
    }, this.data ?? [[], ...spec.lines.map(() => [])], this.box);
    this.box.querySelectorAll("canvas").forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
    this.plot.over.addEventListener("click", () => this.open(this.plot.cursor.idx));
  }

  show(seen) {
    this.seen = seen;
    const limit = this.spec.limit?.(seen);
    this.limit = limit;
    this.data = [seen.points.map((p) => p.at), ...this.spec.lines.map(([, value]) => seen.points.map((p) => value(p, seen.width_s)))];
    if (this.plot) this.plot.setData(this.data);
    else this.build();
    this.box.setAttribute("aria-valuemax", Math.max(seen.points.length - 1, 0));
    if (this.at != null) this.move(this.at);
    else this.told(this.plot.cursor.idx);
    if (this.details.open) this.tabulate();
  }

  drawLimit(u) {
    if (this.limit == null) return;
    const y = u.valToPos(this.limit, "y", true);
    if (!(y >= u.bbox.top && y <= u.bbox.top + u.bbox.height)) return;
    u.ctx.save();
    u.ctx.setLineDash([]);
    u.ctx.strokeStyle = colour("--text");
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
    u.ctx.restore();
  }

  /** Writes the values of a point, or of the last whole one, into the legend. */
  told(index) {
    if (!this.data) return;
    const at = index ?? Math.max(this.data[0].length - 3, 0);
    this.keys.forEach((key, i) => { key.value = this.spec.format(this.data[i + 1][at]); });
  }

  text(at) {
    return `${clock(this.data[0][at])}: ${this.spec.lines.map(([name], i) => `${name} ${this.spec.format(this.data[i + 1][at])}`).join(", ")}`;
  }

  move(at) {
    this.at = at;
    if (!this.plot || !this.data?.[0].length) return;
    if (at == null) { this.plot.setCursor({ left: -10, top: -10 }); return; }
    this.at = Math.min(Math.max(at, 0), this.data[0].length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][this.at], "x"), top: 10 });
    this.told(this.at);
    this.box.setAttribute("aria-valuenow", this.at);
    this.box.setAttribute("aria-valuetext", this.text(this.at));
  }

  pressed(event) {
    const last = (this.data?.[0].length ?? 0) - 1, at = this.at ?? last;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at + 10, PageDown: at - 10, Home: 0, End: last }[event.key];
    if (to != null) this.move(to);
    else if (event.key === "Enter" || event.key === " ") this.open(at);
    else return;
    event.preventDefault();
  }

  open(index) {
    if (!this.opened || index == null || !this.data?.[0].length) return;
    const from = this.data[0][index];
    this.opened(from, from + this.seen.width_s, this.box);
  }

  tabulate() {
    if (!this.details.open || !this.data) return;
    const heads = ["Time", ...this.spec.lines.map(([name]) => name)].map((name, i) => make("th", { scope: "col", class: i ? "n" : "" }, name));
    const rows = this.data[0].map((_, i) => i).reverse().slice(0, 60).map((at) => make("tr", {}, make("td", {}, clock(this.data[0][at])),
      ...this.spec.lines.map((_, i) => make("td", { class: "n" }, this.spec.format(this.data[i + 1][at])))));
    this.numbers.replaceChildren(make("table", { "aria-label": this.spec.title }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
  }
}

function logRange(low, high, limit) {
  const values = [low, high, limit].filter((value) => value > 0 && Number.isFinite(value));
  if (!values.length) return [0.1, 10];
  return [10 ** Math.floor(Math.log10(Math.min(...values))), 10 ** Math.ceil(Math.log10(Math.max(...values) * 1.01))];
}

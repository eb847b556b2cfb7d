// The live page: a stream of numbers, and what shows them.
import { Chart, named, PLOTS } from "./charts.js";
import { showRequests, showStory, close } from "./story.js";
import { follow as read, tell } from "./stream.js";
import { bytes, clock, count, figures, fill, HEADS, list, make, ms, numbers, percent, table, unbroken, zone } from "./text.js";

const WINDOWS = { "5m": "5 minutes", "1h": "1 hour", "6h": "6 hours", "1d": "1 day" };
const FOCUS = ["model", "version", "tenant"];
const SHOWN = 10;
const at = (id) => document.getElementById(id);
const points = new Map();
const charts = PLOTS.map((spec) => new Chart(spec, (from, until) => go({ ...chosen(), from, until })));
const whole = new Set();
let stream = null, streamed = "";

at("plots").append(...charts.map((chart) => chart.element));
at("zone").textContent = `Times are in ${zone}.`;
const windows = document.querySelector(".windows");
for (const [value, name] of Object.entries(WINDOWS)) {
  windows.append(make("label", {}, make("input", { type: "radio", name: "window", value, onchange: () => go({ ...chosen(), window: value }) }), name));
}
at("choices").addEventListener("submit", (event) => {
  event.preventDefault();
  const request = at("uid").value.trim();
  if (request) go({ ...chosen(), request });
});
at("focus").querySelector("button").addEventListener("click", () => go({ window: chosen().window }));
for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
  matchMedia(query).addEventListener("change", () => charts.forEach((chart) => chart.data && chart.build()));
}

/** Returns window, model, version and tenant as the address has them. */
function chosen() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = { window: WINDOWS[given.get("window")] ? given.get("window") : "5m" };
  FOCUS.forEach((name) => given.get(name) && (found[name] = given.get(name)));
  return found;
}

function go(to) {
  location.hash = new URLSearchParams(Object.entries(to).map(([name, value]) => [name, String(value)]));
}

/** Does what the address says: which stream, and what the dialog shows. */
function follow() {
  const given = new URLSearchParams(location.hash.slice(1)), focus = chosen();
  document.querySelectorAll(".windows input").forEach((input) => { input.checked = input.value === focus.window; });
  const names = FOCUS.filter((name) => focus[name]).map((name) => `${name} ${focus[name]}`);
  at("focus").hidden = !names.length;
  at("focus").querySelector("span").textContent = `Only ${names.join(", ")}.`;
  const query = new URLSearchParams(focus).toString();
  if (query !== streamed) {
    streamed = query;
    points.clear();
    stream?.abort();
    stream = read(`/live/events?${query}`, show);
  }
  const { window: _, ...filter } = focus;
  if (given.get("request")) showStory(given.get("request"), given.get("at"));
  else if (given.get("from")) showRequests(Number(given.get("from")), Number(given.get("until")), { ...filter, cause: given.get("cause") });
  else close();
}
addEventListener("hashchange", follow);

function show(name, seen) {
  if (name === "all") points.clear();
  seen.points.map(named).forEach((point) => points.set(point.at, point));
  for (const time of points.keys()) if (time < seen.begin_s) points.delete(time);
  seen.points = [...points.values()].sort((a, b) => a.at - b.at);
  tell("live", "live");
  const server = seen.server;
  at("facts").textContent = server
    ? `gnnserve ${server.version} on ${server.device}, ${lanesOf(server)}, policy ${server.policy}, discipline ${server.discipline}; ` +
      `started ${clock(server.started_unix_ns / 1e9)}` : "";
  at("empty").hidden = seen.total.requests > 0;
  list(at("alarms"), seen.alarms);
  tiles(seen);
  charts.forEach((chart) => chart.show(seen));
  tables(seen);
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
}

/** Returns the number of lanes in words: `8 lanes, 2 at once`. */
function lanesOf({ lanes, lanes_started }) {
  const all = lanes_started || lanes;
  return `${all} ${all === 1 ? "lane" : "lanes"}${all === lanes ? "" : `, ${lanes} at once`}`;
}

function tiles(seen) {
  const { total, state, server } = seen, started = server?.lanes_started || server?.lanes, late = total.answered ? total.late / total.answered : null;
  const seconds = seen.end_s - seen.begin_s;
  const [low, high] = total.interval;
  const rows = [
    ["Late answers", percent(late), total.answered ? `95 % interval ${percent(low)} to ${percent(high)}` : "nothing answered", late > 0.01],
    ["Requests", count(total.requests), total.requests ? `${figures(total.requests / seconds)} a second; ${count(total.requests - total.answered)} without a result` : ""],
    ["Latency, p50", ms(total.latency_ms[0]), total.answered ? `${unbroken("p99", ms(total.latency_ms[2]))}, ${unbroken("p99.9", ms(total.latency_ms[3]))}` : ""],
    ["Latency ÷ target, p99", figures(total.over[2]), total.answered ? `${unbroken("p50", figures(total.over[0]))}, ${unbroken("p99.9", figures(total.over[3]))}` : "", total.over[2] > 1],
    ["Waiting now", state ? count(state.queue) : "–", "accepted, not yet on a lane"],
    ["Lanes up", state && server ? `${Math.min(state.lanes_up, started)} of ${started}` : "–", server ? `${server.lanes} run at once` : "", state && server && state.lanes_up < started],
    ["Memory reserved now", state ? bytes(state.reserved_bytes) : "–", server ? `of ${bytes(server.budget_bytes)}` : ""],
  ];
  fill(at("numbers"), rows);
}

let shownTables = "", latest = null;
/** Shows the tables; only what changed is made again, so that a reader keeps the place. */
function tables(seen) {
  latest = seen;
  const key = JSON.stringify([seen.models, seen.tenants, seen.causes, seen.reasons, seen.jobs, [...whole], streamed]);
  if (key === shownTables) return;
  shownTables = key;
  const held = document.activeElement?.dataset?.key;
  const choose = (to, text, held) => make("button", { class: "name", type: "button", "data-key": held, onclick: () => go({ window: chosen().window, ...to }) }, text);
  const models = seen.models.map((line) => [line.name ? choose({ model: line.name, version: line.version }, `${line.name} ${line.version}`.trim(), `m ${line.name} ${line.version}`) : "others", ...numbers(line)]);
  const named = seen.tenants.reduce((sum, line) => sum + line.requests, 0);
  const tenants = seen.tenants.map((line) => [line.name ? choose({ tenant: line.name }, line.name, `t ${line.name}`) : "others", ...numbers(line)]);
  const late = Object.values(seen.causes).reduce((a, b) => a + b, 0);
  const causes = Object.entries(seen.causes).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([cause, n]) => [
    make("button", { class: "name", type: "button", "data-key": `c ${cause}`, onclick: () => go({ ...chosen(), cause, from: seen.begin_s, until: seen.end_s }) }, cause),
    count(n), percent(n / late)]);
  const reasons = Object.entries(seen.reasons).map(([reason, n]) => [reason, seen.meanings[reason] ?? "", count(n)]);
  const jobs = seen.jobs.map((job) => [
    String(job.job_id), `${job.model} on ${job.graph}`, job.message ? `${job.state}: ${job.message}` : job.version ? `${job.state}, version ${job.version}` : job.state,
    make("progress", { max: job.epochs, value: job.epochs_done, "aria-label": `epochs of job ${job.job_id}` }), `${count(job.epochs_done)} of ${count(job.epochs)}`,
    job.epochs_done ? figures(job.loss) : "–", job.epoch_ns ? ms(job.epoch_ns / 1e6) : "–"]);
  const cards = [
    card("By model and version", "models", models, [["Model"], ...HEADS]),
    tenants.length && named ? card("By tenant", "tenants", tenants, [["Tenant"], ...HEADS]) : null,
    card("Why answers were late", "causes", causes, [["Cause"], ["Answers", "n"], ["Share", "n"]], "No late answers."),
    card("Requests without a result", "reasons", reasons, [["Reason"], ["Meaning"], ["Requests", "n"]], "Every request got a result."),
    jobs.length ? card("Training", "jobs", jobs, [["Job"], ["Model and graph"], ["State"], ["Progress"], ["Epochs", "n"], ["Loss", "n"], ["An epoch", "n"]], "", idle(seen)) : null,
  ];
  at("tables").replaceChildren(...cards.filter(Boolean));
  if (held) document.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus();
}

/** Returns how much of the cores requests left, and how many jobs use that now. */
function idle({ points, server, jobs, focus }) {
  const busy = points.reduce((sum, point) => sum + point.busy, 0) / Math.max(points.length, 1);
  const running = jobs.filter((job) => job.state === "running").length;
  const left = server && !focus.model && !focus.tenant ? `Requests left ${figures(Math.max(server.lanes - busy, 0))} of ${server.lanes} ${server.lanes === 1 ? "core" : "cores"} in this time. ` : "";
  return `${left}${running ? `${running} ${running === 1 ? "job trains" : "jobs train"} now.` : "No job trains now."}`;
}

function card(title, id, rows, heads, none = "No requests.", note = "") {
  const box = make("section", { class: "card", id: `by-${id}`, "aria-label": title }, make("h2", {}, title));
  if (!rows.length) { box.append(make("p", { class: "muted" }, none)); return box; }
  if (note) box.append(make("p", { class: "muted" }, note));
  box.append(table(title, heads, whole.has(id) ? rows : rows.slice(0, SHOWN)));
  if (rows.length > SHOWN) {
    const text = whole.has(id) ? "Show fewer" : `Show all ${rows.length}`;
    box.append(make("button", { type: "button", "data-key": `w ${id}`, onclick: () => {
      if (!whole.delete(id)) whole.add(id);
      tables(latest);
    } }, text));
  }
  return box;
}

follow();

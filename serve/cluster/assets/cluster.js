// The page of a cluster: numbers of all machines together, and a row for each.
import { Chart, named, PLOTS } from "./charts.js";
import { follow, tell } from "./stream.js";
import { bytes, clock, count, figures, fill, HEADS, list, make, ms, numbers, percent, table, zone } from "./text.js";

const TITLES = { latency: "Latency of the slowest machine", over: "Latency ÷ target where it is highest (late above 1)" };
const at = (id) => document.getElementById(id);
const charts = PLOTS.map((spec) => new Chart({ ...spec, title: TITLES[spec.id] ?? spec.title }));

at("plots").append(...charts.map((chart) => chart.element));
at("zone").textContent = `Times are in ${zone}.`;
for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
  matchMedia(query).addEventListener("change", () => charts.forEach((chart) => chart.data && chart.build()));
}

function show(name, seen) {
  seen.points = seen.points.map(named);
  const silent = seen.machines.filter((one) => !one.total && one.problem);
  tell("live", "live");
  list(at("alarms"), [...silent.map((one) => `${one.machine} ${silence(one)}`), ...seen.alarms]);
  tiles(seen);
  charts.forEach((chart) => chart.show(seen));
  replace(at("machines"), machines(seen));
  replace(at("tables"), models(seen), without(seen));
  document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
}

/** Returns since when and why a machine says nothing. */
function silence({ heard_s, problem }) {
  return `says nothing ${heard_s ? `since ${clock(heard_s)}` : "yet"}: ${problem}`;
}

function tiles({ machines, total, state, server, begin_s, end_s }) {
  const answering = machines.filter((one) => one.total).length, late = total.answered ? total.late / total.answered : null;
  const [low, high] = total.interval, seconds = Math.max(end_s - begin_s, 1);
  fill(at("numbers"), [
    ["Machines", `${answering} of ${machines.length}`, "answer", answering < machines.length],
    ["Late answers", percent(late), total.answered ? `95 % interval ${percent(low)} to ${percent(high)}` : "nothing answered", late > 0.01],
    ["Requests", count(total.requests), total.requests ? `${figures(total.requests / seconds)} a second; ${count(total.requests - total.answered)} without a result` : ""],
    ["Latency, p99, at most", ms(total.latency_ms[2]), total.answered ? `p50 at most ${ms(total.latency_ms[0])}` : ""],
    ["Latency ÷ target, p99, at most", figures(total.over[2]), total.answered ? `p50 at most ${figures(total.over[0])}` : "", total.over[2] > 1],
    ["Waiting now", count(state.queue), "accepted, not yet on a lane"],
    ["Lanes up", `${Math.min(state.lanes_up, server.lanes_started)} of ${server.lanes_started}`, `${server.lanes} run at once`, state.lanes_up < server.lanes_started],
    ["Memory reserved now", bytes(state.reserved_bytes), `of ${bytes(server.budget_bytes)}`],
  ]);
}

function machines(seen) {
  const rows = seen.machines.map((one) => {
    const name = make("a", { href: `http://${one.address}/` }, one.machine);
    const { total, state, server } = one, lanes = server && (server.lanes_started || server.lanes);
    if (!total) return [name, [one.problem ? silence(one) : "is being asked", one.problem ? "state bad" : "state"], ...Array(8).fill("–")];
    return [name, ["answers", "state"], ...numbers(total), state ? count(state.queue) : "–",
      state && server ? [`${Math.min(state.lanes_up, lanes)} of ${lanes}`, state.lanes_up < lanes ? "n bad" : "n"] : "–",
      state ? bytes(state.reserved_bytes) : "–"];
  });
  return card("By machine", table("By machine", [["Machine"], ["State"], ...HEADS, ["Waiting", "n"], ["Lanes up", "n"], ["Reserved", "n"]], rows));
}

function models(seen) {
  const rows = seen.models.map((line) => [`${line.name || "others"} ${line.version}`.trim(), ...numbers(line)]);
  return card("By model and version", rows.length ? table("By model and version", [["Model"], ...HEADS], rows) : make("p", { class: "muted" }, "No requests."));
}

function without(seen) {
  const rows = Object.entries(seen.reasons).map(([reason, n]) => [reason, seen.meanings[reason] ?? "", count(n)]);
  return card("Requests without a result", rows.length
    ? table("Requests without a result", [["Reason"], ["Meaning"], ["Requests", "n"]], rows)
    : make("p", { class: "muted" }, "Every request got a result."));
}

const card = (title, body) => make("section", { class: "card", "aria-label": title }, make("h2", {}, title), body);

/** Shows these elements; what is the same stays, so that a reader keeps the place, and the link that has the focus. */
function replace(box, ...elements) {
  const held = box.contains(document.activeElement) ? document.activeElement.href : null;
  const made = make("div", {}, ...elements);
  if (box.innerHTML === made.innerHTML) return;
  box.replaceChildren(...made.children);
  if (held) [...box.querySelectorAll("a")].find((link) => link.href === held)?.focus();
}

follow("/live/events", show);

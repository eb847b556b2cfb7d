// The dialog: requests behind a point, and the story of one.
import { bytes, clock, count, figures, make, ms, percent, table } from "./text.js";

const dialog = document.getElementById("detail");
const title = document.getElementById("detail-title");
const body = document.getElementById("detail-body");
let back = null, question = 0;
dialog.addEventListener("close", () => { question++; location.hash = withoutDetail(); back?.focus(); });

/** Returns the fragment without what the dialog shows. */
function withoutDetail() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  ["request", "at", "from", "until", "cause"].forEach((name) => chosen.delete(name));
  return chosen.toString();
}

async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ?? answer.statusText);
  return told;
}

/** Fills the dialog with what `fill` returns for an answer, unless another question came meanwhile. */
async function show(heading, path, fill) {
  const mine = ++question;
  title.textContent = heading;
  body.replaceChildren(make("p", { role: "status" }, "Looking it up …"));
  if (!dialog.open) { back = document.activeElement; dialog.showModal(); }
  title.focus();
  let parts;
  try { parts = fill(await ask(path)); }
  catch (error) { parts = [make("p", { role: "alert" }, error.message)]; }
  if (mine === question) body.replaceChildren(...parts);
}

export function close() { if (dialog.open) dialog.close(); }

/** Lists the requests that ended between two seconds, of one model, tenant or cause. */
export function showRequests(from, until, focus) {
  const query = new URLSearchParams({ from, until });
  Object.entries(focus).forEach(([name, value]) => value && query.set(name, value));
  const when = until - from > 1 ? `between ${clock(from)} and ${clock(until)}` : `at ${clock(from)}`;
  return show(`Requests that ended ${when}`, `/live/requests?${query}`, (found) => {
    const rows = found.requests.map((one) => [
      uidLink(one), one.version ? `${one.model} ${one.version}` : one.model, one.tenant || "–",
      [one.status === "OK" ? (one.late ? `late: ${one.cause}` : "in time") : one.reason || one.status, one.late || one.status !== "OK" ? "bad" : ""],
      ms(one.latency_ms), one.target_ms ? figures(one.latency_ms / one.target_ms) : "–",
    ]);
    const heads = [["Request"], ["Model"], ["Tenant"], ["Outcome"], ["Latency", "n"], ["÷ target", "n"]];
    const more = found.count > rows.length ? ` The first ${rows.length} are listed, those without a result first, then those furthest beyond their target.` : "";
    return [make("p", {}, `${count(found.count)} ${found.count === 1 ? "request" : "requests"}.${more}`), rows.length ? table("Requests", heads, rows) : null].filter(Boolean);
  });
}

function uidLink(one) {
  const chosen = new URLSearchParams(withoutDetail());
  chosen.set("request", one.request_uid);
  if (one.arrived_unix_us) chosen.set("at", String(one.arrived_unix_us));
  return make("a", { href: `#${chosen}` }, one.request_uid);
}

/** Tells the story of a request; `at`, its arrival in µs, makes the search short. */
export function showStory(uid, at) {
  const query = at ? `?at=${encodeURIComponent(at)}` : "";
  return show(`Request ${uid}`, `/live/requests/${encodeURIComponent(uid)}${query}`, (told) => story(uid, told));
}

function story(uid, told) {
  const facts = told.facts;
  const stages = Object.entries(facts.stages_ms).filter(([, value]) => value > 0);
  const parts = [
    make("p", { class: "why" }, told.why),
    make("p", {}, `Model ${facts.model}, version ${told.version}, ${count(facts.num_nodes)} nodes, ${count(facts.num_edges)} edges` +
      (facts.tenant ? `, tenant ${facts.tenant}` : "") + `; arrived at ${clock(facts.arrived_unix_ns / 1e9)}; ` +
      `${told.status === "OK" ? "answered" : "given up"} after ${ms(facts.latency_ms)}; ` +
      (facts.qos_target_ms ? `its target was ${ms(facts.qos_target_ms)}.` : "it had no target.")),
    told.message ? make("p", {}, told.message) : null,
  ];
  if (told.remedies.length) parts.push(make("h3", {}, "What would have helped"), make("ul", {}, ...told.remedies.map((one) => make("li", {}, one))));
  if (stages.length && facts.lane >= 0) {
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    const rows = stages.map(([name, value]) => {
      const piece = make("i", { class: `s-${name}` });
      piece.style.flex = `${value} 0 0`;
      bar.append(piece);
      return [make("span", {}, make("span", { class: `key s-${name}`, "aria-hidden": "true" }), told.stage_names[name] ?? name), ms(value), percent(value / facts.latency_ms)];
    });
    parts.push(make("h3", {}, "Where the time went"), bar, table("Stages", [["Stage"], ["Time", "n"], ["Share", "n"]], rows));
    parts.push(make("p", { class: "muted" }, `Estimated run ${ms(facts.run_estimate_ms)}, estimated time alone ${ms(facts.solo_estimate_ms)}; ` +
      `executor ${told.executor} on lane ${facts.lane}, beside ${facts.co_runners || "no"} other ${facts.co_runners === 1 ? "run" : "runs"} at its launch.`));
  }
  if (facts.group_mates.length) {
    parts.push(make("h3", {}, `Group of ${facts.group_size}`), make("p", {}, "Planned together with ", ...facts.group_mates.flatMap((mate, i) => [i ? ", " : "", uidLink({ request_uid: mate })]), "."));
  }
  if (told.beside.length) parts.push(make("h3", {}, "What ran while it was in the server"),
    told.left_out ? make("p", {}, `The ${told.beside.length} runs nearest to its own, of ${count(told.beside.length + told.left_out)}.`) : null,
    lanes(uid, told), keys(), besideTable(told));
  return parts.filter(Boolean);
}

/** Draws the runs on their lanes, from the request's arrival to its answer. */
function lanes(uid, told) {
  const span = told.facts.latency_ms, percentOf = (value) => `${(100 * Math.min(Math.max(value, 0), span)) / span}%`;
  const drawn = make("div", { class: "lanes", "aria-hidden": "true" });
  for (const lane of [...new Set(told.beside.map((one) => one.lane))].sort((a, b) => a - b)) {
    const track = make("div", { class: "lane" });
    for (const one of told.beside.filter((each) => each.lane === lane)) {
      const kind = one.request_uid === uid ? "this" : one.group ? "group" : "";
      const run = make("i", { class: `${kind} ${one.late ? "late" : ""}`.trim(), title: `${one.request_uid} ${one.model}` });
      run.style.left = percentOf(one.began_ms);
      run.style.width = `calc(${percentOf(one.ended_ms)} - ${percentOf(one.began_ms)})`;
      track.append(run);
    }
    drawn.append(make("span", {}, `lane ${lane}`), track);
  }
  return drawn;
}

/** Says what the colours of the lanes mean; the table says the same of each run. */
function keys() {
  const key = (kind, text) => make("span", {}, make("span", { class: `key k-${kind}` }), text);
  return make("p", { class: "legend", "aria-hidden": "true" }, key("this", "this request"), key("group", "its group"), key("other", "others"), key("late", "answered late"));
}

function besideTable(told) {
  const rows = told.beside.map((one) => [uidLink(one), one.model, `lane ${one.lane}`, ms(one.began_ms < 0 ? 0 : one.began_ms), ms(one.ended_ms),
    [one.group ? "same group" : "", ""], [one.late ? "late" : "", one.late ? "bad" : ""]]);
  const heads = [["Request"], ["Model"], ["Lane"], ["From", "n"], ["To", "n"], ["Group"], ["Outcome"]];
  return make("details", {}, make("summary", {}, `${told.beside.length} runs as a table; times after its arrival`), table("Runs beside it", heads, rows));
}

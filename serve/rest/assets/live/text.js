// Numbers and elements as the page writes them.

/** Returns an element with attributes and children; texts never become markup. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const count = (value) => value.toLocaleString("en");

/** Returns three figures without an exponent. */
export function figures(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return Math.abs(value) >= 1000 ? count(Math.round(value)) : value.toFixed(Math.min(digits, 3));
}

export function ms(value) {
  if (value == null) return "–";
  return value >= 1000 ? `${figures(value / 1000)} s` : `${figures(value)} ms`;
}

export function percent(share) {
  if (share == null) return "–";
  const value = 100 * share;
  return `${value === 0 || value >= 10 ? value.toFixed(value === 0 ? 0 : 1) : value.toFixed(2)} %`;
}

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  for (; value >= 1000 && unit < 4; unit++) value /= 1024;
  return `${figures(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

/** Returns words that stay on one line. */
export const unbroken = (...words) => words.join(" ").replaceAll(" ", "\u00a0");

const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** Returns a time of the day, with the date when it is not today. */
export function clock(seconds) {
  const date = new Date(1000 * seconds);
  return (date.toDateString() === new Date().toDateString() ? time : day).format(date);
}

export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

/** Returns the 95 % interval of a share (Wilson 1927). */
export function interval(part, all) {
  if (!all) return [null, null];
  const z = 1.96, share = part / all, centre = share + (z * z) / (2 * all);
  const spread = z * Math.sqrt((share * (1 - share) + (z * z) / (4 * all)) / all);
  const scale = 1 + (z * z) / all;
  return [Math.max(0, (centre - spread) / scale), Math.min(1, (centre + spread) / scale)];
}

/** Returns a table whose rows become cards on narrow screens; cells are texts or elements. */
export function table(label, heads, rows) {
  const head = make("tr", {}, ...heads.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((cell, i) => {
      const [value, kind] = Array.isArray(cell) ? cell : [cell, heads[i][1]];
      return make("td", { class: kind, "data-label": i ? heads[i][0] : null }, value);
    })),
  );
  return make("table", { class: "cards", "aria-label": label }, make("thead", {}, head), make("tbody", {}, ...body));
}

/** Shows the texts as items of a list; one that is the same stays, so that it is not read out again. */
export function list(box, texts) {
  if (box.innerText !== texts.join("\n")) box.replaceChildren(...texts.map((text) => make("li", {}, text)));
}

/** Shows rows of a name, a value, a note and whether it is bad as tiles. */
export function fill(box, rows) {
  if (!box.children.length) box.append(...rows.map(([name]) => make("div", { class: "tile" }, make("h2", {}, name), make("strong"), make("p"))));
  rows.forEach(([, value, note, bad], i) => {
    const tile = box.children[i];
    tile.classList.toggle("bad", Boolean(bad));
    [[1, value], [2, note]].forEach(([child, text]) => { if (tile.children[child].textContent !== text) tile.children[child].textContent = text; });
  });
}

/** Headings of totals in a table, and the cells of a line of them. */
export const HEADS = [["Requests", "n"], ["Late", "n"], ["p50", "n"], ["p99", "n"], ["p99 ÷ target", "n"]];
export const numbers = (line) => {
  const late = line.answered ? line.late / line.answered : null;
  return [count(line.requests), [percent(late), late > 0.01 ? "n bad" : "n"], ms(line.latency_ms[0]), ms(line.latency_ms[2]), figures(line.over[2])];
};

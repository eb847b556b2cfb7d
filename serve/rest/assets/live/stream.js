// A stream of numbers: read until it is aborted, connected again when it ends.
import { clock } from "./text.js";

/** Says above the page how the stream does: `live`, `lost` or `waiting`. */
export function tell(state, text) {
  const link = document.getElementById("link");
  if (link.textContent !== text) link.textContent = text;
  link.dataset.state = state;
}

/** Calls `show(name, numbers)` for each event of the address; returns what aborts it. */
export function follow(address, show) {
  const mine = new AbortController();
  start(address, mine, show);
  return mine;
}

async function start(address, mine, show) {
  let pause = 500, since = null;
  while (!mine.signal.aborted) {
    let why = "the server does not answer";
    try {
      const answer = await fetch(address, { signal: mine.signal, cache: "no-store" });
      if (!answer.ok) why = (await answer.json().catch(() => ({}))).error ?? `status ${answer.status}`;
      else {
        await read(answer.body, mine, show, () => { pause = 500; since = null; });
        why = "the server ended the connection";
      }
    } catch (error) {
      if (mine.signal.aborted) return;
    }
    since ??= new Date();
    tell("lost", `no numbers since ${clock(since / 1000)}: ${why}; trying again`);
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, 5000);
  }
}

async function read(body, mine, show, came) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  // The server writes every second; silence is a lost connection, which nothing else may tell.
  for (;;) {
    let timer;
    const silence = new Promise((done) => { timer = setTimeout(() => done({ done: true }), 8000); });
    const { value, done } = await Promise.race([reader.read(), silence]);
    clearTimeout(timer);
    if (done) { reader.cancel().catch(() => {}); return; }
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (mine.signal.aborted) return;
      const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      came();
      if (name === "problem") tell("lost", JSON.parse(data).error);
      else show(name, JSON.parse(data));
    }
  }
}

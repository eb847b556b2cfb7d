// Late answers in Locust's page: a line of numbers at its end in every tab, and two charts in the
// tabs Lateness and Charts. Locust's own script draws the rest and knows nothing of this.
"use strict";
(() => {
  const EVERY_MS = 1000;
  const HEIGHT = 200;
  // People with any colour vision tell them apart, on light and dark ground; dashes besides.
  const FIRST = "#d55e00", SECOND = "#3d8fd1";

  const panel = document.createElement("section");
  panel.id = "gnnserve-late";
  panel.hidden = true;
  panel.setAttribute("aria-label", "Late answers");
  const line = document.createElement("p");
  const charts = document.createElement("div");
  charts.className = "charts";
  panel.append(charts, line);
  document.body.append(panel);

  const ink = () => getComputedStyle(document.body).color;

  function chart(title, unit, first, second) {
    const box = document.createElement("div");
    box.className = "chart";
    const heading = document.createElement("h2");
    heading.textContent = title;
    box.append(heading);
    charts.append(box);
    const told = (_, value) => (value == null ? "–" : `${value.toFixed(2)}${unit}`);
    const drawn = { width: 2, value: told, points: { show: false } };
    const axis = { stroke: ink, grid: { stroke: "rgba(128, 128, 128, 0.25)", width: 1 } };
    const range = (_, low, high) => [0, Math.max(high * 1.1, 1.1)];
    const plot = new uPlot({
      width: 320,
      height: HEIGHT,
      scales: { x: { time: false }, y: { range } },
      axes: [
        { ...axis, values: (_, at) => at.map((s) => `${s} s`) },
        { ...axis, size: 56, values: (_, at) => at.map((v) => `${+v.toFixed(3)}${unit}`) },
      ],
      series: [
        { label: "second" },
        { label: first, stroke: FIRST, ...drawn },
        { label: second, stroke: SECOND, dash: [6, 4], ...drawn },
      ],
    }, [[], [], []], box);
    new ResizeObserver(() => {
      if (box.clientWidth) plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }).observe(box);
    return plot;
  }

  const share = chart("Late answers, last 10 s", " %", "at the client", "by the server");
  const over = chart("Latency ÷ target, last 10 s", "", "p99", "p50");

  const number = (value, unit) => (value == null ? "–" : `${value.toFixed(2)}${unit}`);

  function show(points) {
    const last = points.at(-1);
    panel.hidden = !last;
    if (!last) return;
    const facts = [
      ["late at the client", number(last.late, " %")],
      ["late by the server", number(last.late_by_server, " %")],
      ["latency ÷ target p50", number(last.over_p50, "")],
      ["p99", number(last.over_p99, "")],
    ];
    line.replaceChildren();
    for (const [name, value] of facts) {
      const strong = document.createElement("b");
      strong.textContent = value;
      line.append(`${name} `, strong, " · ");
    }
    line.append("of the last 10 s");
    const tab = new URLSearchParams(location.search).get("tab");
    charts.hidden = tab !== "lateness" && tab !== "charts";
    if (charts.hidden) return;
    const column = (key) => points.map((point) => point[key] ?? null);
    share.setData([column("at_s"), column("late"), column("late_by_server")]);
    over.setData([column("at_s"), column("over_p99"), column("over_p50")]);
  }

  async function refresh() {
    try {
      const answer = await fetch("lateness/points");
      if (answer.ok) show(await answer.json());
    } catch {
      // Locust has ended, or starts again; its own page says so.
    }
    setTimeout(refresh, EVERY_MS);
  }
  refresh();
})();

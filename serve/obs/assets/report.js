"use strict";
// Shows the text of whatever carries data-t: when it is pointed at, or with the arrow keys once a
// picture has the focus. In the timeline the group stands out.
const tip = document.getElementById("tip");
function unpick() {
  document.querySelectorAll("svg.picked").forEach((svg) => {
    svg.classList.remove("picked");
    svg.querySelectorAll(".mate").forEach((mate) => mate.classList.remove("mate"));
  });
  document.querySelectorAll(".pointed").forEach((mark) => mark.classList.remove("pointed"));
}
function show(at, x, y) {
  unpick();
  tip.hidden = !at;
  if (!at) return;
  if (at.dataset.g) {
    at.ownerSVGElement.classList.add("picked");
    at.ownerSVGElement
      .querySelectorAll(`[data-g="${at.dataset.g}"]`)
      .forEach((mate) => mate.classList.add("mate"));
  }
  tip.textContent = at.dataset.t;
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const above = y - tip.offsetHeight - 14;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : y + 18}px`;
}
function pointed(event) {
  const at = event.target instanceof Element ? event.target.closest("[data-t]") : null;
  show(at, event.clientX, event.clientY);
}
addEventListener("pointermove", pointed);
addEventListener("pointerdown", pointed);
addEventListener("scroll", () => {
  // With the keyboard, the picture scrolls to its mark.
  if (!document.querySelector(".pointed")) tip.hidden = true;
}, { passive: true });

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10,
  Home: -Infinity, End: Infinity };
document.querySelectorAll(".scroll > svg").forEach((svg) => {
  const marks = [...svg.querySelectorAll("[data-t]")];
  if (!marks.length) return;
  let number = -1;
  svg.tabIndex = 0;
  svg.setAttribute("aria-description", `${marks.length} marks; arrow keys go from one to the next`);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    number = Math.min(Math.max(number + STEPS[event.key], 0), marks.length - 1);
    marks[number].scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = marks[number].getBoundingClientRect();
    show(marks[number], box.left + box.width / 2, box.top);
    marks[number].classList.add("pointed");
  });
  svg.addEventListener("blur", () => show(null));
});

// What the marks of a picture say, as a table, made when it is opened.
document.querySelectorAll("figure details").forEach((details) => {
  details.addEventListener("toggle", () => {
    const inside = details.querySelector("div");
    if (inside.firstChild) return;
    const table = document.createElement("table");
    details.parentElement.querySelectorAll(".scroll [data-t]").forEach((mark) => {
      const row = table.insertRow();
      mark.dataset.t.split("\n").forEach((line) => { row.insertCell().textContent = line; });
    });
    inside.tabIndex = 0;
    inside.append(table);
  });
});

// What is wider than its card says so, and can be scrolled with the keyboard.
function measure() {
  document.querySelectorAll(".scroll").forEach((area) => {
    const more = area.scrollWidth > area.clientWidth + 1;
    area.classList.toggle("more", more);
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", area.dataset.name]]) {
      if (more) area.setAttribute(name, value);
      else area.removeAttribute(name);
    }
  });
}
addEventListener("resize", measure);
measure();

const minutes = -new Date().getTimezoneOffset();
if (minutes) {
  const hours = Math.floor(Math.abs(minutes) / 60);
  const rest = String(Math.abs(minutes) % 60).padStart(2, "0");
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const offset = `${minutes < 0 ? "−" : "+"}${hours}:${rest}`;
  document.getElementById("zone").textContent = `; your clock (${zone}) shows UTC ${offset}`;
}

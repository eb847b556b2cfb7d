"use strict";
// Shows the text of whatever carries data-t, and in the timeline lets the group stand out.
const tip = document.getElementById("tip");
function show(event) {
  const at = event.target instanceof Element ? event.target.closest("[data-t]") : null;
  document.querySelectorAll("svg.picked").forEach((svg) => {
    svg.classList.remove("picked");
    svg.querySelectorAll(".mate").forEach((mate) => mate.classList.remove("mate"));
  });
  tip.hidden = !at;
  if (!at) return;
  if (at.dataset.g) {
    at.ownerSVGElement.classList.add("picked");
    at.ownerSVGElement
      .querySelectorAll(`[data-g="${at.dataset.g}"]`)
      .forEach((mate) => mate.classList.add("mate"));
  }
  tip.textContent = at.dataset.t;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 14;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
}
addEventListener("pointermove", show);
addEventListener("pointerdown", show);
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// The page around its timeline: which plan is shown, and links into the drawing.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("timeline");
const timeline = new Timeline(root, data);

for (const button of document.querySelectorAll("[data-plan-button]")) {
  button.addEventListener("click", () => {
    const plan = button.dataset.planButton;
    for (const other of document.querySelectorAll("[data-plan-button]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    for (const part of document.querySelectorAll("[data-plan]")) part.hidden = plan !== "all" && part.dataset.plan !== plan;
    timeline.only(plan === "all" ? null : plan);
  });
}

// A cell that names a device shows it in the drawing.
for (const button of document.querySelectorAll("[data-lane]")) {
  button.addEventListener("click", () => {
    const [, plan, device] = button.dataset.lane.split(":");
    const run = timeline.visibleRuns().find((each) => each.plan === plan);
    const lane = run ? run.lanes.findIndex((each) => !each.link && each.devices.includes(Number(device))) : -1;
    if (lane < 0 || !run.lanes[lane].starts.length) return;
    timeline.focusOn({ run, lane, bar: 0 });
    timeline.stage.focus();
  });
}

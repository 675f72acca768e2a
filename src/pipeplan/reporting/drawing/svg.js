// Moves what the SVG has: while the scale stays, whole groups, and only what comes into view is placed.
class SvgPainter {
  static FURTHEST = 100000; // pixels from the origin; a renderer's numbers are not exact far beyond

  constructor(timeline) {
    this.timeline = timeline;
    const svg = timeline.svg;
    for (const title of svg.querySelectorAll("title")) title.remove(); // the page's own tips say more
    const window = svg.appendChild(made("clipPath", "window"));
    window.id = "timeline-window";
    this.window = window.appendChild(made("rect", "window"));
    const groups = [...svg.querySelectorAll("g.run")];
    timeline.runs.forEach((run, number) => {
      run.group = groups[number];
      run.frames = [...run.group.querySelectorAll(":scope > rect.repetend:not(.legend)")];
      run.ticks = run.group.insertBefore(made("g", "ticks"), run.group.querySelector("g.lane"));
      for (const old of run.group.querySelectorAll(":scope > .axis, :scope > .tick")) old.remove();
      const lanes = [...run.group.querySelectorAll("g.lane")];
      run.lanes.forEach((lane, at) => this.take(lane, lanes[at]));
      run.pathLine = run.group.appendChild(made("path", "path"));
    });
    this.focus = svg.appendChild(made("rect", "focus"));
  }

  // A lane's bars go into a group that moves behind a window, beside the lane's name.
  take(lane, group) {
    lane.group = group;
    lane.bars = [...group.querySelectorAll(":scope > rect")];
    for (const text of group.querySelectorAll("text.bar")) text.remove();
    lane.texts = [];
    const behind = group.appendChild(made("g", "behind"));
    behind.setAttribute("clip-path", "url(#timeline-window)");
    lane.moving = behind.appendChild(made("g", "moving"));
    lane.moving.append(...lane.bars);
    lane.placed = new Uint8Array(lane.bars.length).fill(1); // whether a bar is where it belongs at this scale
    lane.cut = []; // bars of which a part is out of view
    [lane.area, lane.limitLine, lane.memoryWords] = [".memory", ".limit", ".memory-words"].map((s) => group.querySelector(s));
  }

  resize() {
    const { timeline } = this;
    this.scale = 0;
    sized(this.window, timeline.left, timeline.inner, -1, timeline.geometry.bar + 2);
    for (const [name, value] of [["width", timeline.width], ["height", timeline.height], ["viewBox", `0 0 ${timeline.width} ${timeline.height}`]]) {
      timeline.svg.setAttribute(name, value);
    }
    for (const run of timeline.runs) {
      shownIf(run.group, !run.hidden);
      for (const lane of run.lanes) shownIf(lane.group, false);
    }
  }

  paint() {
    const { timeline } = this;
    const { view } = timeline;
    const scale = timeline.inner / (view.to - view.from);
    if (Math.abs(scale / this.scale - 1) > 1e-6 || Math.abs(view.from - this.origin) * scale > SvgPainter.FURTHEST) {
      [this.scale, this.origin] = [scale, view.from];
      for (const run of timeline.runs) for (const lane of run.lanes) this.forget(lane);
    }
    this.moved = (this.origin - view.from) * this.scale;
    let top = 0;
    for (const row of timeline.rows) {
      if (row.lane) this.lane(row, top);
      else {
        top = row.y;
        this.heading(row);
      }
    }
    const place = timeline.focus;
    const row = place && timeline.rowOf(place);
    const ends = row && timeline.ends(row.lane.starts[place.bar], row.lane.starts[place.bar] + row.lane.durations[place.bar]);
    shownIf(this.focus, Boolean(ends));
    if (ends) sized(this.focus, ends[0] - 1, ends[1] - ends[0] + 2, row.y - 1, row.bar + 2);
  }

  heading(row) {
    const { timeline } = this;
    const { run } = row;
    run.group.setAttribute("transform", `translate(0,${row.y})`);
    const g = timeline.geometry;
    run.ticks.replaceChildren(
      ...timeline.ticks(run).flatMap(([x, text]) => {
        const line = made("path", "axis");
        line.setAttribute("d", `M${x.toFixed(1)} ${g.top - 6}V${row.bottom - row.y}`);
        const words = made("text", "tick");
        words.setAttribute("x", x.toFixed(1));
        words.setAttribute("y", g.top - 9);
        words.setAttribute("text-anchor", "middle");
        words.textContent = text;
        return [line, words];
      }),
    );
    const points = timeline.shown.path ? timeline.pathPoints(run) : [];
    run.pathLine.setAttribute("d", points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${(y - row.y).toFixed(1)}`).join(""));
    let frame = 0;
    for (const each of timeline.rows.filter((other) => other.run === run && other.lane && other.lane.frame)) {
      const ends = timeline.ends(...each.lane.frame);
      const rect = run.frames[frame++];
      shownIf(rect, Boolean(ends));
      if (ends) sized(rect, ends[0], ends[1] - ends[0], each.y - row.y - 1, timeline.geometry.bar + 2);
    }
  }

  lane(row, top) {
    const { timeline } = this;
    const { lane } = row;
    shownIf(lane.group, true);
    lane.group.setAttribute("transform", `translate(0,${row.y - top})`);
    lane.moving.setAttribute("transform", `translate(${this.moved.toFixed(2)},0)`);
    const first = firstAfter(lane, timeline.view.from);
    const after = firstAbove(lane.starts, timeline.view.to);
    for (const bar of lane.cut.splice(0)) if (bar < first || bar >= after) this.hide(lane, bar);
    for (let bar = first; bar < after; bar++) if (!lane.placed[bar] || !this.isWhole(lane, bar)) this.bar(row, bar);
    if (lane.memory) this.memory(row);
  }

  isWhole(lane, bar) {
    const { from, to } = this.timeline.view;
    return lane.starts[bar] >= from && lane.starts[bar] + lane.durations[bar] <= to;
  }

  hide(lane, bar) {
    lane.placed[bar] = 0;
    shownIf(lane.bars[bar], false);
    if (lane.texts[bar]) shownIf(lane.texts[bar], false);
  }

  forget(lane) {
    for (const bar of lane.cut.splice(0)) this.hide(lane, bar);
    for (let bar = lane.placed.indexOf(1); bar >= 0; bar = lane.placed.indexOf(1, bar + 1)) this.hide(lane, bar);
  }

  bar(row, bar) {
    const { timeline } = this;
    const { lane, run } = row;
    const rect = lane.bars[bar];
    const ends = timeline.ends(lane.starts[bar], lane.starts[bar] + lane.durations[bar]);
    lane.placed[bar] = Number(this.isWhole(lane, bar));
    if (!lane.placed[bar]) lane.cut.push(bar);
    shownIf(rect, Boolean(ends));
    const label = ends ? labelOf(timeline, run, lane, bar, ends[1] - ends[0]) : "";
    if (ends) {
      rect.setAttribute("x", (ends[0] - this.moved).toFixed(1));
      rect.setAttribute("width", Math.max(ends[1] - ends[0] - 0.5, 0.1).toFixed(1));
    }
    let text = lane.texts[bar];
    if (!text && label) {
      text = made("text", run.kinds[lane.kinds[bar]].odd ? "bar dark" : "bar");
      text.setAttribute("y", row.bar - 6 + (lane.link ? 3 : 0));
      lane.texts[bar] = rect.parentNode.insertBefore(text, rect.nextSibling);
    }
    if (!text) return;
    shownIf(text, Boolean(label));
    if (label) {
      text.setAttribute("x", ((ends[0] + ends[1]) / 2 - this.moved).toFixed(1));
      if (text.textContent !== label) text.textContent = label;
    }
  }

  memory(row) {
    const { lane } = row;
    for (const each of [lane.area, lane.limitLine, lane.memoryWords]) if (each) shownIf(each, row.memory);
    if (!row.memory) return;
    const { points, base, right, limit } = this.timeline.memoryPoints(row);
    const steps = points.map(([x, y]) => `H${x.toFixed(1)}V${y.toFixed(1)}`).join("");
    const left = this.timeline.left;
    lane.area.setAttribute("d", `M${left} ${base}${steps}H${Math.max(left, right).toFixed(1)}V${base}Z`);
    if (lane.limitLine) lane.limitLine.setAttribute("d", `M${left} ${limit.toFixed(1)}H${Math.max(left, right).toFixed(1)}`);
  }
}

function made(name, classes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  element.setAttribute("class", classes);
  return element;
}

function shownIf(element, shown) {
  const now = element.getAttribute("display") !== "none";
  if (shown && !now) element.removeAttribute("display");
  else if (!shown && now) element.setAttribute("display", "none");
}

function sized(rect, x, width, y, height) {
  for (const [name, value] of [["x", x], ["width", width], ["y", y], ["height", height]]) rect.setAttribute(name, value.toFixed(1));
}

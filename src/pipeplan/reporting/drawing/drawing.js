// The timeline of a page: pans, zooms and explains what the SVG has; above a number of bars it draws on a canvas.
"use strict";

class Timeline {
  static LEAST_BAR = 0.6; // pixels
  static PAPER = 700; // pixels of a page of paper, A4 or letter, between its margins

  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.geometry = data.geometry;
    this.runs = data.runs.map((run, number) => decoded(run, number));
    this.stage = root.querySelector(".stage");
    this.tip = root.querySelector(".tip");
    this.said = root.querySelector(".said");
    this.svg = this.stage.querySelector("svg");
    this.shown = { memory: true, links: true, path: false };
    this.focus = null; // {run, lane, bar}
    this.hover = null;
    this.frameTimes = [];
    this.view = { from: 0, to: data.end };
    this.painter = this.svg ? new SvgPainter(this) : new CanvasPainter(this);
    this.listen();
    this.resize();
  }

  // What is where ---------------------------------------------------------------------------------------------------

  visibleRuns() {
    return this.runs.filter((run) => !run.hidden);
  }

  // Rows from above: a heading for each run, then its lanes.
  layout() {
    const g = this.geometry;
    const rows = [];
    let y = 0;
    for (const run of this.visibleRuns()) {
      const heading = { run, y, height: g.top };
      rows.push(heading);
      y += g.top;
      run.lanes.forEach((lane, number) => {
        if (lane.link && !this.shown.links) return;
        const memory = lane.memory && this.shown.memory;
        const height = lane.link ? g.linkRow : g.row + (memory ? g.memoryRow : 0);
        rows.push({ run, lane, number, y, height, memory, bar: lane.link ? g.linkBar : g.bar });
        y += height;
      });
      heading.bottom = y;
      y += g.margin;
    }
    this.rows = rows;
    this.height = y;
  }

  get inner() {
    return Math.max(50, this.width - this.left - this.geometry.margin);
  }

  get left() {
    return this.geometry.left;
  }

  x(time) {
    return this.left + ((time - this.view.from) * this.inner) / (this.view.to - this.view.from);
  }

  time(x) {
    return this.view.from + ((x - this.left) * (this.view.to - this.view.from)) / this.inner;
  }

  // Left and right of a time that is drawn, null where none of it is.
  ends(begin, end) {
    const left = Math.max(this.left, this.x(begin));
    const right = Math.min(this.left + this.inner, this.x(end));
    return right > left || (right === left && begin === end) ? [left, right] : null;
  }

  rowOf(place) {
    return this.rows.find((row) => row.run === place.run && row.number === place.lane && row.lane);
  }

  at(x, y) {
    const row = this.rows.find((each) => each.lane && y >= each.y && y < each.y + each.height);
    if (!row || x < this.left) return null;
    const time = this.time(x);
    const slack = (2 * (this.view.to - this.view.from)) / this.inner;
    let best = null;
    const { starts, durations } = row.lane;
    for (let bar = firstAfter(row.lane, time - slack); bar < starts.length && starts[bar] <= time + slack; bar++) {
      const away = Math.max(starts[bar] - time, time - starts[bar] - durations[bar], 0);
      if (away <= slack && (best === null || away < best.away)) best = { away, bar };
      if (away === 0) break;
    }
    return best && { run: row.run, lane: row.number, bar: best.bar };
  }

  // Moving ----------------------------------------------------------------------------------------------------------

  set(from, to) {
    const whole = this.data.end || 1;
    const length = Math.min(whole, Math.max(to - from, Math.min(whole, 20)));
    const begin = Math.min(Math.max(from, 0), whole - length);
    this.view = { from: begin, to: begin + length };
    this.paint();
  }

  fit() {
    this.set(0, this.data.end);
  }

  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.set(at - (at - from) / factor, at + (to - at) / factor);
  }

  pan(share) {
    const by = share * (this.view.to - this.view.from);
    this.set(this.view.from + by, this.view.to + by);
  }

  paint() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => this.paintNow());
  }

  paintNow() {
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    const begun = performance.now();
    this.painter.paint();
    this.frameTimes.push(performance.now() - begun);
    this.firstFrame ??= performance.now(); // ms since the page was asked for
    if (this.frameTimes.length > 1000) this.frameTimes.shift();
  }

  // On paper there is all of it, in light colours; a browser paints no frame before it prints.
  print(printing) {
    document.documentElement.classList.toggle("printing", printing);
    if (printing) this.onScreen = this.view;
    this.view = printing ? { from: 0, to: this.data.end } : this.onScreen;
    this.printing = printing;
    this.resize();
    this.paintNow();
  }

  resize() {
    this.width = this.printing ? Timeline.PAPER : Math.max(280, this.stage.clientWidth);
    this.geometry.left = this.width < 500 ? 84 : this.data.left;
    this.layout();
    this.painter.resize();
    this.paint();
  }

  // Focus, and what is said of a bar --------------------------------------------------------------------------------

  // The bar's figures in words, line by line.
  words(place) {
    const { run } = place;
    const lane = run.lanes[place.lane];
    const kind = run.kinds[lane.kinds[place.bar]];
    const name = nameOf(lane, place.bar, kind);
    const begin = lane.starts[place.bar] + (lane.later ? lane.later[place.bar] : 0);
    const duration = lane.durations[place.bar];
    const lines = [
      lane.link ? `${name}: message over ${lane.name}` : `${name}: ${kind.words}, ${lane.name}`,
      `${formatNs(begin)} to ${formatNs(begin + duration)}, ${formatNs(duration)} long`,
    ];
    const waits = this.waitsFor(place);
    if (waits) lines.push(`waits for ${waits.text}`);
    return lines;
  }

  // What a lane's name stands for, and a heading's frames.
  about(x, y) {
    const row = x < this.left ? this.rows.find((each) => y >= each.y && y < each.y + each.height) : null;
    const words = row && (row.lane ? row.lane.about : row.run.repetendTip);
    return words ? [words] : null;
  }

  waitsFor(place) {
    const lane = place.run.lanes[place.lane];
    if (!lane.waits) return null;
    const number = lane.waits[place.bar];
    if (number === 0) return { text: "the action before it on its device", place: { ...place, bar: place.bar - 1 } };
    const [text, other, bar] = place.run.waits[number - 1];
    const found = other < 0 ? null : { run: place.run, lane: other, bar };
    return { text: text || (found ? `${this.words(found)[0]}, on the same devices` : "its devices"), place: found };
  }

  focusOn(place, { show = true } = {}) {
    this.focus = place;
    if (place && show) this.show(place);
    this.paint();
    if (!place) {
      this.said.replaceChildren();
      return;
    }
    const lines = this.words(place);
    const lane = place.run.lanes[place.lane];
    const stage = lane.link ? null : /^\d+/.exec(nameOf(lane, place.bar, place.run.kinds[lane.kinds[place.bar]]));
    this.said.replaceChildren(lines.join("; "));
    const row = stage && document.getElementById(`plan-${place.run.plan}-stage-${stage[0]}`);
    if (row) {
      const link = document.createElement("a");
      link.href = `#${row.id}`;
      link.textContent = `stage ${stage[0]}`;
      this.said.append(" (", link, ")");
    }
  }

  // Moves the view so that a bar is in it.
  show(place) {
    const lane = place.run.lanes[place.lane];
    const begin = lane.starts[place.bar];
    const end = begin + lane.durations[place.bar];
    const length = this.view.to - this.view.from;
    if (end - begin > length || begin < this.view.from || end > this.view.to) {
      const middle = (begin + end) / 2;
      this.set(middle - length / 2, middle + length / 2);
    }
    const row = this.rowOf(place);
    if (row && (row.y < this.stage.scrollTop || row.y + row.height > this.stage.scrollTop + this.stage.clientHeight)) {
      this.stage.scrollTop = row.y - this.stage.clientHeight / 2;
    }
  }

  start() {
    const row = this.rows.find((each) => each.lane && each.lane.starts.length);
    return row ? { run: row.run, lane: row.number, bar: firstAfter(row.lane, this.view.from) } : null;
  }

  // One bar to the left or right, or the bar nearest in time of the next lane.
  step(dx, dy) {
    const place = this.focus;
    if (!place) {
      this.focusOn(this.start());
      return;
    }
    const lane = place.run.lanes[place.lane];
    if (dx) {
      const bar = Math.min(lane.starts.length - 1, Math.max(0, place.bar + dx));
      this.focusOn({ ...place, bar });
      return;
    }
    const time = lane.starts[place.bar] + lane.durations[place.bar] / 2;
    const lanes = this.rows.filter((row) => row.lane && row.lane.starts.length);
    const now = lanes.findIndex((row) => row.run === place.run && row.number === place.lane);
    const next = lanes[Math.min(lanes.length - 1, Math.max(0, now + dy))];
    if (next) {
      const bar = Math.min(next.lane.starts.length - 1, firstAfter(next.lane, time));
      this.focusOn({ run: next.run, lane: next.number, bar });
    }
  }

  // One action on along the critical path, of the run that has the focus.
  followPath(by) {
    const run = (this.focus && this.focus.run.path.length && this.focus.run) || this.visibleRuns().find((r) => r.path.length);
    if (!run) return;
    this.toggle("path", true);
    const same = ([lane, bar]) => this.focus && this.focus.run === run && lane === this.focus.lane && bar === this.focus.bar;
    const now = run.path.findIndex(same);
    const next = now < 0 ? (by > 0 ? 0 : run.path.length - 1) : Math.min(run.path.length - 1, Math.max(0, now + by));
    const [lane, bar] = run.path[next];
    this.focusOn({ run, lane, bar });
  }

  followWait() {
    const waits = this.focus && this.waitsFor(this.focus);
    if (waits && waits.place) this.focusOn(waits.place);
  }

  toggle(what, on = !this.shown[what]) {
    this.shown[what] = on;
    const button = this.root.querySelector(`[data-toggle="${what}"]`);
    if (button) button.setAttribute("aria-pressed", String(on));
    this.resize();
  }

  only(plan) {
    for (const run of this.runs) run.hidden = plan !== null && run.plan !== plan;
    if (this.focus && this.focus.run.hidden) this.focusOn(null);
    this.resize();
  }

  // Events ----------------------------------------------------------------------------------------------------------

  listen() {
    const act = {
      in: () => this.zoom(2),
      out: () => this.zoom(0.5),
      fit: () => this.fit(),
      left: () => this.pan(-0.25),
      right: () => this.pan(0.25),
      before: () => this.followPath(-1),
      next: () => this.followPath(1),
    };
    for (const button of this.root.querySelectorAll("[data-act]")) {
      button.addEventListener("click", () => act[button.dataset.act]());
    }
    for (const button of this.root.querySelectorAll("[data-toggle]")) {
      button.addEventListener("click", () => this.toggle(button.dataset.toggle));
    }
    const keys = {
      ArrowLeft: () => this.step(-1, 0),
      ArrowRight: () => this.step(1, 0),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
      Home: () => this.focus && this.focusOn({ ...this.focus, bar: 0 }),
      End: () => this.focus && this.focusOn({ ...this.focus, bar: this.focus.run.lanes[this.focus.lane].starts.length - 1 }),
      "+": act.in,
      "=": act.in,
      "-": act.out,
      0: act.fit,
      a: act.left,
      d: act.right,
      n: act.next,
      p: act.before,
      w: () => this.followWait(),
      Escape: () => this.focusOn(null),
    };
    this.stage.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
      keys[event.key]();
      event.preventDefault();
    });
    this.stage.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.pointers = new Map();
    this.stage.addEventListener("pointerdown", (event) => this.down(event));
    this.stage.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) this.stage.addEventListener(name, (event) => this.up(event));
    this.stage.addEventListener("pointerleave", () => this.showTip(null));
    new ResizeObserver(() => this.resize()).observe(this.stage);
    window.addEventListener("beforeprint", () => this.print(true));
    window.addEventListener("afterprint", () => this.print(false));
  }

  place(event) {
    const box = this.stage.getBoundingClientRect();
    return [event.clientX - box.left - this.stage.clientLeft, event.clientY - box.top - this.stage.clientTop + this.stage.scrollTop];
  }

  wheel(event) {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 300), this.time(this.place(event)[0]));
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan(sideways / this.inner);
    else return; // the page scrolls
    event.preventDefault();
  }

  down(event) {
    if (event.button || event.shiftKey) return; // with Shift, text is selected
    this.pointers.set(event.pointerId, event.clientX);
    this.dragged = false;
    this.stage.setPointerCapture(event.pointerId);
    this.stage.focus({ preventScroll: true });
    if (event.pointerType === "mouse") event.preventDefault();
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) {
      const [x, y] = this.place(event);
      const place = this.at(x, y);
      this.showTip(place ? this.words(place) : this.about(x, y), x, y);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    const perPixel = (this.view.to - this.view.from) / this.inner;
    if (others.length) {
      const box = this.stage.getBoundingClientRect();
      const apart = [Math.abs(before - others[0]), Math.abs(event.clientX - others[0])].map((each) => Math.max(each, 10));
      this.zoom(apart[1] / apart[0], this.time((event.clientX + others[0]) / 2 - box.left));
    } else {
      const by = (before - event.clientX) * perPixel;
      if (Math.abs(before - event.clientX) < 3 && !this.dragged) return;
      this.set(this.view.from + by, this.view.to + by);
    }
    this.dragged = true;
    this.showTip(null);
    this.pointers.set(event.pointerId, event.clientX);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId) || this.dragged || event.type === "pointercancel") return;
    const place = this.at(...this.place(event));
    if (place) this.focusOn(place, { show: false });
  }

  showTip(lines, x = 0, y = 0) {
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    const below = y - this.stage.scrollTop;
    this.tip.style.left = `${Math.min(x + 12, Math.max(0, this.width - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${this.stage.offsetTop + below + 18}px`;
  }

  // What is drawn alike on both -------------------------------------------------------------------------------------

  ticks(run) {
    const step = roundStep((100 * (this.view.to - this.view.from)) / this.inner);
    const found = [];
    for (let time = Math.ceil(this.view.from / step) * step; time <= Math.min(this.view.to, run.end); time += step) {
      found.push([this.x(time), formatNs(clock(run, time))]);
    }
    return found;
  }

  pathPoints(run) {
    const points = [];
    for (const [number, bar] of run.path) {
      const row = this.rowOf({ run, lane: number, bar });
      if (!row) continue;
      const middle = row.y + row.bar / 2;
      for (const time of [row.lane.starts[bar], row.lane.starts[bar] + row.lane.durations[bar]]) {
        points.push([Math.min(this.left + this.inner, Math.max(this.left, this.x(time))), middle]);
      }
    }
    return points;
  }

  // Corners of the curve of memory, from left to right, and the height of the limit.
  memoryPoints(row) {
    const { memory } = row.lane;
    const g = this.geometry;
    const base = g.row + g.memoryRow - 6;
    const y = (size) => base - ((g.memoryRow - 8) * size) / memory.top;
    const last = Math.max(0, firstAbove(memory.times, this.view.from) - 1);
    const points = [];
    for (let at = last; at < memory.times.length && memory.times[at] <= this.view.to; at++) {
      const x = Math.max(this.left, this.x(memory.times[at]));
      const high = y(memory.sizes[at]);
      const before = points[points.length - 1];
      if (before && x - before[0] < 0.5) before[1] = Math.min(before[1], high);
      else points.push([x, high]);
    }
    const right = Math.min(this.left + this.inner, this.x(row.run.end));
    return { points, base, right, limit: memory.limit === null ? null : y(memory.limit) };
  }
}

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

// Draws what is in view on a canvas as large as the view.
class CanvasPainter {
  static TALLEST = 8000; // pixels that every browser's canvas has, at two for each

  constructor(timeline) {
    this.timeline = timeline;
    this.canvas = timeline.stage.querySelector("canvas");
    this.space = timeline.stage.querySelector(".space");
    timeline.stage.addEventListener("scroll", () => timeline.paint());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.look();
      timeline.paint();
    });
  }

  // Colours of the page's style.
  look() {
    const style = getComputedStyle(this.timeline.root);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
  }

  resize() {
    const { timeline, canvas } = this;
    this.ratio = window.devicePixelRatio || 1;
    this.look();
    this.viewHeight = Math.min(timeline.height, timeline.printing ? CanvasPainter.TALLEST : Math.round(0.7 * window.innerHeight));
    this.space.style.height = `${timeline.height - this.viewHeight}px`;
    canvas.width = Math.round(timeline.width * this.ratio);
    canvas.height = Math.round(this.viewHeight * this.ratio);
    canvas.style.width = `${timeline.width}px`;
    canvas.style.height = `${this.viewHeight}px`;
  }

  paint() {
    const { timeline } = this;
    const context = this.canvas.getContext("2d", { alpha: false });
    this.context = context;
    const scroll = timeline.printing ? 0 : timeline.stage.scrollTop;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = this.colour("page");
    context.fillRect(0, 0, timeline.width, this.viewHeight);
    context.translate(0, -scroll);
    const rows = timeline.rows.filter((row) => (row.bottom || row.y + row.height) > scroll && row.y < scroll + this.viewHeight);
    for (const row of rows) if (!row.lane) this.heading(row, scroll);
    const bars = new Map();
    const texts = [];
    for (const row of rows) if (row.lane) this.lane(row, bars, texts);
    for (const [name, rects] of bars) {
      context.fillStyle = this.colour(name);
      for (let at = 0; at < rects.length; at += 4) context.fillRect(rects[at], rects[at + 1], rects[at + 2], rects[at + 3]);
    }
    context.font = "10px sans-serif";
    context.textAlign = "center";
    for (const dark of [false, true]) {
      context.fillStyle = this.colour(dark ? "bar-dark" : "bar-text");
      for (const [text, x, y, isDark] of texts) if (isDark === dark) context.fillText(text, x, y);
    }
    for (const row of rows) if (row.lane && row.lane.frame) this.outline(row, row.lane.frame, "repetend", 1.5);
    for (const row of rows) if (!row.lane && timeline.shown.path) this.path(row.run);
    const place = timeline.focus;
    const row = place && timeline.rowOf(place);
    if (row) {
      const begin = row.lane.starts[place.bar];
      this.outline(row, [begin, begin + row.lane.durations[place.bar]], "focus", 3);
    }
  }

  heading(row, scroll) {
    const { timeline, context } = this;
    const g = timeline.geometry;
    const { run } = row;
    context.textAlign = "left";
    context.fillStyle = this.colour("text");
    context.font = "bold 14px sans-serif";
    context.fillText(run.title, g.margin, row.y + 20, timeline.width - 2 * g.margin);
    context.font = "11px sans-serif";
    context.fillText(run.figures, g.margin, row.y + 36, timeline.width - 2 * g.margin);
    this.legend(row);
    context.textAlign = "center";
    for (const [x, text] of timeline.ticks(run)) {
      context.fillStyle = this.colour("line");
      context.fillRect(x, row.y + g.top - 6, 1, row.bottom - row.y - g.top + 6);
      context.fillStyle = this.colour("text");
      context.fillText(text, x, Math.max(row.y + g.top - 9, Math.min(scroll + 11, row.bottom)));
    }
  }

  legend(row) {
    const { context } = this;
    const { run } = row;
    let x = this.timeline.geometry.margin;
    const entry = (text) => {
      context.fillStyle = this.colour("text");
      context.fillText(text, x + 17, row.y + 53);
      x += 34 + context.measureText(text).width;
    };
    for (const kind of run.legend.map((name) => run.kinds.find((each) => each.kind === name))) {
      context.fillStyle = this.colour(kind.class);
      context.fillRect(x, row.y + 43, 12, 12);
      entry(kind.class === "instruction" ? kind.words : `${kind.kind} ${kind.words}`);
    }
    if (!run.repetend) return;
    context.strokeStyle = this.colour("repetend");
    context.lineWidth = 1.5;
    context.strokeRect(x, row.y + 43, 12, 12);
    entry(run.repetend);
  }

  lane(row, bars, texts) {
    const { timeline, context } = this;
    const { lane, run } = row;
    context.fillStyle = this.colour("text");
    context.font = "11px sans-serif";
    context.textAlign = "left";
    context.fillText(lane.name, 4, row.y + row.bar - 6 + (lane.link ? 3 : 0), timeline.left - 8);
    const last = new Map(); // of each colour the rectangle before, which grows where there is no room between
    for (let bar = firstAfter(lane, timeline.view.from); bar < lane.starts.length && lane.starts[bar] < timeline.view.to; bar++) {
      const ends = timeline.ends(lane.starts[bar], lane.starts[bar] + lane.durations[bar]);
      if (!ends) continue;
      const kind = run.kinds[lane.kinds[bar]];
      const name = kind.class + (kind.odd ? "-odd" : "");
      let rects = bars.get(name);
      if (!rects) bars.set(name, (rects = []));
      const width = ends[1] - ends[0];
      const before = last.get(name);
      if (width < Timeline.LEAST_BAR && before !== undefined && ends[0] - rects[before] - rects[before + 2] < Timeline.LEAST_BAR) {
        rects[before + 2] = Math.max(rects[before + 2], ends[1] - rects[before]);
        continue;
      }
      last.set(name, rects.length);
      rects.push(ends[0], row.y, Math.max(width - (width > 3 ? 0.5 : 0), Timeline.LEAST_BAR), row.bar);
      const label = labelOf(timeline, run, lane, bar, width);
      if (label) texts.push([label, (ends[0] + ends[1]) / 2, row.y + row.bar - 6 + (lane.link ? 3 : 0), kind.odd]);
    }
    if (row.memory) this.memory(row);
  }

  memory(row) {
    const { timeline, context } = this;
    const { points, base, right, limit } = timeline.memoryPoints(row);
    context.beginPath();
    context.moveTo(timeline.left, row.y + base);
    let high = base;
    for (const [x, y] of points) {
      context.lineTo(x, row.y + high);
      context.lineTo(x, row.y + y);
      high = y;
    }
    context.lineTo(right, row.y + high);
    context.lineTo(right, row.y + base);
    context.fillStyle = this.colour("memory");
    context.fill();
    if (limit !== null) {
      context.fillStyle = this.colour("limit");
      context.fillRect(timeline.left, row.y + limit, right - timeline.left, 1);
    }
    const { memory } = row.lane;
    context.fillStyle = this.colour("text");
    context.font = "10px sans-serif";
    const words = formatBytes(memory.peak) + (memory.limit === null ? "" : ` of ${formatBytes(memory.limit)}`);
    context.fillText(words, 4, row.y + base - 4, timeline.left - 8);
  }

  outline(row, [begin, end], colour, width) {
    const ends = this.timeline.ends(begin, end);
    if (!ends) return;
    this.context.strokeStyle = this.colour(colour);
    this.context.lineWidth = width;
    this.context.strokeRect(ends[0] - 1, row.y - 1, ends[1] - ends[0] + 2, row.bar + 2);
  }

  path(run) {
    const { context } = this;
    context.strokeStyle = this.colour("path");
    context.lineWidth = 2;
    context.beginPath();
    this.timeline.pathPoints(run).forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  }
}

// Data -----------------------------------------------------------------------------------------------------------------

function decoded(run, number) {
  const lanes = run.lanes.map((lane, at) => ({
    ...lane,
    link: at >= run.lanes.length - run.numLinks,
    starts: summed(lane.starts),
    durations: listed(lane.durations),
    kinds: listed(lane.kinds),
    stems: listed(lane.stems),
    later: lane.later && listed(lane.later),
    longest: listed(lane.durations).reduce((a, b) => Math.max(a, b), 0),
    memory: lane.memory && { ...lane.memory, times: summed(lane.memory.times), sizes: summed(lane.memory.sizes) },
  }));
  return { ...run, number, lanes, hidden: false };
}

function summed(differences) {
  const found = new Float64Array(differences.length);
  let value = 0;
  for (let at = 0; at < differences.length; at++) found[at] = value += differences[at];
  return found;
}

function listed(column) {
  return Array.isArray(column) ? column : column.of.map((number) => column.values[number]);
}

function nameOf(lane, bar, kind) {
  return lane.names[lane.stems[bar]].replace("#", lane.numbers[bar]).replace(/^\s+/, "") || kind.kind;
}

// The longest of what may stand in a bar that has room: its kind and micro-batch, its micro-batch, its kind.
function labelOf(timeline, run, lane, bar, width) {
  const most = (width - 3) / timeline.geometry.letter;
  if (most < 1) return "";
  const { kind, class: name } = run.kinds[lane.kinds[bar]];
  const number = String(lane.numbers[bar]);
  const label = name === "instruction" ? number : kind + number;
  return [label, number, label[0]].find((text) => text.length <= most) || "";
}

// The first bar that ends after a time, or at it; bars of links may overlap.
function firstAfter(lane, time) {
  if (!lane.starts.length) return 0;
  let at = Math.max(0, firstAbove(lane.starts, time - lane.longest) - 1);
  while (at < lane.starts.length - 1 && lane.starts[at] + lane.durations[at] < time) at++;
  return at;
}

// The first of ascending numbers that is above a value.
function firstAbove(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// When something happens that is drawn at a time: later after the rounds of a loop.
function clock(run, time) {
  return run.jumps.reduce((sum, [at, by]) => (time >= at ? sum + by : sum), time);
}

function roundStep(least) {
  const power = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(least, 1))));
  return [1, 2, 5, 10].map((each) => each * power).find((step) => step >= least) || 10 * power;
}

// Text, as the rest of the page has it ---------------------------------------------------------------------------------

function digits(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

function inUnits(value, units, least) {
  for (const [factor, unit] of units) if (Math.abs(value) >= factor) return digits(value / factor) + unit;
  return value ? digits(value) + least : "0";
}

function formatNs(ns) {
  return inUnits(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "us"]], "ns");
}

function formatBytes(size) {
  return inUnits(size, [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]], "B");
}

// SVG ------------------------------------------------------------------------------------------------------------------

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

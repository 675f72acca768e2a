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

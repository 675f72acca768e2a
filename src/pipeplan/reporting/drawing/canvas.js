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

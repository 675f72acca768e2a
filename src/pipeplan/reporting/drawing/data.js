// What a lane's columns hold, and text as the rest of the page has it.

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

"use strict";
// Draws a run's page from the data that lies in it. Names are set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1140, LEFT = 150, RIGHT = 12;

// -- building blocks ------------------------------------------------------------------------------------

function make(name, attributes = {}, ...children) {
  const one = document.createElement(name);
  fill(one, attributes, children);
  return one;
}

function draw(name, attributes = {}, ...children) {
  const one = document.createElementNS(SVG, name);
  fill(one, attributes, children);
  return one;
}

function fill(one, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) one.setAttribute(key, value === true ? "" : value);
  }
  one.append(...children.filter((child) => child !== null && child !== undefined));
}

function bytes(count) {
  if (!Number.isFinite(count)) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0, left = Math.abs(count);
  while (left >= 1024 && place < units.length - 1) { left /= 1024; place += 1; }
  return `${count < 0 ? "-" : ""}${place ? left.toPrecision(3) : left} ${units[place]}`;
}

function seconds(time) {
  if (!Number.isFinite(time)) return "";
  const size = Math.abs(time);
  if (size < 1e-9) return "0 s";
  if (size >= 100) return `${time.toFixed(0)} s`;
  if (size >= 1) return `${time.toPrecision(3)} s`;
  if (size >= 1e-3) return `${(time * 1e3).toPrecision(3)} ms`;
  return `${(time * 1e6).toPrecision(3)} µs`;
}

function plain(value) {
  if (!Number.isFinite(value)) return String(value);
  if (value && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

const percent = (share) => `${(100 * share).toPrecision(3)} %`;
const SIZED = new Set(["rss"]), TIMED = new Set(["step_seconds"]);
const shown = (name, value) => (SIZED.has(name) ? bytes(value) : TIMED.has(name) ? seconds(value) : plain(value));

function table(caption, heads, rows, numeric = []) {
  const cell = (kind, value, place) => make(kind, { class: numeric.includes(place) ? "n" : null }, value instanceof Node ? value : String(value));
  return make("div", { class: "wide" }, make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head, place) => { const th = cell("th", head, place); th.scope = "col"; return th; }))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, place) => cell("td", value, place)))))));
}

function folded(summary, ...content) {
  return make("details", {}, make("summary", {}, summary), ...content);
}

function section(id, name, ...content) {
  document.getElementById("contents").append(make("li", {}, make("a", { href: `#${id}` }, name)));
  const one = make("section", { id, "aria-labelledby": `${id}-name` }, make("h2", { id: `${id}-name` }, name), ...content);
  document.getElementById("main").append(one);
  return one;
}

const tip = document.getElementById("tip"), live = document.getElementById("live");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}

const hideTip = () => { tip.hidden = true; };
const say = (text) => { live.textContent = text; };

// -- colours --------------------------------------------------------------------------------------------

const CATEGORY = {
  "parameters": "--c0", "parameters, gathered": "--c6", "gradients": "--c1", "gradients, gathered": "--c5",
  "parameters and gradients": "--c0", "optimizer state": "--c2", "activations": "--c3", "activations and what else is not model data": "--c3",
};
const CAUSE = {
  computing: "--c0", loop: "--c4", ebbtide: "--c6", gradients: "--c1", planning: "--c3", updates: "--c2",
  host_to_device: "--wait", device_to_host: "--wait2", ssd_read: "--wait", ssd_write: "--wait2", wire: "--wait3",
  waiting: "--wait", ranks: "--wait3", update_wait: "--wait3", device_wait: "--c7", evaluation: "--c5", saving: "--c5", recording: "--c7",
};
const KIND = { param: "--c0", whole: "--c6", grad: "--c1", "whole-grad": "--c5", activations: "--c3" };
const colour = (name) => `var(${name || "--c4"})`;
const category = (tag) => data.kinds[tag] || tag;
const causeName = (cause) => (data.causes[cause] ? data.causes[cause][0] : cause);

function legend(entries) {
  return make("ul", { class: "legend" }, ...entries.map(([name, tint]) => {
    const swatch = make("i", { "aria-hidden": "true" });
    swatch.style.background = colour(tint);
    return make("li", {}, swatch, name);
  }));
}

// -- names ----------------------------------------------------------------------------------------------

function momentName(row) {
  const [, phase, subject] = row;
  const list = { forward: data.model.units, backward: data.model.runs, gradient: data.model.tensors }[phase];
  if (phase === "update") return `update of chunk ${subject}`;
  const name = list && list[subject] !== undefined ? list[subject] || "(the model)" : `number ${subject}`;
  return `${phase} of ${name}`;
}

function chunksInUse(row) {
  const [, phase, subject] = row;
  if (phase === "update") return [subject];
  if (phase === "gradient") return data.model.chunks.flatMap((one, index) => (one.tensors.includes(subject) ? [index] : []));
  return (phase === "forward" ? data.model.unit_chunks : data.model.run_chunks)[subject] || [];
}

function chunkName(chunk) {
  if (chunk < 0) return "no chunk";
  const found = data.model.chunks[chunk];
  if (!found) return `chunk ${chunk}`;
  const names = found.tensors.map((tensor) => data.model.tensors[tensor]);
  const some = names.slice(0, 3).join(", ") + (names.length > 3 ? ` and ${names.length - 3} more` : "");
  return `chunk ${chunk} (${some})`;
}

// -- the verdict ----------------------------------------------------------------------------------------

function verdict() {
  const found = data.verdict;
  const numbers = make("dl", { class: "numbers" }, ...found.numbers.map(([name, value, meaning]) =>
    make("div", { title: meaning }, make("dt", {}, name), make("dd", {}, value))));
  section("verdict", "Verdict", make("p", { class: "sentence" }, found.sentence), numbers,
    ...data.problems.map((problem) => make("p", { class: "problem" }, problem)),
    found.lifts && found.lifts.length ? table(`What would change a step, planned and simulated on ${data.simulated ? "the machine's" : "this run's"} rates`,
      ["change", "times as fast"], found.lifts.map(([change, factor]) => [change, factor.toFixed(2)]), [1]) : null,
    folded("What these numbers mean", table("", ["number", "meaning"], found.numbers.map(([name, , meaning]) => [name, meaning]))));
}

// -- one step: the tide and the schedule share a view ---------------------------------------------------

const state = { place: Math.max(0, data.recorded.findLastIndex((one) => one.rank === 0)), from: 0, to: 1, moment: -1, chunk: -1, lane: 0, bar: -1 };
const unpacked = new Map();

// A step's bars as [begin, end, chunk, kind, bytes, known], and its levels as [begin, tier, tags, non-model].
function step() {
  if (!unpacked.has(state.place)) unpacked.set(state.place, unpack(data.recorded[state.place]));
  return unpacked.get(state.place);
}

function unpack(one) {
  const lanes = {};
  for (const [lane, columns] of Object.entries(one.lanes)) {
    lanes[lane] = columns.begin.map((begin, place) => [begin / 1e6, (begin + columns.span[place]) / 1e6, columns.chunk[place],
      columns.kinds[columns.kind[place]], columns.bytes ? columns.bytes[place] : 0, columns.known ? columns.known[place] : 1]);
  }
  const levels = [];
  for (const [tier, { tags, rows }] of Object.entries(one.levels)) {
    for (const row of rows) {
      const held = {};
      tags.forEach((tag, place) => { if (row[place + 1]) held[tag] = row[place + 1]; });
      levels.push([row[0] / 1e6, tier, held, row[tags.length + 1]]);
    }
  }
  return { ...one, lanes, levels };
}

const x = (time) => LEFT + ((time - state.from) / (state.to - state.from)) * (WIDTH - LEFT - RIGHT);
const timeAt = (place) => state.from + ((place - LEFT) / (WIDTH - LEFT - RIGHT)) * (state.to - state.from);

function momentAt(time) {
  const rows = step().moments;
  let low = 0, high = rows.length;
  while (low < high) { const middle = (low + high) >> 1; if (rows[middle][0] <= time) low = middle + 1; else high = middle; }
  return low - 1;
}

const levels = new Map();

function levelsOf(tier) {
  const key = `${state.place} ${tier}`;
  if (!levels.has(key)) levels.set(key, categories(tier));
  return levels.get(key);
}

function categories(tier) {
  // The tier's content from each change on, by category.
  return step().levels.filter((row) => row[1] === tier).map(([time, , tags, beside]) => {
    const sums = {};
    for (const [tag, count] of Object.entries(tags)) sums[category(tag)] = (sums[category(tag)] || 0) + count;
    if (beside) sums[category("non-model")] = (sums[category("non-model")] || 0) + beside;
    return [time, sums];
  });
}

function contentAt(tier, time) {
  let found = {};
  for (const [begin, sums] of levelsOf(tier)) { if (begin > time) break; found = sums; }
  return found;
}

const total = (sums) => Object.values(sums).reduce((one, other) => one + other, 0);
const tiers = () => ["device", "host", "ssd"].filter((tier) => step().levels.some((row) => row[1] === tier && (Object.keys(row[2]).length || row[3])));

function ticks(svg, height) {
  const span = state.to - state.from, raw = span / 8, power = 10 ** Math.floor(Math.log10(raw || 1e-9));
  const each = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) || raw;
  for (let time = Math.ceil(state.from / each) * each; time <= state.to + 1e-12; time += each) {
    svg.append(draw("line", { class: "axis", x1: x(time), x2: x(time), y1: 0, y2: height }),
      draw("text", { x: x(time), y: height + 13, "text-anchor": "middle" }, seconds(time)));
  }
}

function tideOf(tier) {
  const HEIGHT = 120, rows = levelsOf(tier), budget = step().budget[tier] || 0;
  const names = [...new Set(rows.flatMap(([, sums]) => Object.keys(sums)))];
  const order = Object.keys(CATEGORY);
  names.sort((a, b) => (order.indexOf(a) + 99) % 99 - (order.indexOf(b) + 99) % 99);
  const most = Math.max(1, ...rows.map(([, sums]) => total(sums)));
  const top = budget && budget < 4 * most ? Math.max(budget, most) : most;
  const y = (count) => HEIGHT - (count / top) * (HEIGHT - 6);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, role: "img", "data-tier": tier,
    "aria-label": `${tier}: at most ${bytes(most)} in this step${budget ? ` of a budget of ${bytes(budget)}` : ""}` });
  ticks(svg, HEIGHT);
  svg.append(draw("text", { class: "name", x: 0, y: 16 }, tier), draw("text", { x: 0, y: 31 }, `at most ${bytes(most)}`),
    draw("text", { x: 0, y: 45 }, budget ? `budget ${bytes(budget)}` : ""));
  const clip = `clip-${tier}`;
  svg.append(draw("clipPath", { id: clip }, draw("rect", { x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height: HEIGHT })));
  const group = draw("g", { "clip-path": `url(#${clip})` });
  let below = rows.map(() => 0);
  for (const name of names) {
    const above = rows.map(([, sums], place) => below[place] + (sums[name] || 0));
    const line = (heights, backwards) => {
      const points = [];
      rows.forEach(([time], place) => {
        const until = place + 1 < rows.length ? rows[place + 1][0] : step().seconds;
        points.push([x(time), y(heights[place])], [x(until), y(heights[place])]);
      });
      return (backwards ? points.reverse() : points).map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" L");
    };
    group.append(draw("path", { d: `M${line(above, false)} L${line(below, true)} Z`, fill: colour(CATEGORY[name]), "data-category": name }));
    below = above;
  }
  svg.append(group);
  if (budget && budget <= top) svg.append(draw("line", { class: "budget", x1: LEFT, x2: WIDTH - RIGHT, y1: y(budget), y2: y(budget) }));
  const cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  svg.append(cursor);
  svg.cursor = cursor;
  return [svg, names];
}

function momentText(place) {
  const rows = step().moments, row = rows[place];
  if (!row) return "before the first moment";
  const until = place + 1 < rows.length ? rows[place + 1][0] : step().seconds;
  const lines = [`moment ${place}${row[3] >= 0 ? ` (${row[3]} of the plan)` : ""}, at ${seconds(row[0])}: ${momentName(row)}`];
  const used = chunksInUse(row);
  if (used.length) lines.push(`in use: ${used.length > 1 ? "chunks" : "chunk"} ${used.slice(0, 12).join(", ")}${used.length > 12 ? ` and ${used.length - 12} more` : ""}`);
  for (const tier of tiers()) {
    const sums = contentAt(tier, Math.max(row[0], (row[0] + until) / 2));
    lines.push(`${tier}: ${bytes(total(sums))} (${Object.entries(sums).map(([name, count]) => `${name} ${bytes(count)}`).join(", ")})`);
  }
  for (const [lane, bars] of Object.entries(step().lanes)) {
    if (lane === "thread" || lane === "updates") continue;
    const moved = bars.filter((bar) => bar[0] < until && bar[1] >= row[0]);
    if (moved.length) lines.push(`${data.lanes[lane]}: ${moved.slice(0, 6).map((bar) => `${bar[3]} ${bar[2] >= 0 ? bar[2] : ""}`.trim()).join(", ")}${moved.length > 6 ? ` and ${moved.length - 6} more` : ""}`);
  }
  return lines.join("\n");
}

const figures = {};

function showMoment(place, where) {
  state.moment = Math.max(-1, Math.min(place, step().moments.length - 1));
  const row = step().moments[state.moment];
  for (const svg of figures.tide.querySelectorAll("svg")) {
    svg.cursor.setAttribute("visibility", row ? "visible" : "hidden");
    if (row) { svg.cursor.setAttribute("x1", x(row[0])); svg.cursor.setAttribute("x2", x(row[0])); }
  }
  const text = momentText(state.moment);
  if (where) { showTip(text, where.clientX, where.clientY); return; }
  say(text);
  const svg = figures.tide.querySelector("svg");
  if (row && svg) {
    const box = svg.getBoundingClientRect();
    showTip(text, box.left + (x(row[0]) / WIDTH) * box.width, box.top + 30);
  } else hideTip();
}

function pinMoment() {
  figures.momentPin.textContent = momentText(state.moment);
  figures.momentPin.hidden = false;
}

function barName(lane, bar) {
  const [begin, end, chunk, kind, count, known] = bar;
  if (lane === "thread") return `${causeName(kind)}${chunk >= 0 ? `: ${chunkName(chunk)}` : ""}\nfrom ${seconds(begin)}, ${seconds(end - begin)}`;
  if (lane === "updates") return `update of ${chunkName(chunk)} on the ${kind}${known ? "" : ", by the thread that trains"}\nfrom ${seconds(begin)}, ${seconds(end - begin)}`;
  return `${data.lanes[lane]}: ${kind} of ${chunkName(chunk)}, ${bytes(count)}\n${known ? `from ${seconds(begin)}, ${seconds(end - begin)}` : `asked for at ${seconds(begin)}; its end was not seen`}`;
}

function drawSchedule() {
  const holder = figures.schedule, ROW = 13;
  const lanes = Object.keys(data.lanes).filter((lane) => step().lanes[lane]);
  const rows = {};
  let height = 4;
  const places = {};
  for (const lane of lanes) {
    // Bars that overlap go into rows of their own, four at most.
    const ends = [];
    places[lane] = height;
    rows[lane] = step().lanes[lane].map((bar) => {
      let row = ends.findIndex((end) => end <= bar[0] + 1e-9);
      if (row < 0) row = ends.length < 4 ? ends.length : ends.indexOf(Math.min(...ends));
      ends[row] = Math.max(ends[row] || 0, bar[1]);
      return row;
    });
    height += Math.max(1, ends.length) * ROW + 9;
  }
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${height + 18}`, role: "img", "aria-label": "What each resource did in this step. The table below has the same in numbers." });
  ticks(svg, height);
  svg.append(draw("clipPath", { id: "clip-schedule" }, draw("rect", { x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height })));
  const group = draw("g", { "clip-path": "url(#clip-schedule)" });
  let drawn = 0;
  for (const lane of lanes) {
    svg.append(draw("text", { class: "name", x: 0, y: places[lane] + 10 }, data.lanes[lane]));
    const lastAt = [];
    step().lanes[lane].forEach((bar, place) => {
      const [begin, end, chunk, kind] = bar;
      if (end < state.from || begin > state.to) return;
      const left = x(begin), width = Math.max(0.6, x(end) - left), row = rows[lane][place];
      const tint = lane === "thread" ? CAUSE[kind] || "--c4" : lane === "updates" ? "--c2" : KIND[kind] || "--c2";
      const mine = state.chunk >= 0 && chunk === state.chunk;
      const key = `${row}${tint}${mine}`;
      // What falls into the same pixel is drawn once; hovering finds it by its time.
      if (left + width < (lastAt[key] || -1) + 0.5 && !(place === state.bar && lanes[state.lane] === lane)) return;
      lastAt[key] = left + width;
      drawn += 1;
      group.append(draw("rect", { class: `bar${state.chunk >= 0 && !mine ? " dim" : ""}${place === state.bar && lanes[state.lane] === lane ? " chosen" : ""}`,
        x: left.toFixed(2), y: places[lane] + row * ROW, width: width.toFixed(2), height: ROW - 2, fill: colour(tint), "data-lane": lane, "data-place": place }));
    });
  }
  svg.append(group);
  holder.replaceChildren(svg);
  holder.dataset.drawn = drawn;
  figures.laneNames = lanes;
}

function barUnder(target) {
  const lane = target.dataset && target.dataset.lane;
  return lane ? [lane, step().lanes[lane][Number(target.dataset.place)], Number(target.dataset.place)] : null;
}

function choose(chunk) {
  state.chunk = Number.isInteger(chunk) && chunk >= 0 ? chunk : -1;
  figures.chunkInput.value = state.chunk >= 0 ? state.chunk : "";
  drawSchedule();
  const way = figures.way;
  if (state.chunk < 0) { way.replaceChildren(); return; }
  const rows = [];
  for (const [lane, bars] of Object.entries(step().lanes)) {
    for (const bar of bars) if (bar[2] === state.chunk) rows.push([bar[0], data.lanes[lane], lane === "thread" ? causeName(bar[3]) : bar[3], lane === "thread" || lane === "updates" ? "" : bytes(bar[4]), bar[1] - bar[0]]);
  }
  rows.sort((a, b) => a[0] - b[0]);
  way.replaceChildren(table(`The way of ${chunkName(state.chunk)} through step ${step().step}: ${rows.length} events`, ["at", "lane", "what", "bytes", "takes"],
    rows.map(([at, lane, what, count, takes]) => [seconds(at), lane, what, count, seconds(takes)]), [0, 3, 4]));
  say(`${chunkName(state.chunk)}: ${rows.length} events in this step`);
}

function zoom(factor, around) {
  const middle = around === undefined ? (state.from + state.to) / 2 : around, whole = step().seconds;
  const span = Math.min(whole, Math.max(whole * 1e-5, (state.to - state.from) * factor));
  const share = (middle - state.from) / (state.to - state.from);
  state.from = Math.max(0, Math.min(middle - share * span, whole - span));
  state.to = state.from + span;
  redraw();
}

function pan(share) {
  const span = state.to - state.from;
  state.from = Math.max(0, Math.min(state.from + share * span, step().seconds - span));
  state.to = state.from + span;
  redraw();
}

function everything() { state.from = 0; state.to = step().seconds || 1; redraw(); }

function redraw() { drawTide(); drawSchedule(); }

function drawTide() {
  const names = new Set();
  const svgs = tiers().map((tier) => { const [svg, found] = tideOf(tier); found.forEach((name) => names.add(name)); return svg; });
  figures.tide.replaceChildren(...svgs);
  figures.tideLegend.replaceChildren(legend([...names].map((name) => [name, CATEGORY[name]])));
}

function stepTables() {
  const one = step();
  const causes = Object.entries(one.causes);
  figures.causes.replaceChildren(table(`Seconds of the step (${one.label}), ${seconds(one.seconds)} in all`, ["cause", "seconds", "share", "", "meaning"],
    causes.map(([cause, spent]) => {
      const bar = make("span", { class: "share", "aria-hidden": "true" });
      bar.style.width = `${Math.max(1, 160 * Math.max(0, spent) / one.seconds)}px`;
      bar.style.background = colour(CAUSE[cause]);
      return [causeName(cause), seconds(spent), percent(spent / one.seconds), bar, data.causes[cause] ? data.causes[cause][1] : ""];
    }), [1, 2]));
  figures.lanes.replaceChildren(table("What each lane did", ["lane", "bars", "bytes", "busy", "of the step", "rate"],
    Object.keys(data.lanes).filter((lane) => one.lanes[lane]).map((lane) => {
      const moved = one.bytes[lane];
      return [data.lanes[lane], one.counts[lane] === undefined ? one.lanes[lane].length : one.counts[lane], moved === undefined ? "" : bytes(moved), seconds(one.busy[lane]),
        percent(one.busy[lane] / one.seconds), moved && one.busy[lane] ? `${bytes(moved / one.busy[lane])}/s` : ""];
    }), [1, 2, 3, 4, 5]));
  figures.plan.replaceChildren(...planTables(one));
  figures.memory.replaceChildren(memoryTable(one));
}

function planTables(one) {
  const plan = one.plan, found = [];
  if (plan) {
    const moved = Object.entries(one.bytes).filter(([link]) => link !== "wire").reduce((sum, [, count]) => sum + count, 0);
    const rows = [
      ["bytes moved between tiers", bytes(plan.traffic), bytes(moved), moved ? (plan.traffic / moved).toFixed(3) : ""],
      ["most bytes on the device", bytes(plan.highest), bytes(one.peak.device), one.peak.device ? (plan.highest / one.peak.device).toFixed(3) : ""],
      ["moments", String(plan.moments * plan.accumulate), String(one.moments.filter((row) => row[1] !== "update").length), ""],
    ];
    if (plan.seconds) rows.push(["seconds a step, simulated on this run's rates", seconds(plan.seconds), seconds(one.own_seconds), (plan.seconds / one.own_seconds).toFixed(3)]);
    found.push(table(`The plan was made from a ${plan.source} trace; optimizer state of ${Object.entries(plan.homes).map(([home, count]) => `${count} chunks on ${home}`).join(", ")}`,
      ["", "planned", "measured", "planned / measured"], rows, [1, 2, 3]));
  } else if (!data.simulated) found.push(make("p", {}, "No plan was followed in this step."));
  if (data.forecast.length) {
    const format = { seconds, bytes };
    found.push(table("The forecast that was made before the run, on the machine that the config names", ["", "forecast", "measured"],
      data.forecast.map(([name, kind, told, came]) => [name, format[kind](told), format[kind](came)]), [1, 2]));
  }
  return found;
}

function memoryTable(one) {
  const rows = [];
  for (const tier of tiers()) {
    const most = {};
    for (const [, sums] of step().levels.filter((row) => row[1] === tier).map(([time, , tags, beside]) => [time, { ...tags, ...(beside ? { "non-model": beside } : {}) }])) {
      for (const [tag, count] of Object.entries(sums)) most[tag] = Math.max(most[tag] || 0, count);
    }
    for (const [tag, count] of Object.entries(most)) rows.push([tier, tag, category(tag), bytes(count)]);
    if (one.peak[tier]) rows.push([tier, data.simulated ? "together, at the most" : "the whole run's peak", "", bytes(one.peak[tier])]);
    if (one.budget[tier]) rows.push([tier, "budget", "", bytes(one.budget[tier])]);
  }
  return table(`The most that each tag held (${one.label})`, ["tier", "tag", "category", "bytes"], rows, [3]);
}

function tideKeys(event) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10 };
  if (event.shiftKey && (event.key === "ArrowRight" || event.key === "ArrowLeft")) pan(event.key === "ArrowRight" ? 0.25 : -0.25);
  else if (event.key in moves) showMoment(state.moment + moves[event.key]);
  else if (event.key === "Home") showMoment(0);
  else if (event.key === "End") showMoment(step().moments.length - 1);
  else if (event.key === "Enter" || event.key === " ") pinMoment();
  else if (event.key === "+" || event.key === "=") zoom(0.5, step().moments[state.moment] ? step().moments[state.moment][0] : undefined);
  else if (event.key === "-") zoom(2);
  else if (event.key === "0") everything();
  else if (event.key === "Escape") { hideTip(); figures.momentPin.hidden = true; }
  else return;
  event.preventDefault();
}

function scheduleKeys(event) {
  const lanes = figures.laneNames, bars = () => step().lanes[lanes[state.lane]];
  if (event.shiftKey && (event.key === "ArrowRight" || event.key === "ArrowLeft")) pan(event.key === "ArrowRight" ? 0.25 : -0.25);
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    state.lane = Math.max(0, Math.min(lanes.length - 1, state.lane + (event.key === "ArrowDown" ? 1 : -1)));
    state.bar = 0;
  } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") state.bar = Math.max(0, Math.min(bars().length - 1, state.bar + (event.key === "ArrowRight" ? 1 : -1)));
  else if (event.key === "Enter" || event.key === " ") { if (bars()[state.bar]) choose(bars()[state.bar][2]); event.preventDefault(); return; }
  else if (event.key === "+" || event.key === "=") { zoom(0.5, bars()[state.bar] ? bars()[state.bar][0] : undefined); event.preventDefault(); return; }
  else if (event.key === "-") { zoom(2); event.preventDefault(); return; }
  else if (event.key === "0") { everything(); event.preventDefault(); return; }
  else if (event.key === "Escape") { hideTip(); choose(-1); event.preventDefault(); return; }
  else return;
  event.preventDefault();
  const bar = bars()[state.bar];
  if (bar && (bar[1] < state.from || bar[0] > state.to)) {
    const span = state.to - state.from;
    state.from = Math.max(0, Math.min(bar[0] - span / 2, step().seconds - span));
    state.to = state.from + span;
    drawTide();
  }
  drawSchedule();
  const chosen = figures.schedule.querySelector(".chosen");
  if (bar && chosen) {
    const box = chosen.getBoundingClientRect();
    showTip(barName(lanes[state.lane], bar), box.left, box.bottom);
  }
  if (bar) say(`${data.lanes[lanes[state.lane]]}, ${state.bar + 1} of ${bars().length}: ${barName(lanes[state.lane], bar)}`);
}

function oneStep() {
  const choice = make("select", { id: "step" }, ...data.recorded.map((one, place) => make("option", { value: place, selected: place === state.place }, one.label)));
  choice.addEventListener("change", () => { state.place = Number(choice.value); state.moment = -1; state.bar = -1; state.lane = 0; state.to = step().seconds || 1; state.from = 0; redraw(); stepTables(); choose(-1); });
  const button = (name, act) => { const one = make("button", { type: "button" }, name); one.addEventListener("click", act); return one; };
  const tools = () => make("div", { class: "tools" }, button("closer", () => zoom(0.5)), button("farther", () => zoom(2)), button("◀ earlier", () => pan(-0.25)), button("later ▶", () => pan(0.25)), button("whole step", everything));
  figures.tide = make("div", { class: "figure", id: "tide-figure", tabindex: 0, role: "application", "aria-label": "The tide: left and right go from moment to moment, Enter keeps one, plus and minus zoom, shift with arrows pans." });
  figures.tideLegend = make("div");
  figures.momentPin = make("div", { class: "pinned", id: "moment", role: "status", hidden: true });
  figures.tide.addEventListener("keydown", tideKeys);
  const placeOf = (event) => { const box = figures.tide.getBoundingClientRect(); return timeAt(((event.clientX - box.left) / box.width) * WIDTH); };
  figures.tide.addEventListener("mousemove", (event) => showMoment(momentAt(placeOf(event)), event));
  figures.tide.addEventListener("mouseleave", hideTip);
  figures.tide.addEventListener("blur", hideTip);
  figures.tide.addEventListener("click", (event) => { showMoment(momentAt(placeOf(event))); pinMoment(); });
  section("tide", "The tide", make("p", { class: "note" }, "What each tier holds over one step, by category; the dashed line is its budget. Non-model data is what the plan leaves room for. Left and right go from moment to moment, a click or Enter keeps one."),
    make("div", { class: "tools" }, make("label", { for: "step" }, "recorded "), choice), tools(), figures.tideLegend, figures.tide, figures.momentPin);

  figures.schedule = make("div", { class: "figure", id: "schedule-figure", tabindex: 0, role: "application", "aria-label": "The schedule: up and down choose a lane, left and right a bar, Enter its chunk, plus and minus zoom, shift with arrows pans." });
  figures.chunkInput = make("input", { type: "number", id: "chunk", min: 0, max: Math.max(0, data.model.chunks.length - 1) });
  figures.chunkInput.addEventListener("change", () => choose(figures.chunkInput.value === "" ? -1 : Number(figures.chunkInput.value)));
  figures.way = make("div", { id: "way" });
  figures.lanes = make("div", { id: "lanes" });
  figures.schedule.addEventListener("keydown", scheduleKeys);
  figures.schedule.addEventListener("mousemove", (event) => { const found = barUnder(event.target); if (found) showTip(barName(found[0], found[1]), event.clientX, event.clientY); else hideTip(); });
  figures.schedule.addEventListener("mouseleave", hideTip);
  figures.schedule.addEventListener("blur", hideTip);
  figures.schedule.addEventListener("click", (event) => { const found = barUnder(event.target); if (found) { state.lane = figures.laneNames.indexOf(found[0]); state.bar = found[2]; choose(found[1][2]); } });
  let grabbed = null;
  figures.schedule.addEventListener("pointerdown", (event) => { grabbed = event.clientX; });
  addEventListener("pointerup", () => { grabbed = null; });
  figures.schedule.addEventListener("pointermove", (event) => {
    if (grabbed === null || Math.abs(event.clientX - grabbed) < 4) return;
    pan((grabbed - event.clientX) / figures.schedule.clientWidth);
    grabbed = event.clientX;
  });
  for (const one of [figures.tide, figures.schedule]) {
    one.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = one.getBoundingClientRect();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(((event.clientX - box.left) / box.width) * WIDTH));
    }, { passive: false });
  }
  const causes = [...new Set(data.recorded.flatMap((one) => Object.keys(one.causes)))].filter((cause) => cause !== "unexplained");
  section("schedule", "The schedule", make("p", { class: "note" }, "One lane for each resource. On the thread's lane each piece has the colour of its cause: reds are waits, in which nothing is computed. Choose a chunk to see its way."),
    make("div", { class: "tools" }, make("label", { for: "chunk" }, "chunk "), figures.chunkInput, button("no chunk", () => choose(-1))), tools(),
    legend(causes.map((cause) => [causeName(cause), CAUSE[cause]])), figures.schedule,
    make("p", { class: "note" }, "Bars of updates and links, by what they are of:"), legend([["parameters", "--c0"], ["gradients", "--c1"], ["optimizer state", "--c2"], ["activations", "--c3"]]),
    figures.way, figures.lanes);

  figures.plan = make("div", { id: "planned" });
  figures.causes = make("div", { id: "causes" });
  section("plan", "Plan and measurement", figures.plan, figures.causes);
  figures.memory = make("div", { id: "memory-table" });
  state.to = step().seconds || 1;
}

// -- curves ---------------------------------------------------------------------------------------------

function curve(name, label, points, format) {
  const wide = 360, high = 110, left = 62;
  const steps = points.map((point) => point[0]), values = points.map((point) => point[1]).filter(Number.isFinite);
  const low = Math.min(...values), top = Math.max(...values), first = steps[0], last = steps[steps.length - 1];
  const px = (at) => left + ((at - first) / Math.max(1e-9, last - first)) * (wide - left - 8);
  const py = (value) => 8 + (1 - (value - low) / (top - low || 1)) * (high - 16);
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${high + 16}`, role: "img", "aria-label": `${label}: from ${format(values[0])} to ${format(values[values.length - 1])}, lowest ${format(low)}, highest ${format(top)}` });
  svg.append(draw("text", { x: left - 6, y: 14, "text-anchor": "end" }, format(top)), draw("text", { x: left - 6, y: high - 4, "text-anchor": "end" }, format(low)),
    draw("text", { x: left, y: high + 12 }, `step ${first}`), draw("text", { x: wide - 8, y: high + 12, "text-anchor": "end" }, `${last}`));
  for (const one of data.events) {
    if (one.step < first || one.step > last) continue;
    svg.append(draw("line", { x1: px(one.step), x2: px(one.step), y1: 4, y2: high, stroke: colour(EVENT[one.event]), "stroke-dasharray": "2 3", "data-event": one.event }, draw("title", {}, `${one.event} after step ${one.step}`)));
  }
  svg.append(draw("path", { class: "curve", d: points.filter((point) => Number.isFinite(point[1])).map(([at, value], place) => `${place ? "L" : "M"}${px(at).toFixed(1)},${py(value).toFixed(1)}`).join("") }));
  const dot = draw("circle", { r: 3.5, fill: colour("--c0"), visibility: "hidden" });
  svg.append(dot);
  const holder = make("div", { class: "figure", tabindex: 0, role: "application", "data-curve": name, "aria-label": `${label}: left and right go from step to step` });
  let place = -1;
  const show = (next, event) => {
    place = Math.max(0, Math.min(points.length - 1, next));
    const [at, value] = points[place];
    dot.setAttribute("cx", px(at));
    dot.setAttribute("cy", py(value));
    dot.setAttribute("visibility", "visible");
    const here = data.events.filter((one) => one.step === at).map((one) => one.event);
    const text = `step ${at}: ${label} ${format(value)}${here.length ? `; ${here.join(", ")}` : ""}`;
    holder.dataset.shown = text;
    if (event) { showTip(text, event.clientX, event.clientY); return; }
    say(text);
    const box = dot.getBoundingClientRect();
    showTip(text, box.left, box.top);
  };
  holder.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = first + (((event.clientX - box.left) / box.width) * wide - left) / (wide - left - 8) * (last - first);
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[0] - wanted) < Math.abs(points[best][0] - wanted)) best = index; });
    show(best, event);
  });
  holder.addEventListener("mouseleave", hideTip);
  holder.addEventListener("blur", hideTip);
  holder.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(event.key === "Home" ? 0 : event.key === "End" ? points.length - 1 : place + moves[event.key]);
  });
  holder.append(svg);
  return make("figure", { style: "margin:0" }, make("figcaption", {}, label), holder);
}

const EVENT = { evaluated: "--c3", checkpoint: "--c2", resumed: "--c1", traced: "--c4", "left its plan": "--wait" };

function allCurves() {
  const found = Object.entries(data.curves).map(([name, points]) => curve(name, data.curve_names[name] || name, points, (value) => shown(name, value)));
  for (const [link, points] of Object.entries(data.links)) found.push(curve(`bytes-${link}`, `bytes, ${data.lanes[link] || link}`, points, bytes));
  const steps = data.curves.loss || data.curves.step_seconds || [];
  section("curves", "Curves", make("div", { class: "curves" }, ...found),
    data.events.length ? legend(Object.entries(EVENT).filter(([name]) => data.events.some((one) => one.event === name))) : null,
    data.events.length ? folded(`Events (${data.events.length})`, table("", ["step", "event", "facts"], data.events.slice(0, 500).map((one) => [one.step, one.event, JSON.stringify(one.facts)]), [0])) : null,
    steps.length ? folded("The curves as a table", table("", ["step", ...Object.keys(data.curves).map((name) => data.curve_names[name] || name)],
      steps.slice(0, 2000).map(([at], place) => [at, ...Object.entries(data.curves).map(([name, points]) => { const point = points[place] && points[place][0] === at ? points[place] : points.find((one) => one[0] === at); return point ? shown(name, point[1]) : ""; })]), Object.keys(data.curves).map((_, place) => place + 1))) : null);
}

// -- tables ---------------------------------------------------------------------------------------------

function rest() {
  const parts = [];
  if (figures.memory) parts.push(make("h3", {}, "Memory"), figures.memory);
  if (data.settings.length) parts.push(make("h3", {}, "Settings"), table("Each setting: what was asked for, what it came to, and why", ["setting", "asked", "resolved", "why"], data.settings.map((row) => [row.setting, row.asked, row.resolved, row.why])));
  const flatten = (facts, before = "") => Object.entries(facts).flatMap(([key, value]) => value && typeof value === "object" && !Array.isArray(value) ? flatten(value, `${before}${key}.`) : [[before + key, Array.isArray(value) ? (value.length > 8 ? `${value.length} values` : value.join(", ")) : String(value)]]);
  for (const [name, facts] of [["Machine", data.machine], ["Task", data.task], ["Result", data.result], ["Run", data.facts]]) {
    if (Object.keys(facts).length) parts.push(make("h3", {}, name), table("", ["", ""], flatten(facts)));
  }
  section("tables", "Memory, settings, machine", ...parts);
  section("words", "What the words mean", table("", ["word", "meaning"], Object.entries(data.words)),
    table("Causes: what the thread that trains was at", ["cause", "meaning"], Object.values(data.causes).map(([name, meaning]) => [name, meaning])));
}

// -- the page -------------------------------------------------------------------------------------------

function begin() {
  document.getElementById("where").textContent = [data.facts.folder, data.facts.started && `started ${data.facts.started}`, data.facts.ended && `ended ${data.facts.ended}`, data.facts.commit && `commit ${data.facts.commit}`].filter(Boolean).join(" · ");
  const theme = document.getElementById("theme");
  const isDark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  theme.setAttribute("aria-pressed", String(isDark()));
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    theme.setAttribute("aria-pressed", String(isDark()));
  });
  verdict();
  if (data.recorded.length) oneStep();
  if (Object.keys(data.curves).length) allCurves();
  rest();
  if (data.recorded.length) { redraw(); stepTables(); }
  document.documentElement.dataset.ready = "yes";
}

begin();

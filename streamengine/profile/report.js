/** Draws the profile that lies in this file. What it holds is shown as text only, never as markup. */

const profile = JSON.parse(document.getElementById("profile").textContent);
const { steps, ceilings, timeline } = profile;
const at = (id) => document.getElementById(id);

/** `name.class.class` with properties or attributes, and children: elements or text. */
function element(space, kind, attributes = {}, ...children) {
  const [name, ...classes] = kind.split(".");
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== undefined));
  return made;
}
const html = (kind, ...rest) => element(false, kind, ...rest);
const svg = (kind, ...rest) => element(true, kind, ...rest);

/* numbers */
const digits = (value) => {
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3 });
};
const scaled = (value, units) => {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);
  return `${digits(value / size)} ${unit}`;
};
const seconds = (value) => value ? scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) : "0 ms";
const bytes = (value) => scaled(value, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const known = (value, show = digits) => (value === null || value === undefined ? "–" : show(value));
const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** A name of modules joined by "+" may break behind each. */
const wrapped = (name) => html("span", {}, ...name.split(/(?<=[+|])/).flatMap((part) => [part, html("wbr")]));

/** What a call is, wherever it stands. */
const kindId = ({ kind, piece, name }) => (kind === "piece" && piece ? piece : kind === "attention" ? "attention" : name.replace(/[\w.]+\.\d+: /g, ""));

/** Calls of one kind: one piece wherever it stands, attention, the host's. The most expensive first. */
function kindsOf(calls) {
  const names = new Map(profile.pieces.map((piece) => [piece.key, piece.name]));
  const kinds = new Map();
  for (const call of calls) {
    const id = kindId(call);
    if (!kinds.has(id)) kinds.set(id, { id, kind: call.kind, name: names.get(id) ?? id, calls: [] });
    kinds.get(id).calls.push(call);
  }
  const found = [...kinds.values()].map((kind) => ({ ...kind, ...totals(kind.calls) }));
  found.push({ id: "other", kind: "host", name: "host/other: outside of every call", calls: [], total: profile.host.seconds });
  found.sort((a, b) => b.total - a.total);
  // The first colour is the hot one: whatever costs most has it everywhere. The host's time has none.
  let colour = 0;
  for (const kind of found) {
    kind.class = kind.kind === "host" ? "host" : `c${Math.min(++colour, 8)}`;
    kind.rank = found.indexOf(kind) + 1;
  }
  return found;
}

/** `needed`: seconds at the nearer roof; undefined where bytes and operations are not known. */
function totals(calls) {
  const made = { total: sum(calls.map((call) => call.total_s)), count: sum(calls.map((call) => call.calls)) };
  const counted = calls.filter((call) => call.bytes !== null && call.flops !== null);
  made.bytes = sum(counted.map((call) => call.bytes));
  made.flops = sum(counted.map((call) => call.flops));
  made.counted = sum(counted.map((call) => call.total_s));
  const roofs = counted.map((call) => call.of_ceiling === null ? call.total_s : call.total_s * Math.min(1, call.of_ceiling / 100));
  if (ceilings && counted.some((call) => call.of_ceiling !== null)) made.needed = sum(roofs) + made.total - made.counted;
  return made;
}

const kinds = kindsOf(profile.calls);
const kindOf = (call) => kinds.find((kind) => kind.id === kindId(call));
const whole = profile.step_s.total;
const limit = (kind) => kind.flops / kind.bytes < ceilings.product_gflops / ceilings.read_gbps ? "reading memory" : "computing";
const layersOf = (places) => {
  const numbers = [...new Set(places.flatMap((place) => [...place.matchAll(/layers\.(\d+)/g)].map((found) => +found[1])))];
  return ranges(numbers.sort((a, b) => a - b));
};
const span = (from, to) => (from === to ? `${from}` : `${from}–${to}`);
const ranges = (numbers) => {
  const parts = [];
  for (const number of numbers) {
    if (parts.length && number === parts.at(-1)[1] + 1) parts.at(-1)[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([from, to]) => span(from, to)).join(", ");
};

function drawHead() {
  const { hardware, step_s: step, overhead } = profile;
  const title = `${profile.model} · ${profile.scenario}`;
  document.title = `${title} · profile`;
  at("title").textContent = title;
  const device = hardware.device === "cpu" ? "" : ` · ${hardware.device}`;
  at("about").textContent = [
    `${profile.architecture}, ${profile.dtype}${profile.eager ? ", eager" : ""}`,
    `${hardware.cpu}, ${plural(hardware.threads, "thread")} on ${plural(hardware.cores, "core")}${device}`,
    plural(steps, "step"), profile.created.replace("T", " ").slice(0, 16),
    profile.trace && `trace in ${profile.trace}`,
    overhead && (overhead.on_s > overhead.off_s
      ? `measuring makes a step ${percent(overhead.on_s / overhead.off_s - 1)} longer`
      : "what measuring costs is lost in noise"),
  ].filter(Boolean).join(" · ");
  const [worst] = kinds;
  const share = worst.total / whole;
  const says = [`${seconds(worst.total / steps)} of ${seconds(whole / steps)}`];
  if (worst.count) says.push(plural(Math.round(worst.count / steps), "call") + " a step");
  if (worst.needed !== undefined) {
    says.push(`bound by ${limit(worst)}, at ${percent(worst.needed / worst.total)} of the roof`);
    says.push(`${seconds((worst.total - worst.needed) / steps)} above it`);
  }
  const tiles = [[seconds(step.p50), "median step", `${seconds(step.min)} to ${seconds(step.max)}`]];
  const roofed = kinds.filter((kind) => kind.needed !== undefined);
  const needed = sum(roofed.map((kind) => kind.needed));
  if (sum(roofed.map((kind) => kind.total)) > whole / 2) tiles.push([percent(needed / whole), "of the roofs", `read ${digits(ceilings.read_gbps)} GB/s, product ${digits(ceilings.product_gflops)} GFLOP/s`]);
  const outside = sum(kinds.filter((kind) => kind.kind === "host").map((kind) => kind.total));
  tiles.push([percent(outside / whole), "host and gaps", `${seconds(outside / steps)} a step`]);
  at("verdict").append(
    html(`div.worst.${worst.class}`, {},
      html("p.label", {}, "Most expensive"),
      html("p.big", {}, html("b", {}, percent(share)), " ", wrapped(worst.name)),
      html("p.soft", {}, says.join(" · "))),
    ...tiles.map(([figure, label, more]) => html("div.tile", {}, html("p.label", {}, label), html("p.figure", {}, figure), html("p.soft", {}, more))),
  );
}

/** Means that are far above the medians are not the model's doing. */
function warn() {
  const timed = profile.calls.filter((call) => call.p50_s !== null);
  const [mean, median] = [sum(timed.map((call) => call.total_s)) / steps, sum(timed.map((call) => call.p50_s * call.calls)) / steps];
  if (mean < 1.3 * median) return;
  at("verdict").before(html("p.notice", { role: "note" }, html("b", {}, "Interrupted. "),
    `The calls of a step take ${seconds(mean)} in the mean and ${seconds(median)} by their medians: something else had this machine's cores, ` +
    "or some calls come in bursts. Read the medians, and the ceilings with care."));
}

function drawBars() {
  const longest = kinds[0].total;
  for (const kind of kinds) {
    const width = (value) => `${(100 * value) / longest}%`;
    const bar = svg("svg.bar", { height: 22, width: "100%", "aria-hidden": "true" });
    if (kind.needed === undefined) bar.append(svg(`rect.${kind.class}.fill`, { width: width(kind.total), height: 22, rx: 3 }));
    else bar.append(
      svg(`rect.${kind.class}.fill.light`, { width: width(kind.total), height: 22, rx: 3 }),
      svg(`rect.${kind.class}.fill`, { width: width(kind.needed), height: 22, rx: 3 }));
    const facts = kind.count ? [`${digits(kind.count / steps)} × ${seconds(kind.total / kind.count)}`] : [];
    if (kind.needed !== undefined) facts.push(`${percent(kind.needed / kind.total)} of roof`);
    const name = kind.kind === "piece" && profile.pieces.some((piece) => piece.key === kind.id)
      ? html("a", { href: `#piece-${kind.id}`, onclick: () => (at(`piece-${kind.id}`).open = true) }, wrapped(kind.name)) : wrapped(kind.name);
    at("bars").append(html("div.kind", {},
      html("p.name", {}, html(`span.rank.${kind.class}`, {}, `${kind.rank}`), name),
      html("p.time", {}, html("b", {}, seconds(kind.total / steps)), ` ${percent(kind.total / whole)}`),
      bar, html("p.facts.soft", {}, facts.join(" · "))));
  }
  const calls = sum(profile.calls.map((call) => call.total_s)) / steps;
  at("sum").textContent = `calls ${seconds(calls)} + host/other ${seconds(profile.host.seconds / steps)} = step ${seconds(whole / steps)} (mean of ${steps})`;
}

/** Three lanes, to scale: what computes, attention, and the host with every gap. */
function drawTimeline() {
  if (!timeline) return at("step").remove();
  const { events } = timeline;
  const gaps = [];
  let end = 0;
  for (const event of [...events, { name: "the step's end", start_s: timeline.seconds, seconds: 0 }]) {
    if (event.start_s - end > 1e-9) gaps.push({ name: `gap before ${event.name}`, start_s: end, seconds: event.start_s - end, gap: true });
    end = Math.max(end, event.start_s + event.seconds);
  }
  const all = [...events, ...gaps].sort((a, b) => a.start_s - b.start_s);
  const longest = gaps.reduce((best, gap) => (gap.seconds > best.seconds ? gap : best), { seconds: 0, name: "none" });
  at("step-about").textContent = `Step ${timeline.step}, the median: ${plural(timeline.rows, "row")}, ${plural(timeline.tokens, "token")}, ` +
    `${seconds(timeline.seconds)}. ${plural(gaps.length, "gap")}, ${seconds(sum(gaps.map((gap) => gap.seconds)))} together, ` +
    `the longest ${seconds(longest.seconds)}: ${longest.name}.`;
  const lanes = [["pieces", (event) => event.kind === "piece"], ["attention", (event) => event.kind === "attention"], ["host, gaps", () => true]];
  const lane = (event) => (event.gap ? 2 : lanes.findIndex(([, holds]) => holds(event)));
  let chosen = -1;
  const tell = (index) => {
    chosen = index;
    const event = all[index];
    at("step-event").textContent = event ? `${seconds(event.seconds)} from ${seconds(event.start_s)}: ${event.name}` : "Point at a call, or use the arrow keys.";
    for (const shape of at("timeline").querySelectorAll("rect[data-i]")) shape.classList.toggle("chosen", +shape.dataset.i === index);
  };
  const draw = () => {
    const box = at("timeline");
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    const width = Math.max(300, box.clientWidth - 2) * 2 ** at("zoom").value;
    const x = (time) => (time / timeline.seconds) * width;
    const chart = svg("svg", { viewBox: `0 0 ${width} 150`, width, height: 150, role: "img", tabindex: 0, "aria-label": "Timeline of one step",
      onkeydown: (key) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[key.key];
        if (!move) return;
        key.preventDefault();
        tell(Math.min(all.length - 1, Math.max(0, chosen + move)));
        box.scrollLeft = x(all[chosen].start_s) - box.clientWidth / 2;
      },
      onpointerover: (pointer) => pointer.target.dataset.i && tell(+pointer.target.dataset.i) });
    const unit = niceStep(timeline.seconds / (width / 110));
    for (let time = 0; time <= timeline.seconds; time += unit) {
      const right = x(time) > width - 40;
      chart.append(svg("line.grid", { x1: x(time), x2: x(time), y1: 14, y2: 132 }),
        svg("text.tick", { x: x(time) + (right ? -2 : 2), y: 146, "text-anchor": right ? "end" : "start" }, seconds(time)));
    }
    const titles = lanes.map(([name], i) => svg("text.tick", { x: 2, y: 12 + i * 44 }, name));
    box.onscroll = () => titles.forEach((title) => title.setAttribute("x", box.scrollLeft + 2));
    chart.append(...titles);
    all.forEach((event, i) => chart.append(svg(`rect.${event.gap ? "host" : kindOf(event)?.class ?? "host"}.fill`, {
      "data-i": i, x: x(event.start_s).toFixed(2), y: 16 + lane(event) * 44, height: 24, width: Math.max(0.7, x(event.seconds) - (event.gap ? 0 : 0.5)).toFixed(2) },
      svg("title", {}, `${event.name}: ${seconds(event.seconds)}`))));
    for (const event of events) if (x(event.seconds) > 70)
      chart.append(svg("text.number", { x: x(event.start_s) + 5, y: 32 + lane(event) * 44 }, event.name.match(/layers\.\d+|^[\w: ]+/)?.[0]));
    box.replaceChildren(chart);
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
    tell(chosen);
  };
  at("zoom").addEventListener("input", draw);
  addEventListener("resize", draw);
  draw();
}

const niceStep = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
};

/** Both axes are logarithmic. A dashed line from a point to its roof is what could be won. */
function drawRoofline() {
  const points = kinds.flatMap((kind) => [...new Set(kind.calls.map((call) => call.tokens))].map((tokens) => {
    const own = totals(kind.calls.filter((call) => call.tokens === tokens));
    return { kind, tokens, ...own, x: own.flops / own.bytes, y: own.flops / own.counted / 1e9 };
  })).filter((point) => point.x > 0 && point.y > 0);
  if (!ceilings || !points.length) return at("roof").remove();
  const roof = (x) => Math.min(ceilings.product_gflops, x * ceilings.read_gbps);
  const ridge = ceilings.product_gflops / ceilings.read_gbps;
  const [left, right] = [Math.min(...points.map((point) => point.x), ridge) / 3, Math.max(...points.map((point) => point.x), ridge) * 4];
  const [low, high] = [Math.min(...points.map((point) => point.y), roof(left)) / 2, ceilings.product_gflops * 2];
  const [width, height, edge] = [Math.max(340, Math.min(900, at("roofline").clientWidth)), 380, { left: 62, right: 14, top: 12, bottom: 44 }];
  const scale = (from, to, start, end) => (value) => start + ((Math.log(value) - Math.log(from)) / (Math.log(to) - Math.log(from))) * (end - start);
  const x = scale(left, right, edge.left, width - edge.right);
  const y = scale(low, high, height - edge.bottom, edge.top);
  const chart = svg("svg.plot", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Roofline plot" });
  const ticks = (from, to) => {
    const powers = Array.from({ length: 40 }, (_, i) => 10 ** (i - 20)).filter((power) => power > from / 10 && power < to);
    return (powers.length > 4 ? powers : powers.flatMap((power) => [power, 2 * power, 5 * power])).filter((value) => value >= from && value <= to);
  };
  for (const value of ticks(left, right)) chart.append(svg("line.grid", { x1: x(value), x2: x(value), y1: edge.top, y2: height - edge.bottom }),
    svg("text.tick", { x: x(value), y: height - edge.bottom + 16, "text-anchor": "middle" }, digits(value)));
  for (const value of ticks(low, high)) chart.append(svg("line.grid", { x1: edge.left, x2: width - edge.right, y1: y(value), y2: y(value) }),
    svg("text.tick", { x: edge.left - 6, y: y(value) + 4, "text-anchor": "end" }, digits(value)));
  const angle = (Math.atan2(y(roof(ridge)) - y(roof(left)), x(ridge) - x(left)) * 180) / Math.PI;
  const slope = Math.sqrt(left * ridge);
  chart.append(
    svg("polyline.roof", { points: [left, ridge, right].map((value) => `${x(value)},${y(roof(value))}`).join(" ") }),
    svg("text.roof-name", { transform: `translate(${x(slope)} ${y(roof(slope)) - 8}) rotate(${angle})`, "text-anchor": "middle" }, `read ${digits(ceilings.read_gbps)} GB/s`),
    svg("text.roof-name", { x: width - edge.right, y: y(roof(right)) - 8, "text-anchor": "end" }, `product ${digits(ceilings.product_gflops)} GFLOP/s`),
    svg("text.tick", { x: (edge.left + width) / 2, y: height - 8, "text-anchor": "middle" }, "operations for each byte"),
    svg("text.tick", { transform: `translate(14 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, "GFLOP/s"));
  for (const point of points.sort((a, b) => b.total - a.total)) {
    const radius = 9 + 16 * Math.sqrt(point.total / whole);
    const label = `${point.kind.name} @T≤${point.tokens}: ${digits(point.y)} GFLOP/s, ${digits(point.x)} operations a byte, ${percent(point.y / roof(point.x))} of the roof`;
    chart.append(
      svg("line.distance", { x1: x(point.x), x2: x(point.x), y1: y(point.y), y2: y(roof(point.x)) }),
      svg(`circle.fill.ring.${point.kind.class}`, { cx: x(point.x), cy: y(point.y), r: radius.toFixed(1) }, svg("title", {}, label)),
      svg("text.number", { x: x(point.x), y: y(point.y) + 4, "text-anchor": "middle" }, `${point.kind.rank}`));
  }
  at("roofline").append(chart);
}

const COLUMNS = [
  ["Call", (call) => call.name], ["T ≤", (call) => call.tokens], ["Calls", (call) => call.calls],
  ["A step", (call) => call.total_s / steps, seconds], ["Share", (call) => call.share, percent],
  ["Mean", (call) => call.mean_s, seconds], ["Median", (call) => call.p50_s, seconds], ["Fastest", (call) => call.min_s, seconds],
  ["Bytes", (call) => call.bytes === null ? null : call.bytes / call.calls, bytes], ["GB/s", (call) => call.gbps], ["GFLOP/s", (call) => call.gflops],
  ["Of roof", (call) => call.of_ceiling, (value) => `${digits(value)} %`],
];

/** A kind's calls at one bucket as if they were one. */
function together(kind) {
  return [...new Set(kind.calls.map((call) => call.tokens))].map((tokens) => {
    const calls = kind.calls.filter((call) => call.tokens === tokens);
    const all = totals(calls);
    const per = (amount, unit) => (all.counted ? amount / unit : null);
    return { name: kind.name, own: kind.class, tokens, calls: all.count, total_s: all.total, share: all.total / whole, mean_s: all.total / all.count,
      p50_s: calls.some((call) => call.p50_s === null) ? null : sum(calls.map((call) => call.p50_s * call.calls)) / all.count,
      min_s: calls.some((call) => call.min_s === null) ? null : Math.min(...calls.map((call) => call.min_s)),
      bytes: per(all.bytes, 1), gbps: per(all.bytes, all.counted * 1e9), gflops: per(all.flops, all.counted * 1e9),
      of_ceiling: all.needed === undefined ? null : (100 * all.needed) / all.total };
  });
}

function drawTable() {
  const other = { name: "host/other: outside of every call", own: "host", total_s: profile.host.seconds, share: profile.host.share, bytes: null };
  const each = profile.calls.map((call) => ({ ...call, own: kindOf(call).class }));
  const body = html("tbody");
  let [column, falling] = [3, true];
  const draw = () => {
    const value = COLUMNS[column][1];
    const order = (a, b) => {
      const [one, other] = [value(a), value(b)];
      if ((one ?? null) === null || (other ?? null) === null) return ((one ?? null) === null) - ((other ?? null) === null);
      const sign = typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
      return falling ? -sign : sign;
    };
    const wanted = at("filter").value.toLowerCase();
    const rows = at("places").checked ? each : kinds.flatMap(together);
    const most = Math.max(other.share, ...rows.map((row) => row.share));
    body.replaceChildren(...[...rows, other].filter((row) => row.name.toLowerCase().includes(wanted)).sort(order).map((row) => html("tr", {},
      ...COLUMNS.map(([title, of, show], i) => {
        if (i === 0) return html("th", { scope: "row" }, html(`span.rank.${row.own}`), wrapped(row.name));
        const shown = known(of(row), show);
        if (title !== "Share") return html("td", {}, shown);
        const bar = svg("svg.share", { width: 44, height: 8, "aria-hidden": "true" }, svg(`rect.fill.${row.own}`, { width: (44 * row.share) / most, height: 8 }));
        return html("td", {}, bar, shown);
      }))));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : falling ? "descending" : "ascending"));
  };
  const heads = COLUMNS.map(([title], i) => html("th", { scope: "col" }, html("button", { type: "button",
    onclick: () => { [column, falling] = [i, i === column ? !falling : i !== 0]; draw(); } }, title)));
  at("table").append(html("thead", {}, html("tr", {}, ...heads)), body);
  for (const id of ["filter", "places"]) at(id).addEventListener("input", draw);
  draw();
}

const code = (title, text) => html("details.code", {}, html("summary", {}, title), html("pre", { tabindex: 0 }, text));
const facts = (pairs) => html("dl", {}, ...pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
  .flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));

function drawPieces() {
  const ordered = [...profile.pieces].sort((a, b) => rankOf(a) - rankOf(b));
  at("pieces-about").textContent = `${plural(profile.pieces.length, "unique piece")} in ${plural(sum(profile.pieces.map((piece) => piece.places.length)), "place")}: each was compiled once.`;
  if (!ordered.length) return at("pieces").remove();
  ordered.forEach((piece, i) => {
    const kind = kinds.find((kind) => kind.id === piece.key);
    const { compile } = piece;
    const stages = compile ? [["trace", compile.trace_s], ["lowering", compile.lower_s], ["code", compile.codegen_s]].filter(([, value]) => value !== null) : [];
    const cxx = compile && compile.cxx_s !== null && `C++ ${seconds(compile.cxx_s)}${compile.cxx_pieces ? ` (one library of ${plural(compile.cxx_pieces, "piece")})` : ""}`;
    const found = compile && (compile.cache === "hit" ? "found by this start" : `missed: ${compile.factor ?? "nothing was there"}`);
    at("piece-list").append(html("details.piece", { id: `piece-${piece.key}`, open: i === 0 },
      html("summary", {}, html(`span.rank.${kind?.class ?? "host"}`, {}, kind ? `${kind.rank}` : ""), html("span.title", {}, wrapped(piece.name)),
        html("span.soft", {}, kind ? `${seconds(kind.total / steps)} · ${percent(kind.total / whole)}` : "not called")),
      facts([
        ["layers", layersOf(piece.places) || undefined], ["places", html("details", {}, html("summary", {}, `${piece.places.length}`), html("ul", {}, ...piece.places.map((place) => html("li", {}, place))))],
        ["key", html("code", {}, piece.key)], ["bytes of a call", piece.bytes && html("code", {}, piece.bytes)], ["operations of a call", piece.flops && html("code", {}, piece.flops)],
        ["not counted", piece.uncounted.join(", ")], ["cache", found],
        ["compiling took", [...stages.map(([name, value]) => `${name} ${seconds(value)}`), cxx].filter(Boolean).join(", ")],
      ]),
      piece.kernels.length ? html("details.code", {}, html("summary", {}, plural(piece.kernels.length, "kernel")), ...piece.kernels.map((kernel) => code(kernel.name, kernel.source))) : undefined,
      piece.graph ? code("FX graph", piece.graph) : undefined,
      piece.code ? code("Generated code", piece.code) : undefined));
  });
}
const rankOf = (piece) => kinds.find((kind) => kind.id === piece.key)?.rank ?? Infinity;

/** Bars for named amounts; `show` writes one. */
function amounts(target, pairs, show) {
  if (!pairs.length) return target.append(html("p.soft", {}, "nothing was recorded"));
  const most = Math.max(...pairs.map(([, value]) => value));
  for (const [name, value] of pairs) target.append(html("div.amount", {}, html("span", {}, name),
    svg("svg", { height: 12, width: "100%", "aria-hidden": "true" }, svg("rect.plain", { height: 12, rx: 2, width: `${most ? (100 * value) / most : 0}%` })), html("b", {}, show(value))));
}

drawHead();
warn();
drawBars();
drawTimeline();
drawRoofline();
drawTable();
drawPieces();
const buckets = (list) => list.map(({ at_most: most, steps }, i) => [span(i ? list[i - 1].at_most + 1 : 1, most), steps]);
amounts(at("rows"), buckets(profile.rows), (count) => plural(count, "step"));
amounts(at("tokens"), buckets(profile.tokens), (count) => plural(count, "step"));
amounts(at("ledger"), Object.entries(profile.ledger).sort((a, b) => b[1] - a[1]).map(([name, value]) => [name.replace(/_bytes$/, "").replaceAll("_", " "), value]), bytes);
amounts(at("startup"), Object.entries(profile.startup), seconds);

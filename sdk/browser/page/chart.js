/** The time between tokens as they arrive here, drawn as a line that grows. */

const POINTS = 120;
const WIDTH = 240;
const HEIGHT = 40;
const SVG = "http://www.w3.org/2000/svg";

const svg = (name, attributes) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

/** Tokens that came together share the time since those before them. No clock of its own: time is an argument. */
export class Chart {
  /** Milliseconds for each token, the newest last. */
  #points = [];
  #last;

  constructor() {
    this.element = document.createElement("figure");
    this.element.className = "chart";
    const frame = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.title = frame.appendChild(svg("title", {}));
    this.middle = frame.appendChild(svg("path", { class: "middle" }));
    this.line = frame.appendChild(svg("path", { class: "line" }));
    this.caption = document.createElement("figcaption");
    this.element.append(frame, this.caption);
    this.element.hidden = true;
  }

  /** `n` tokens arrived at `now`, in milliseconds. */
  add(now, n) {
    if (this.#last !== undefined) {
      const each = (now - this.#last) / n;
      for (let i = 0; i < n; i++) this.#points.push(each);
      this.#points.splice(0, this.#points.length - POINTS);
    }
    this.#last = now;
  }

  /** Time that passed without a connection says nothing of the engine. */
  skip() {
    this.#last = undefined;
  }

  paint() {
    const points = this.#points;
    if (points.length < 2) return;
    this.element.hidden = false;
    const sorted = [...points].sort((a, b) => a - b);
    const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
    // One stall must not flatten all the rest, so what is far above the usual is cut at the top.
    const top = Math.max(4 * at(0.5), at(0.9), 1);
    const y = (value) => (HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 4)).toFixed(1);
    const x = (index) => ((index / (points.length - 1)) * WIDTH).toFixed(1);
    this.line.setAttribute("d", `M${points.map((value, index) => `${x(index)} ${y(value)}`).join("L")}`);
    this.middle.setAttribute("d", `M0 ${y(at(0.5))}H${WIDTH}`);
    const text = `between tokens: median ${ms(at(0.5))} · p99 ${ms(at(0.99))}`;
    if (this.caption.textContent !== text) this.caption.textContent = this.title.textContent = text;
  }
}

/** Milliseconds, with digits that mean something. */
export const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;

/** Tokens shaded by how likely they were, with what else could have stood there. */

const LEVELS = 10;
/** @type {WeakMap<Element, import("../types.d.ts").Logprob>} */
const facts = new WeakMap();

/**
 * The text of a delta, cut where its tokens end. What a token writes may be held back and come with a later one, so
 * the pieces are searched for in the text, and together they are always the whole of it.
 * @param {string} text
 * @param {import("../types.d.ts").Logprob[]} logprobs
 * @returns {string[]} one piece for each
 */
export function align(text, logprobs) {
  let position = 0;
  return logprobs.map(({ text: own }, index) => {
    const found = own ? text.indexOf(own, position) : -1;
    let end = found < 0 || found > position + 8 ? position : found + own.length;
    if (index === logprobs.length - 1) end = text.length;
    const piece = text.slice(position, end);
    position = end;
    return piece;
  });
}

/** @param {string} text @param {import("../types.d.ts").Logprob[]} logprobs */
export function tokenSpans(text, logprobs) {
  return align(text, logprobs).flatMap((piece, index) => {
    if (!piece) return [];
    const span = document.createElement("span");
    span.className = `token p${level(logprobs[index].logprob)}`;
    span.textContent = piece;
    span.tabIndex = -1;
    facts.set(span, logprobs[index]);
    return [span];
  });
}

const level = (logprob) => Math.min(LEVELS - 1, Math.floor(Math.exp(logprob) * LEVELS));
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.001 ? 0 : 1)} %`;
/** Blanks and line ends can be seen. */
const visible = ({ text, b64, token }) =>
  text !== undefined ? text.replaceAll(" ", "␣").replaceAll("\n", "⏎") || `#${token}` : `bytes ${b64}`;

/** One popover for all tokens: by hovering, and by the arrow keys from the text that has the focus. */
export function watchTokens(root, tip) {
  let shown = null;

  function show(span) {
    const fact = facts.get(span);
    if (!fact || span === shown) return;
    hide();
    shown = span;
    tip.replaceChildren(row(fact, "chosen"), ...(fact.top ?? []).filter((t) => t.token !== fact.token).map((t) => row(t)));
    tip.hidden = false;
    span.setAttribute("aria-describedby", tip.id);
    const { left, top, bottom } = span.getBoundingClientRect();
    const above = top > tip.offsetHeight + 8;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${above ? top - tip.offsetHeight - 6 : bottom + 6}px`;
  }

  function hide() {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  }

  function row(fact, className = "") {
    const line = document.createElement("div");
    line.className = className;
    const name = line.appendChild(document.createElement("code"));
    name.textContent = visible(fact);
    const bar = line.appendChild(document.createElement("i"));
    bar.style.width = `${Math.max(2, 60 * Math.exp(fact.logprob))}px`;
    line.append(percent(fact.logprob));
    return line;
  }

  root.addEventListener("pointerover", ({ target }) => (target.classList.contains("token") ? show(target) : hide()));
  root.addEventListener("pointerleave", hide);
  root.addEventListener("scroll", hide, true);
  root.addEventListener("focusin", ({ target }) => (target.classList.contains("token") ? show(target) : hide()));
  root.addEventListener("focusout", hide);
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step || !event.target.matches?.(".token, .text.shaded")) return;
    const next = event.target.matches(".token") ? event.target[step] : event.target.querySelector(".token");
    if (!next?.matches(".token")) return;
    event.preventDefault();
    next.focus();
  });
}

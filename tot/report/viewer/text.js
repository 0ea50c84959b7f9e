"use strict";
// Elements from text. No code of this page parses text as markup: strings become text nodes.

const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; children that aren't elements become text. */
function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make control characters visible, including bidirectional controls. */
function visible(text) {
  return text
    .replace(/[\x00-\x08\x0b-\x1f]/g, (character) => String.fromCharCode(0x2400 + character.charCodeAt(0)))
    .replace(/[\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g, (character) => `⟨U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Split text into pieces, with the matches of `query` marked. */
function marked(text, query) {
  if (!query) return [visible(text)];
  const pieces = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, from)) {
    pieces.push(visible(text.slice(from, at)), make("mark", {}, visible(text.slice(at, at + query.length))));
    from = at + query.length;
  }
  return [...pieces, visible(text.slice(from))];
}

/** The beginning of a text, on one line, never cut within a code point. */
function brief(text, length) {
  const line = text.slice(0, 4 * length).replace(/\s+/g, " ").trim();
  const characters = [...line];
  return visible(characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : line);
}

const MATH = [
  [/\\(?:text|mathrm|mathbf|boxed|operatorname)\s*\{([^{}]*)\}/g, "$1"],
  [/\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}/g, "($1)/($2)"],
  [/\\sqrt\s*\{([^{}]*)\}/g, "√($1)"],
  [/\\(?:times|cdot)(?![a-z])/gi, "×"],
  [/\\div(?![a-z])/gi, "÷"],
  [/\\leq?(?![a-z])/gi, "≤"],
  [/\\geq?(?![a-z])/gi, "≥"],
  [/\\approx(?![a-z])/gi, "≈"],
  [/\\(?:left|right|quad|,|;|!)/g, " "],
  [/\\([%$#&_])/g, "$1"],
  [/\\[()[\]]|\$\$/g, ""],
];

/** LaTeX as plain text, for labels: "\\frac{1}{2}" becomes "(1)/(2)". */
function plainMath(text) {
  return MATH.reduce((plain, [pattern, replacement]) => plain.replace(pattern, replacement), text);
}

/** Format a number with three significant digits; other values (such as infinities) as text. */
function shortNumber(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

function share(value) {
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

function seconds(value) {
  return value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** "1 token", "2 tokens". */
function counted(count, noun) {
  return `${shortNumber(count)} ${noun}${count === 1 ? "" : "s"}`;
}

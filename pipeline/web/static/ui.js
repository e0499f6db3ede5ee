// Shared by all pages: number formats, stage colors, small components.

import { html, useErrorBoundary, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

export { html, render, useState, useEffect, useRef, useMemo, useLayoutEffect } from "./vendor/preact-htm.js";

export const COLOURS = 10;

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(2)} s`;
  const whole = Math.round(value);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  return h ? `${h} h ${m} min` : `${m} min ${s} s`;
}

export const percent = (share) => (share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${place ? value.toFixed(1) : value} ${units[place]}`;
}

export function inUnit(value, unit) {
  if (unit === "%") return percent(value);
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  return number(value);
}

export function colourOf(plan, stage) {
  const place = plan.stages.findIndex((one) => one.name === stage);
  return place < 0 ? "var(--line-strong)" : `var(--c${place % COLOURS})`;
}

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

export const Swatch = ({ colour }) => html`<span class="swatch" style=${{ background: colour }}></span>`;

export const Card = ({ title, children, label }) =>
  html`<section class="card" aria-label=${label || title}>${title && html`<h2>${title}</h2>`}${children}</section>`;

// Shows the error of a page that cannot be drawn in its place, until the address changes.
export function Boundary({ at, children }) {
  const [error] = useErrorBoundary();
  const last = useRef({});
  if (error && last.current.error !== error) last.current = { error, at };
  if (last.current.at !== at) last.current.at = null;
  return last.current.at ? html`<div class="alert" role="alert">This page cannot be drawn: ${String(error.message || error)}</div>` : children;
}

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export function Copy({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<div class="command"><code>${text}</code>
    <button class="button quiet icon small" onClick=${copy} aria-label=${`Copy: ${text}`}>${done ? "Copied" : "Copy"}</button></div>`;
}

// Calls close() at Esc and at a click outside the element of the returned ref, while `open`. `keeps` selects what else
// may be clicked.
export function useClosing(open, close, keeps = "") {
  const inside = useRef(null);
  useLayoutEffect(() => { // before the next key or click
    if (!open) return undefined;
    const press = (event) => event.key === "Escape" && close();
    const point = (event) => inside.current && !inside.current.contains(event.target) && !(keeps && event.target.closest(keeps)) && close();
    document.addEventListener("keydown", press);
    document.addEventListener("pointerdown", point);
    return () => { document.removeEventListener("keydown", press); document.removeEventListener("pointerdown", point); };
  });
  return inside;
}

// The result of `load` as {value, error}, loaded again whenever `when` changes.
export function useLoaded(load, when) {
  const [state, setState] = useState({});
  useEffect(() => {
    let current = true;
    load().then(
      (value) => current && setState({ value }),
      (error) => current && setState((before) => ({ ...before, error: String(error.message || error) })),
    );
    return () => { current = false; };
  }, when);
  return state;
}

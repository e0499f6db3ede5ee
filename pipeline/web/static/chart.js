// A line chart over steps, drawn by uPlot in the colors of the theme, with the values under the pointer.

import { bytes, html, inUnit, number, useEffect, useMemo, useRef } from "./ui.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 7 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b); // between ticks of steps
const LETTER = 7.5; // pixels

// The texts of ticks that lie `each` apart: as many decimal places as it takes to tell them from each other.
export function tickTexts(values, each, unit) {
  const places = (size) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].find((n) => Math.abs(size * 10 ** n - Math.round(size * 10 ** n)) < 1e-6 * size * 10 ** n) ?? 10;
  if (unit === "bytes") return values.map((value) => bytes(value));
  if (unit === "%") return values.map((value) => `${(100 * value).toFixed(places(100 * each))} %`);
  const largest = Math.max(...values.map(Math.abs));
  const text = (value) => (value === 0 ? "0" : largest >= 1e5 || largest < 1e-3 ? value.toExponential(1) : value.toFixed(places(each)));
  return values.map((value) => text(value) + (unit === "s" ? " s" : ""));
}

const LOW = { "%": 0.01, bytes: 1024 }; // the top of an axis of zeros, where it is not 1

// The ends of an axis for values from `low` to `high`: around a constant, and from 0 for zeros.
export function ends(low, high, unit) {
  if (low === null || low === undefined) return [0, LOW[unit] || 1];
  if (high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return window.uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, LOW[unit] || 1] : [low - 0.1 * Math.abs(low), low + 0.1 * Math.abs(low)];
}

// The exponential mean of values up to each one, with `weight` from 0 for the values themselves to almost 1; null stays.
export function smoothed(values, weight) {
  let [sum, all] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    all = weight * all + (1 - weight);
    return sum / all;
  });
}

// The lines of several runs over the same steps: [steps, values of each].
export function joined(runs) {
  if (runs.length === 1) return [runs[0].steps, [runs[0].values]];
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  const of = runs.map((run) => { const known = new Map(run.steps.map((step, n) => [step, run.values[n]])); return steps.map((step) => known.get(step) ?? null); });
  return [steps, of];
}

// `series` holds [name, color variable, values] per line, all over the same steps; `smooth` draws their means over them.
export function Chart({ steps, series, label, unit = "", smooth = 0, height = 160, sync = "steps" }) {
  const place = useRef(null);
  const plot = useRef(null);
  const said = useRef(null);
  const data = useMemo(() => [steps, ...series.map(([, , values]) => values), ...(smooth ? series.map(([, , values]) => smoothed(values, smooth)) : [])], [steps, smooth, ...series.map(([, , values]) => values)]);
  const now = useRef({});
  now.current = { data, series };
  // The values at a place of the steps; the last ones if the pointer is elsewhere. Texts only: nothing is drawn again.
  const say = (index) => {
    const { data: [all, ...lines], series: named } = now.current;
    if (!said.current || !all.length) return;
    const shown = lines.slice(-named.length);
    const at = index ?? all.length - 1;
    const last = (values) => values[at] ?? (index === null || index === undefined ? values.findLast((value) => value !== null && value !== undefined) : null);
    said.current.querySelector("b").textContent = (index ?? null) === null && named.length > 1 ? "last" : `step ${all[at].toLocaleString("en-US")}`;
    said.current.querySelectorAll("i").forEach((one, n) => { one.textContent = inUnit(last(shown[n]), unit); });
  };
  const drawn = series.map(([name, colour]) => name + colour).join("\n") + (smooth > 0);
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px Inter, system-ui, sans-serif" };
      const line = ([name, colour], n, faint) => ({ label: name, stroke: style(colour), alpha: faint ? 0.3 : 1, width: faint ? 1 : 1.5, dash: n && !faint ? [5, 3] : undefined, spanGaps: true, points: { show: now.current.data[0].length < 3 } });
      plot.current = new window.uPlot({
        width: Math.max(160, place.current.clientWidth), height,
        cursor: { sync: { key: sync }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
        legend: { show: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => ends(low, high, unit) } },
        axes: [
          { ...axis, size: 26, incrs: WHOLE, space: 56, values: (_, all) => all.map((value) => value.toLocaleString("en-US")) },
          { ...axis, space: 32, size: (_, texts) => 14 + LETTER * Math.max(2, ...(texts || []).map((text) => text.length)), values: (_, all, axisNumber, space, each) => tickTexts(all, each, unit) },
        ],
        series: [{}, ...series.map((one, n) => line(one, n, smooth > 0)), ...(smooth ? series.map((one, n) => line(one, n, false)) : [])],
        hooks: { setCursor: [(made) => say(made.cursor.idx)] },
      }, now.current.data, place.current);
    };
    make();
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(160, place.current.clientWidth), height }));
    observer.observe(place.current);
    const theme = new MutationObserver(make);
    theme.observe(document.documentElement, { attributes: true });
    return () => { observer.disconnect(); theme.disconnect(); plot.current?.destroy(); };
  }, [drawn, unit]);
  useEffect(() => { plot.current?.setData(data); say(null); }, [data]);
  return html`<div class="chart" style=${{ height: `${height}px` }} ref=${place} role="img" aria-label=${label}></div>
    <p class="readout" ref=${said}><b></b>${smooth > 0 && html`<span class="dim">smoothed</span>`}${series.map(([name, colour]) => html`<span key=${name}><span class="swatch" style=${{ background: `var(${colour})` }}></span>${series.length > 1 ? html`<span class="dim run">${name}</span>` : ""}<i></i></span>`)}</p>`;
}

// A line chart over steps, drawn by uPlot in the colors of the theme.

import { html, number, useEffect, useRef } from "./ui.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `series` holds [name, color variable, values] per line, all over the same steps.
export function Chart({ steps, series, label, height = 160, sync = "steps" }) {
  const place = useRef(null);
  const plot = useRef(null);
  const shown = series.map(([name]) => name).join("\n");
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px Inter, system-ui, sans-serif" };
      plot.current = new window.uPlot({
        width: Math.max(160, place.current.clientWidth), height,
        cursor: { sync: { key: sync }, y: false, points: { size: 6 } },
        legend: { show: false },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 24 }, { ...axis, size: 52, values: (_, all) => all.map((value) => number(value, 2)) }],
        series: [{}, ...series.map(([name, colour], n) => ({ label: name, stroke: style(colour), width: 1.5, dash: n ? [5, 3] : undefined, spanGaps: true, points: { show: steps.length < 3 } }))],
      }, [steps, ...series.map(([, , values]) => values)], place.current);
    };
    make();
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: Math.max(160, place.current.clientWidth), height }));
    observer.observe(place.current);
    const theme = new MutationObserver(make);
    theme.observe(document.documentElement, { attributes: true });
    return () => { observer.disconnect(); theme.disconnect(); plot.current?.destroy(); };
  }, [shown]);
  useEffect(() => { plot.current?.setData([steps, ...series.map(([, , values]) => values)]); });
  return html`<div class="chart" style=${{ height: `${height}px` }} ref=${place} role="img" aria-label=${label}></div>`;
}

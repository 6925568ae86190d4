"use strict";
// Draws every chart, again when the colour scheme changes, and moves the window of those that zoom.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();

  function config(width) {
    const style = getComputedStyle(document.documentElement);
    const [ink, dim, line] = ["--ink", "--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
    return {
      background: "transparent",
      font: getComputedStyle(document.body).fontFamily,
      view: { stroke: line },
      axisY: { labelLimit: Math.max(110, 0.38 * width) },
      axis: { labelColor: ink, titleColor: dim, gridColor: line, tickColor: line, domainColor: line, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      legend: { symbolBaseFillColor: dim, symbolBaseStrokeColor: dim, columns: Math.max(1, Math.floor(width / 190)), labelColor: ink, titleColor: dim, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      title: { color: ink },
      text: { color: ink, fontSize: 12 },
    };
  }

  async function draw(place) {
    const options = {
      renderer: "canvas",
      downloadFileName: place.dataset.chart,
      config: config(place.clientWidth),
      actions: { export: true, source: false, compiled: false, editor: false },
      tooltip: { theme: dark.matches ? "dark" : "light" },
    };
    try {
      views.get(place)?.finalize();
      views.set(place, await vegaEmbed(place, charts[place.dataset.chart], options));
      place.dataset.drawn = dark.matches ? "dark" : "light";
    } catch (error) {
      place.textContent = `This chart could not be drawn: ${error.message}`;
      place.classList.add("failed");
      place.dataset.drawn = "failed";
    }
  }

  // The window of x after a press of a button; null is all of it.
  function moved([from, to], how) {
    const width = to - from, middle = (from + to) / 2;
    switch (how) {
      case "in": return [middle - width / 4, middle + width / 4];
      case "out": return [middle - width, middle + width];
      case "left": return [from - width / 4, to - width / 4];
      case "right": return [from + width / 4, to + width / 4];
      default: return null;
    }
  }

  document.addEventListener("click", (event) => {
    const how = event.target.dataset?.zoom;
    if (!how) return;
    const place = event.target.closest("figure").querySelector(".chart");
    const view = views.get(place)?.view;
    if (!view) return;
    view.signal(place.dataset.zoomSignal, moved(view.scale("x").domain(), how)).runAsync();
  });

  const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
  dark.addEventListener("change", drawAll);
  window.bigplanViews = views; // for tests, and for whoever looks at a chart from the console
  drawAll();
})();

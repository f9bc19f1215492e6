"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SIGNS = {
    "line-ns-open": "|", "diamond": "◆", "x-thin-open": "×", "cross-thin-open": "+",
    "triangle-left": "◀", "star": "★", "x": "✖",
  };
  const KEY = "report:" + document.title;

  // With many runs their losses are what matters.
  const isCrowded = data.entries.length > 4;
  const chosen = {
    axis: "tokens", logX: false, logY: false, raw: !isCrowded,
    hidden: isCrowded ? ["mark checkpoint"] : [],
  };
  // A page that loads itself again keeps what was chosen. Some browsers offer no storage to files.
  try {
    Object.assign(chosen, JSON.parse(sessionStorage.getItem(KEY)));
  } catch (error) {
    console.info("what is chosen on this page is not kept:", error.message);
  }
  const hidden = new Set(chosen.hidden);

  function keep() {
    chosen.hidden = [...hidden];
    try {
      sessionStorage.setItem(KEY, JSON.stringify(chosen));
    } catch (error) {
      console.info("what is chosen on this page is not kept:", error.message);
    }
  }

  function element(tag, className, parent, text) {
    const made = document.createElement(tag);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  // Plotly reads a few tags in labels; a name is no markup.
  function plain(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  }

  function theme(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function transparent(color, alpha) {
    const part = (at) => parseInt(color.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  }

  function heights(series, part) {
    const values = series[part];
    return Array.isArray(values) || values === undefined ? values : values[chosen.axis];
  }

  function bandTraces(series) {
    const x = series.x[chosen.axis];
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, y: heights(series, "low") },
      {
        ...edge,
        y: heights(series, "high"),
        fill: "tonexty",
        fillcolor: transparent(series.color, 0.18),
      },
    ];
  }

  function seriesTraces(chart, series) {
    if (hidden.has("run " + series.owner)) return [];
    if (series.kind === "raw" && !chosen.raw) return [];
    const line = { color: series.color, dash: series.dash };
    const trace = { x: series.x[chosen.axis], y: heights(series, "y"), mode: "lines", line };
    const digits = chart.percent ? ".1%" : ".4~g";
    trace.hovertemplate = `%{y:${digits}}<extra>${plain(series.label)}</extra>`;
    const validationBeside = chart.series.some((s) => s.kind === "dots" && s.owner === series.owner);
    if (series.kind === "raw") {
      Object.assign(trace, { opacity: 0.3, hoverinfo: "skip", hovertemplate: null });
      line.width = 0.8;
    } else if (series.kind === "thin") {
      Object.assign(trace, { opacity: 0.4, hoverinfo: "skip", hovertemplate: null });
      line.width = 0.9;
    } else if (series.kind === "dots") {
      trace.mode = "lines+markers";
      line.width = 1.4;
      trace.marker = { color: series.color, size: isCrowded ? 5 : 7, line: { color: theme("paper"), width: 1 } };
    } else {
      line.width = validationBeside && data.entries.length > 1 ? 1.4 : 2;
    }
    return heights(series, "low") === undefined ? [trace] : [...bandTraces(series), trace];
  }

  function markStyle(kind) {
    const symbol = data.symbols[kind];
    const color = theme(kind === "checkpoint" ? "quiet" : "ink");
    // Symbols without an area have only their line; others get an edge against the curve.
    const line = symbol.endsWith("-open")
      ? { color, width: 1.6 } : { color: theme("paper"), width: 1 };
    return { symbol, color, size: 10, line };
  }

  function markTraces(chart) {
    return Object.keys(data.symbols).map((kind) => {
      const shown = hidden.has("mark " + kind) ? [] : chart.marks.filter((mark) =>
        mark.kind === kind && mark.places[chosen.axis] && !hidden.has("run " + mark.owner));
      return {
        x: shown.map((mark) => mark.places[chosen.axis][0]),
        y: shown.map((mark) => mark.places[chosen.axis][1]),
        text: shown.map((mark) => plain(data.entries.length > 1
          ? `${mark.owner}: ${mark.text}` : mark.text)),
        mode: "markers",
        marker: markStyle(kind),
        hovertemplate: "%{text}<extra></extra>",
      };
    });
  }

  function layout(chart) {
    const axis = data.axes.find((each) => each.name === chosen.axis);
    const logY = chart.logY || (chart.name.startsWith("loss") && chosen.logY);
    const lines = {
      gridcolor: theme("line"),
      linecolor: theme("line"),
      zeroline: false,
      automargin: true,
      tickfont: { size: 12 },
    };
    const yaxis = {
      ...lines,
      type: logY ? "log" : "linear",
      exponentformat: "power",
      nticks: 7,
    };
    if (logY) yaxis.dtick = chart.logY ? undefined : "D1";
    if (chart.percent) yaxis.tickformat = ".0%";
    else if (chart.name === "tokens_per_second") yaxis.exponentformat = "B";
    if (chart.range) {
      const [low, high] = chart.range;
      yaxis.range = logY ? [Math.log10(Math.max(low, high / 1000)), Math.log10(high)] : [low, high];
    }
    const references = chart.references.map(([label, y]) => ({
      shape: {
        type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y,
        line: { color: theme("quiet"), width: 1, dash: "dash" },
      },
      annotation: {
        text: plain(label), xref: "paper", x: 1, xanchor: "right", y: logY ? Math.log10(y) : y,
        yanchor: "bottom", showarrow: false, font: { size: 12, color: theme("quiet") },
      },
    }));
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: theme("ink"), size: 13 },
      margin: { l: 8, r: 14, t: 10, b: 8 },
      showlegend: false,
      hovermode: "closest",
      // A finger that scrolls the page must not zoom.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      uirevision: [chosen.axis, chosen.logX, logY].join(),
      xaxis: {
        ...lines,
        type: chosen.logX ? "log" : "linear",
        title: { text: axis.title, font: { size: 12.5 }, standoff: 8 },
        exponentformat: axis.powers ? "power" : "B",
        nticks: 8,
      },
      yaxis,
      shapes: references.map((each) => each.shape),
      annotations: references.map((each) => each.annotation),
    };
  }

  const config = {
    responsive: true,
    displayModeBar: false,
  };

  const places = data.charts.map((chart) => {
    const box = element("div", chart.name.startsWith("loss") ? "chart wide" : "chart",
      document.getElementById("charts"));
    const heading = element("h3", "", box, chart.title + " ");
    element("small", "", heading, chart.yTitle);
    return element("div", "plot", box);
  });

  function draw() {
    data.charts.forEach((chart, index) => {
      const traces = chart.series.flatMap((series) => seriesTraces(chart, series));
      const [checkpoints, ...rest] = markTraces(chart);
      // Validation is measured where checkpoints are saved, and matters more.
      Plotly.react(places[index], [checkpoints, ...traces, ...rest], layout(chart), config);
    });
  }

  const buttons = [];

  function button(parent, className, text, pressed, press) {
    const made = element("button", className, parent);
    made.type = "button";
    made.append(text);
    made.addEventListener("click", () => {
      press();
      update();
    });
    buttons.push([made, pressed]);
    return made;
  }

  function update() {
    for (const [each, pressed] of buttons) each.setAttribute("aria-pressed", String(pressed()));
    keep();
    draw();
  }

  function toggle(parent, text, key) {
    return button(parent, "toggle", text, () => !hidden.has(key), () => {
      if (!hidden.delete(key)) hidden.add(key);
    });
  }

  function controls() {
    if (data.entries.some((entry) => entry.seeds > 1)) {
      document.querySelector(".hint").append(
        " Thin lines are single seeds, bands reach from the smallest to the largest of them.");
    }
    const bar = document.getElementById("controls");
    const row = element("div", "row", bar);
    const axes = element("div", "choice", row);
    for (const axis of data.axes) {
      button(axes, "", axis.choice, () => chosen.axis === axis.name, () => {
        chosen.axis = axis.name;
      });
    }
    const scales = element("div", "choice", row);
    for (const [name, text] of [["logX", "log x"], ["logY", "log loss"], ["raw", "raw (unsmoothed)"]]) {
      button(scales, "", text, () => chosen[name], () => {
        chosen[name] = !chosen[name];
      });
    }
    const legend = element("div", "row scroll", bar);
    const loss = data.charts.find((chart) => chart.name === "loss");
    if (data.entries.length === 1 && loss) {
      // The curves of one run have colors of their own.
      const named = new Map(loss.series.filter((s) => s.label).map((s) => [s.label, s.color]));
      for (const [label, color] of named) {
        const key = element("span", "toggle", legend);
        element("span", "chip", key).style.background = color;
        key.append(label);
      }
    } else {
      for (const entry of data.entries) {
        const seeds = entry.seeds > 1 ? ` (mean of ${entry.seeds} seeds)` : "";
        const made = toggle(legend, entry.label + seeds, "run " + entry.label);
        const chip = element("span", "chip", made);
        chip.style.background = entry.color;
        made.prepend(chip);
      }
    }
    const kinds = new Set(data.charts.flatMap((chart) => chart.marks.map((mark) => mark.kind)));
    for (const kind of Object.keys(data.symbols).filter((each) => kinds.has(each))) {
      const made = toggle(legend, kind, "mark " + kind);
      const sign = element("span", "symbol", made, SIGNS[data.symbols[kind]]);
      made.prepend(sign);
    }
  }

  if (!data.axes.some((axis) => axis.name === chosen.axis)) chosen.axis = data.axes[0].name;
  controls();
  update();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

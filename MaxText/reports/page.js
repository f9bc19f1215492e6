"use strict";

(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("controls");
  const plots = [...document.querySelectorAll(".plot")];
  const tables = [...document.querySelectorAll("table")];
  const folds = [...document.querySelectorAll("details[id]")];
  const inputs = [...form.elements].filter((input) => input.name);

  // A page that reloads keeps what was chosen, also with another run in its title.
  const KEY = "report:" + location.pathname;
  const state = { fields: {}, open: {}, tables: {}, zoom: {} };
  let storage = {};
  try {
    storage = sessionStorage;
  } catch (error) {
    console.info("this browser offers no storage to files:", error.message);
  }
  Object.assign(state, JSON.parse(storage[KEY] ?? "{}"));

  const nameOf = (input) => (/checkbox|radio/.test(input.type) ? input.name + input.value : input.name);
  const partOf = (input) => (/checkbox|radio/.test(input.type) ? "checked" : "value");

  function keep() {
    state.fields = Object.fromEntries(inputs.map((each) => [nameOf(each), each[partOf(each)]]));
    state.open = Object.fromEntries(folds.map((each) => [each.id, each.open]));
    storage[KEY] = JSON.stringify(state);
  }

  function numbers(encoded) {
    const bytes = Uint8Array.from(atob(encoded.bdata), (letter) => letter.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  }

  function column(trace, index) {
    const width = Number(trace.customdata.shape.split(",")[1]);
    return numbers(trace.customdata).filter((_, place) => place % width === index);
  }

  // The mean of a curve's neighbors; the window shrinks at the steep start.
  function smoothed(values, reach) {
    return values.map((value, center) => {
      if (Number.isNaN(value)) return value;
      const half = Math.min(reach, center);
      const near = values.slice(center - half, center + half + 1).filter((each) => !Number.isNaN(each));
      return near.reduce((sum, each) => sum + each, 0) / near.length;
    });
  }

  function drawnTrace(trace, figure, chosen) {
    const { owner, kind, needs = [] } = trace.meta ?? {};
    const smooth = Number(chosen.get("smooth"));
    const shown = new Set(chosen.getAll("show"));
    const only = chosen.get("only");
    const hasRaw = figure.data.some((each) => each.meta?.kind === "raw" && each.meta.owner === owner);
    const visible = needs.every((each) => shown.has(each)) && (!only || !owner || only === owner)
      && (kind !== "raw" || shown.has("raw") || !smooth) && (kind !== "line" || !hasRaw || smooth > 0);
    if (!trace.customdata) return { ...trace, visible };
    const x = column(trace, Number(chosen.get("axis")));
    const y = numbers(trace.y);
    const reach = Math.round(((smooth - 1) * y.length) / 80);
    const opacity = kind === "raw" && !smooth ? 1 : trace.opacity;
    return { ...trace, x, visible, opacity, y: kind === "line" && reach > 0 ? smoothed(y, reach) : y };
  }

  function drawnLayout(name, figure, chosen) {
    const layout = structuredClone(figure.layout);
    if (!figure.data.some((trace) => trace.customdata)) return layout;
    const axis = inputs.find((each) => each.name === "axis" && each.checked);
    Object.assign(layout.xaxis, {
      title: { text: axis.dataset.title, font: { size: 12.5 }, standoff: 8 },
      type: chosen.has("log x") ? "log" : "linear",
      hoverformat: axis.dataset.title === "step" ? ",d" : ".4~s",
    });
    if (state.zoom.x) layout.xaxis.range = state.zoom.x;
    if (name.startsWith("loss") && chosen.has("log loss")) {
      const [low, high] = layout.yaxis.range;
      const range = [Math.log10(Math.max(low, high / 1000)), Math.log10(high)];
      Object.assign(layout.yaxis, { type: "log", dtick: "D1", range });
    }
    if (chosen.has("full range")) delete layout.yaxis.range;
    if (state.zoom[name]) layout.yaxis.range = state.zoom[name];
    return layout;
  }

  function draw() {
    const chosen = new FormData(form);
    for (const plot of plots) {
      if (!plot.closest("details").open) continue;
      const { name } = plot.dataset;
      const figure = figures[name];
      const isNew = !plot.data;
      const traces = figure.data.map((trace) => drawnTrace(trace, figure, chosen));
      // A finger that scrolls the page must not zoom.
      const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
      const layout = { ...drawnLayout(name, figure, chosen), dragmode };
      const config = { responsive: true, displayModeBar: false, doubleClick: false };
      Plotly.react(plot, traces, layout, config);
      if (isNew) listen(plot, name);
    }
    keep();
  }

  // Charts of steps share their horizontal axis.
  function listen(plot, name) {
    if (!plot.data.some((trace) => trace.customdata)) return;
    plot.on("plotly_relayout", (change) => {
      const zoomed = (axis) => [0, 1].map((end) => change[`${axis}.range[${end}]`]);
      const [x, y] = [zoomed("xaxis"), zoomed("yaxis")];
      if (x[0] !== undefined) state.zoom.x = x;
      if (y[0] !== undefined) state.zoom[name] = y;
      if (x[0] !== undefined || y[0] !== undefined) draw();
    });
    plot.on("plotly_doubleclick", () => {
      state.zoom = {};
      draw();
    });
  }

  function save(name, kind) {
    const plot = plots.find((each) => each.dataset.name === name);
    if (kind === "svg") {
      const { clientWidth: width, clientHeight: height } = plot;
      Plotly.downloadImage(plot, { format: "svg", filename: name, width, height });
      return;
    }
    const axes = inputs.filter((each) => each.name === "axis").map((each) => each.dataset.title);
    const lines = [["curve", "kind", ...axes, "x", "y"]];
    for (const trace of plot.data.filter((each) => each.visible !== false)) {
      const columns = trace.customdata ? axes.map((_, index) => column(trace, index)) : [];
      for (let index = 0; index < trace.y.length; index += 1) {
        const places = axes.map((_, axis) => columns[axis]?.[index] ?? "");
        const label = [trace.meta?.owner ?? trace.name, trace.meta?.kind ?? ""];
        lines.push([...label, ...places, trace.x[index], trace.y[index]]);
      }
    }
    const quoted = (cell) => (typeof cell === "string" ? `"${cell.replaceAll('"', '""')}"` : cell);
    const text = lines.map((line) => line.map(quoted).join(",")).join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text + "\n"], { type: "text/csv" }));
    link.download = name + ".csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // The number that a cell begins with: 1:02:03, 12,345, 6.55M, 3e-4, 39.8 % or 4.5 MiB.
  function rank(text) {
    const time = /^(\d+):(\d\d):(\d\d)/.exec(text);
    if (time) return 3600 * time[1] + 60 * time[2] + Number(time[3]);
    const number = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)([KMBT]?)(?: ([KMGT])iB)?/.exec(text);
    if (!number) return null;
    const [, digits, thousands, bytes = " "] = number;
    const unit = 1000 ** " KMBT".indexOf(thousands || " ") * 1024 ** " KMGT".indexOf(bytes);
    return digits.replaceAll(",", "") * unit;
  }

  // Several columns may have the same header.
  function keyOf(cell) {
    const same = [...cell.parentElement.cells].filter((each) => each.textContent === cell.textContent);
    return cell.textContent + "\n" + same.indexOf(cell);
  }

  function arrange(table, { column, descending, filter = "" }) {
    const header = [...table.tHead.rows[0].cells];
    const index = header.findIndex((cell) => keyOf(cell) === column);
    const body = table.tBodies[0];
    const rows = [...body.rows];
    if (index >= 0) {
      const text = (row) => row.cells[index].textContent;
      const number = (row) => rank(text(row)) ?? Infinity;
      const compare = (a, b) => number(a) - number(b) || text(a).localeCompare(text(b));
      rows.sort((a, b) => (descending ? compare(b, a) : compare(a, b)));
      body.append(...rows);
      header.forEach((cell, place) => {
        cell.ariaSort = place === index ? (descending ? "descending" : "ascending") : null;
      });
    }
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(filter.toLowerCase());
  }

  for (const table of tables) {
    const name = table.parentElement.getAttribute("aria-label");
    const change = (more) => {
      state.tables[name] = { ...state.tables[name], ...more };
      arrange(table, state.tables[name]);
      keep();
    };
    for (const cell of table.tHead.rows[0].cells) {
      cell.addEventListener("click", () => {
        change({ column: keyOf(cell), descending: cell.ariaSort === "ascending" });
      });
    }
    const search = table.parentElement.previousElementSibling;
    if (search?.type === "search") {
      search.value = state.tables[name]?.filter ?? "";
      search.addEventListener("input", () => change({ filter: search.value }));
    }
    if (state.tables[name]) arrange(table, state.tables[name]);
  }

  for (const input of inputs) {
    if (nameOf(input) in state.fields) input[partOf(input)] = state.fields[nameOf(input)];
  }
  for (const fold of folds) {
    fold.open = state.open[fold.id] ?? fold.open;
    fold.addEventListener("toggle", draw);
  }
  form.addEventListener("input", ({ target }) => {
    if (/axis|log x/.test(target.name)) delete state.zoom.x;
    if (/log loss|full/.test(target.name)) state.zoom = { x: state.zoom.x };
    draw();
  });
  document.addEventListener("click", ({ target }) => {
    if (target.dataset?.save) save(target.dataset.of, target.dataset.save);
  });
  const resize = (width) => plots.filter((each) => each.data).forEach((each) => {
    Plotly.relayout(each, { width, autosize: !width });
  });
  addEventListener("beforeprint", () => resize(660));
  addEventListener("afterprint", () => resize(null));
  draw();
})();

// Interaction of the report's charts: values, zoom, robust and logarithmic axes. Without this script the page shows its SVGs.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = [[], [6, 3], [2, 2], [8, 2, 2, 2]];
  const HEIGHT = 190;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const plots = []; // all charts on the page: {u, kind, build}

  function element(tag, style, text) {
    const made = document.createElement(tag);
    if (style) made.className = style;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function number(value, digits) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    return Number.isInteger(value) && Math.abs(value) < 1e7 ? String(value) : String(Number(value.toPrecision(digits || 5)));
  }

  function tick(value) {
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return number(value / (letter === "k" ? 1e3 : unit), 6) + letter;
    return number(value, 6);
  }

  function duration(s) {
    if (s < 60) return number(s, 4) + " s";
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    return s < 3600 ? Math.floor(s / 60) + ":" + two(s % 60) + " min" : Math.floor(s / 3600) + ":" + two((s % 3600) / 60) + " h";
  }

  // The range of values that outliers don't widen, as `robust_range` in charts.py.
  function robustRange(values) {
    const ordered = Float64Array.from(values).sort(), last = ordered.length - 1;
    if (last < 19) return [ordered[0], ordered[last]];
    let low = ordered[Math.floor(0.02 * last)], high = ordered[Math.ceil(0.98 * last)];
    if (last < 50) [low, high] = [ordered[1], ordered[last - 1]];
    const spread = high - low || 0.1 * Math.abs(high);
    const kept = ordered.filter((v) => low - 0.5 * spread <= v && v <= high + 0.5 * spread);
    const width = Math.max(kept[kept.length - 1] - kept[0], 0.25 * Math.max(Math.abs(low), Math.abs(high)));
    return kept[0] === kept[kept.length - 1] || ordered[last] - ordered[0] < 4 * width ? [ordered[0], ordered[last]] : [kept[0], kept[kept.length - 1]];
  }

  function zoom(kind, range) {
    for (const plot of plots)
      if (plot.kind === kind) {
        const [min, max] = range || data.ends[kind];
        if (plot.u.scales.x.min !== min || plot.u.scales.x.max !== max) plot.u.setScale("x", { min, max: max > min ? max : min + 1 });
        plot.zoomed(!!range);
      }
  }

  function xAxis(kind) {
    const times = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
      3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];
    return {
      stroke: () => colour("faint"), font: "12px system-ui, sans-serif", size: 20, space: 70, gap: 4, labelSize: 16, labelGap: 0,
      label: kind === "time" ? "time since the start" : "step", labelFont: "11px system-ui, sans-serif",
      grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false },
      values: (u, splits) => splits.map((v) => (kind === "time" ? duration(v) : Number.isInteger(v) ? tick(v) : "")),
      incrs: kind === "time" ? times : [1, 2, 5].flatMap((n) => Array.from({ length: 12 }, (_, p) => n * 10 ** p)).sort((a, b) => a - b),
    };
  }

  function drawMarks(u, kind) {
    const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio || 1;
    const newest = {};
    ctx.save();
    for (const mark of data.marks) {
      if (mark[kind] === undefined) continue;
      const x = u.valToPos(mark[kind], "x", true);
      if (x < left || x > left + width) continue;
      const strong = mark.kind === "failure" || mark.kind === "recovery";
      if (!strong && x - newest[mark.kind] < 14 * ratio) continue; // symbols don't overlap
      newest[mark.kind] = x;
      ctx.strokeStyle = ctx.fillStyle = colour(mark.kind === "failure" ? "bad" : mark.kind === "recovery" ? "good" : "faint");
      ctx.lineWidth = 1.2 * ratio;
      ctx.beginPath();
      if (strong) {
        ctx.setLineDash([4 * ratio, 3 * ratio]);
        ctx.moveTo(x, top), ctx.lineTo(x, top + height), ctx.stroke();
      } else {
        const size = 4 * ratio, y = top + height;
        ctx.setLineDash([]);
        if (mark.kind === "other") ctx.moveTo(x, y - 2 * size), ctx.lineTo(x + size, y - size), ctx.lineTo(x, y), ctx.lineTo(x - size, y - size);
        else ctx.moveTo(x - size, y), ctx.lineTo(x, y - 1.6 * size), ctx.lineTo(x + size, y);
        ctx.closePath();
        mark.kind === "validation" ? ctx.stroke() : ctx.fill();
      }
    }
    ctx.restore();
  }

  function marksNear(u, kind) {
    const away = (m) => Math.abs(u.valToPos(m[kind], "x") - u.cursor.left), seen = {};
    const found = data.marks.filter((m) => m[kind] !== undefined && away(m) < 6).sort((a, b) => away(a) - away(b));
    return found.filter((m) => (seen[m.kind] = (seen[m.kind] || 0) + 1) === 1).slice(0, 3); // the nearest of each kind
  }

  function showTip(u, tip, lines) {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const over = u.over, left = over.offsetLeft + u.cursor.left, right = left + 16 + tip.offsetWidth > u.root.offsetWidth;
    tip.style.left = Math.max(0, right ? left - 14 - tip.offsetWidth : left + 14) + "px";
    tip.style.top = Math.min(over.offsetTop + 6, 40) + "px";
  }

  function buttons(figure) {
    let bar = figure.querySelector(".buttons");
    if (!bar) figure.append((bar = element("div", "buttons")));
    return (text, title, pressed, action) => {
      const button = element("button", "", text);
      button.type = "button", (button.title = title), (button.onclick = () => action(button));
      if (pressed !== null) button.setAttribute("aria-pressed", pressed);
      bar.append(button);
      return button;
    };
  }

  function make(figure, kind, options, values) {
    const holder = element("div", "u-holder"), plot = { kind, u: null };
    figure.querySelector(".static").after(holder);
    figure.classList.add("live");
    const add = buttons(figure);
    const reset = add("reset zoom", "show all (double-click)", null, () => zoom(kind, null));
    reset.hidden = true;
    plot.add = add;
    plot.zoomed = (on) => (reset.hidden = !on);
    const tip = element("div", "tip");
    tip.hidden = true;
    plot.build = () => {
      const before = plot.u && [plot.u.scales.x.min, plot.u.scales.x.max];
      if (plot.u) plot.u.destroy();
      const made = options(tip);
      made.width = Math.max(200, holder.clientWidth);
      made.legend = { show: false };
      made.padding = [8, 18, 0, 0];
      made.cursor = {
        y: false, points: { size: 7 }, sync: { key: kind, setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false }, focus: made.focus ? { prox: 20 } : undefined,
        bind: { dblclick: () => () => zoom(kind, null) },
      };
      made.hooks.setSelect = [(u) => {
        if (u.select.width > 4) zoom(kind, [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }];
      plot.u = new uPlot(made, values(), holder);
      plot.u.root.append(tip);
      plot.u.over.addEventListener("mouseleave", () => (tip.hidden = true));
      const [min, max] = before || data.ends[kind];
      plot.u.setScale("x", { min, max: max > min ? max : min + 1 });
    };
    plot.build();
    plots.push(plot);
    new ResizeObserver(() => {
      const width = Math.max(200, holder.clientWidth);
      if (width !== plot.u.width && holder.clientWidth) plot.u.setSize({ width, height: plot.u.height });
    }).observe(holder);
    return plot;
  }

  function lineChart(figure, chart) {
    const state = { full: false, log: false, hidden: new Set() };
    const tables = [], series = [{}], bands = [], owner = [-1], bad = [];
    let xs = [];
    chart.series.forEach((s, n) => {
      xs = s.x || xs;
      bad.push(...(s.bad || []));
      const columns = s.l ? [s.y, s.h, s.l] : [s.y];
      tables.push([xs, ...columns]);
      series.push({
        label: s.n, width: s.best ? 3 : 1.6, dash: DASHES[s.d || 0], stroke: () => colour("c" + s.c),
        points: { show: s.y.length < 2 ? true : undefined, size: 5 }, spanGaps: false,
      });
      owner.push(n);
      if (s.l) {
        bands.push({ series: [series.length, series.length + 1], fill: () => colour("c" + s.c) + "38" });
        series.push({ band: true, points: { show: false } }, { band: true, points: { show: false } });
        owner.push(n, n);
      }
    });
    const joined = uPlot.join(tables);

    function yRange(u) {
      const [from, to] = u.series[0].idxs, seen = [];
      for (let n = 1; n < u.series.length; n++)
        if (u.series[n].show)
          for (let i = from; i <= to; i++) {
            const y = joined[n][i], [low, high] = chart.range;
            if (y !== null && y !== undefined && (!u.series[n].band || state.full || (low <= y && y <= high))) seen.push(y);
          }
      if (!seen.length) return [u.scales.y.min === undefined ? 0 : u.scales.y.min, u.scales.y.max === undefined ? 1 : u.scales.y.max];
      if (state.log) return uPlot.rangeLog(Math.min(...seen), Math.max(...seen), 10, false);
      const [low, high] = state.full ? [Math.min(...seen), Math.max(...seen)] : robustRange(seen);
      const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
      return [low >= 0 && low - margin < 0 ? Math.min(0, low) : low - margin, high + margin];
    }

    function tipLines(u) {
      const at = u.cursor.idx, x = joined[0][at], lines = [];
      lines.push(element("b", "", chart.x === "time" ? duration(x) : "step " + number(x)));
      const rows = [];
      for (let n = 1; n < series.length; n++) {
        if (series[n].band || !u.series[n].show) continue;
        const near = nearest(n, at);
        if (near < 0) continue;
        const s = chart.series[owner[n]], row = element("div"), value = joined[n][near];
        row.append(element("span", "key c" + s.c + " d" + (s.d || 0)), element("span", "", s.n));
        const range = s.l && joined[n + 1][near] !== joined[n + 2][near] ? ` (${number(joined[n + 2][near], 4)} to ${number(joined[n + 1][near], 4)})` : "";
        row.append(element("span", "v", number(value) + range + (near !== at ? ` at ${number(joined[0][near])}` : "")));
        rows.push([value, row]);
      }
      if (rows.length > 16) rows.sort((a, b) => b[0] - a[0]).splice(8, rows.length - 16, [0, element("div", "", "…")]);
      lines.push(...rows.map((r) => r[1]));
      if (bad.some((b) => Math.abs(u.valToPos(b, "x") - u.cursor.left) < 5)) lines.push(element("div", "failure", "not finite (NaN or infinite)"));
      lines.push(...marksNear(u, chart.x).map((m) => element("div", m.kind, m.text)));
      return lines;
    }

    function nearest(n, at) {
      const column = joined[n], has = (i) => column[i] !== null && column[i] !== undefined;
      for (let d = 0; d < column.length; d++) {
        if (at - d >= 0 && has(at - d)) return at - d;
        if (at + d < column.length && has(at + d)) return at + d;
      }
      return -1;
    }

    const options = (tip) => ({
      height: HEIGHT, series: series.map((s, n) => ({ ...s, show: n === 0 || !state.hidden.has(owner[n]) })), bands,
      focus: chart.series.length > 3 ? { alpha: 0.3 } : undefined,
      scales: { x: { time: false }, y: { distr: state.log ? 3 : 1, range: yRange } },
      axes: [xAxis(chart.x), {
        stroke: () => colour("faint"), font: "12px system-ui, sans-serif", size: 58, gap: 4, space: 34,
        grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false },
        values: (u, splits) => splits.map((v) => (v === null ? "" : tick(v))),
      }],
      hooks: {
        draw: [(u) => {
          drawMarks(u, chart.x);
          u.ctx.save();
          u.ctx.fillStyle = colour("bad");
          u.ctx.font = `bold ${13 * (devicePixelRatio || 1)}px system-ui, sans-serif`;
          u.ctx.textAlign = "center";
          let newest = -Infinity;
          for (const x of bad) {
            const left = u.valToPos(x, "x", true);
            if (left - newest < 10 * (devicePixelRatio || 1)) continue;
            newest = left;
            if (left >= u.bbox.left && left <= u.bbox.left + u.bbox.width) u.ctx.fillText("×", left, u.bbox.top + 11 * (devicePixelRatio || 1));
          }
          u.ctx.restore();
        }],
        setCursor: [(u) => {
          if (u.cursor.idx === null || u.cursor.idx === undefined || u.cursor.left < 0 || !u.over.matches(":hover")) tip.hidden = true;
          else showTip(u, tip, tipLines(u));
        }],
      },
    });
    const plot = make(figure, chart.x, options, () => joined);
    const values = chart.series.flatMap((s) => [...s.y, ...(s.l || []), ...(s.h || [])]);
    const lowest = Math.min(...values), highest = Math.max(...values);
    if (chart.outside)
      plot.add("full range", "show outliers too", false, (button) => {
        state.full = !state.full;
        button.setAttribute("aria-pressed", state.full);
        plot.build();
      });
    if (lowest > 0 && highest > 2 * lowest)
      plot.add("log", "logarithmic axis", false, (button) => {
        state.log = !state.log;
        button.setAttribute("aria-pressed", state.log);
        plot.build();
      });
    for (const name of figure.querySelectorAll("[data-curve]")) {
      const button = element("button"), curve = Number(name.dataset.curve);
      button.type = "button";
      button.append(...name.childNodes);
      button.setAttribute("aria-pressed", true);
      button.onclick = () => {
        const show = state.hidden.delete(curve) || !state.hidden.add(curve);
        button.setAttribute("aria-pressed", show);
        plot.build();
      };
      name.append(button);
    }
  }

  function timeline(figure) {
    const rows = data.lanes, height = Math.min(34, Math.max(20, 360 / rows.length));
    const bins = rows.map((lane) => {
      let at = 0;
      return lane.cells.map(([count, ...cell]) => ({ from: at, to: (at += count * lane.w), cell }));
    });
    const edges = [data.ends.time[0], data.ends.time[1] || 1];
    const grid = Array.from({ length: 1001 }, (_, n) => edges[0] + ((edges[1] - edges[0]) * n) / 1000);
    function draw(u) {
      const { ctx, bbox } = u, end = data.ends.time[1];
      ctx.save();
      ctx.beginPath(), ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height), ctx.clip();
      rows.forEach((lane, r) => {
        const size = bbox.height / rows.length, base = bbox.top + size * (r + 1) - size * 0.06, full = size * 0.88;
        for (const bin of bins[r]) {
          const left = u.valToPos(bin.from, "x", true), right = u.valToPos(Math.min(bin.to, end), "x", true);
          if (right < bbox.left || left > bbox.left + bbox.width) continue;
          let y = base, sum = 0;
          for (let n = 0; n < bin.cell.length; n += 2) sum += bin.cell[n + 1];
          for (let n = 0; n < bin.cell.length; n += 2) {
            const part = (full * bin.cell[n + 1]) / sum;
            ctx.fillStyle = colour("a-" + data.activities[bin.cell[n]].c);
            ctx.fillRect(left, y - part, Math.max(right - left, 0.5) + 0.6, part + 0.3);
            y -= part;
          }
        }
      });
      ctx.restore();
      drawMarks(u, "time");
    }
    const options = (tip) => ({
      height: height * rows.length + 46, series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
      scales: { x: { time: false }, y: { range: [0, rows.length] } },
      axes: [xAxis("time"), {
        stroke: () => colour("faint"), font: "12px system-ui, sans-serif", size: 58, gap: 4, grid: { show: false }, ticks: { show: false },
        splits: () => rows.map((_, n) => rows.length - n - 0.5), values: () => rows.map((lane) => "rank " + lane.rank),
      }],
      hooks: {
        drawClear: [], draw: [draw],
        setCursor: [(u) => {
          const lane = rows[Math.floor((u.cursor.top / u.over.clientHeight) * rows.length)];
          if (!lane || u.cursor.left < 0 || !u.over.matches(":hover")) return void (tip.hidden = true);
          const at = u.posToVal(u.cursor.left, "x"), bin = bins[rows.indexOf(lane)].find((b) => b.from <= at && at < b.to);
          const lines = [element("b", "", `rank ${lane.rank}, ${duration(at)}`)];
          for (let n = 0; bin && n < bin.cell.length; n += 2) {
            const activity = data.activities[bin.cell[n]], row = element("div");
            row.append(element("span", "box a-" + activity.c), element("span", "", activity.n), element("span", "v", bin.cell[n + 1] + " %"));
            lines.push(row);
          }
          lines.push(...marksNear(u, "time").map((m) => element("div", m.kind, m.text)));
          showTip(u, tip, lines);
        }],
      },
    });
    make(figure, "time", options, () => [grid, grid.map(() => 0)]);
  }

  function sortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = element("button", "sort", head.textContent);
      button.type = "button", (button.title = "sort by this column");
      head.replaceChildren(button);
      button.onclick = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const text = (row) => row.cells[column].textContent.trim();
        const rows = [...body.rows].map((row) => ({ row, valueOf: () => parseFloat(text(row)) }));
        rows.sort((a, b) => (a - b || text(a.row).localeCompare(text(b.row), "en", { numeric: true })) * (down ? -1 : 1));
        body.replaceChildren(...rows.map((r) => r.row));
      };
    });
  }

  function linkRuns() {
    document.addEventListener("mouseover", (event) => {
      const run = event.target.closest && event.target.closest("[data-run]");
      for (const hot of document.querySelectorAll(".hot")) hot.classList.remove("hot");
      if (run) for (const same of document.querySelectorAll(`[data-run="${run.dataset.run}"]`)) same.classList.add("hot");
    });
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) lineChart(figure, data.charts[Number(figure.dataset.chart)]);
  for (const figure of document.querySelectorAll("figure[data-lanes]")) timeline(figure);
  for (const hint of document.querySelectorAll("[data-live]")) hint.hidden = false;
  for (const table of document.querySelectorAll("table[data-sortable]")) sortable(table);
  linkRuns();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.build()));
})();

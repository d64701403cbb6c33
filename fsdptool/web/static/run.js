"use strict";
// The curves of a run: drawn by uPlot from columns that the server has thinned out, renewed by the stream.
(function () {
  const place = document.getElementById("curves");
  if (!place || !window.uPlot) return;
  const charts = {};
  let shown = null;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const figure = (value) => (value == null ? "none" : Number(value.toPrecision(4)).toLocaleString("en"));
  const bytes = (value) => {
    if (value == null) return "none";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (value >= 1024 && power < units.length - 1) {
      value /= 1024;
      power += 1;
    }
    return `${Number(value.toPrecision(3))} ${units[power]}`;
  };

  function evaluations(data) {
    const values = new Map(data.evaluations);
    let next = 0;
    const steps = [...values.keys()].sort((a, b) => a - b);
    // A point stands for several steps: an evaluation belongs to the point that contains its step.
    return data.step.map((step) => {
      let value = null;
      while (next < steps.length && steps[next] <= step) value = values.get(steps[next++]);
      return value;
    });
  }

  const times = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
  // What a point stands for, and how often it was measured.
  const each = (data) => (data.steps_per_point > 1 ? `Each point is the mean of ${times(data.steps_per_point, "step")}` : "Measured at every step");

  // A point of one step has no highest and lowest.
  const spans = (data) => data.steps_per_point > 1;

  const KINDS = {
    loss: {
      title: "Loss",
      note: (data) =>
        `${each(data)}${data.steps_per_point > 1 ? "; the band spans the lowest and the highest of them" : ""}. ` +
        (data.evaluations.length ? `${times(data.evaluations.length, "validation")}.` : "Not validated yet."),
      columns: (data) => [
        data.step,
        data.loss,
        ...(spans(data) ? [data.highest, data.lowest] : []),
        ...(data.evaluations.length ? [evaluations(data)] : []),
      ],
      series: (data) => [
        {label: "step"},
        {label: "loss", stroke: color("--accent"), width: 1.8, points: {show: false}},
        ...(spans(data) ? ["highest", "lowest"].map((label) => ({label, stroke: "transparent", points: {show: false}})) : []),
        ...(data.evaluations.length
          ? [{label: "validation", stroke: color("--gathered"), width: 0, points: {show: true, size: 8, fill: color("--gathered")}}]
          : []),
      ],
      bands: (data) => !spans(data) ? [] : [{series: [2, 3], fill: `color-mix(in srgb, ${color("--accent")} 22%, transparent)`}],
      format: figure,
    },
    rate: {
      title: "Throughput",
      note: (data) => `${each(data)}.`,
      columns: (data) => [data.step, data.rate.map((value, index) => (index ? value : null))],
      series: (data) => [{label: "step"}, {label: `${data.unit}/s`, stroke: color("--accent"), width: 1.8, points: {show: false}}],
      format: figure,
      zero: true,
    },
    memory: {
      title: "Memory of rank 0",
      note: (data) => {
        const count = data.memory.filter((value) => value != null).length;
        const few = count < data.step.length ? " On the CPU, a run measures its first steps and those around its first save." : "";
        return `Allocated peak, measured at ${count.toLocaleString("en")} of ${times(data.step.length, "point")}.${few}`;
      },
      columns: (data) => [data.step, data.memory, ...(data.planned == null ? [] : [data.step.map(() => data.planned)])],
      series: (data) => [
        {label: "step"},
        {label: "measured", stroke: color("--accent"), width: 1.8, spanGaps: true, points: {fill: color("--card")}},
        ...(data.planned == null ? [] : [{label: "planned peak", stroke: color("--outside"), width: 1.6, dash: [6, 4], points: {show: false}}]),
      ],
      format: bytes,
      increments: Array.from({length: 50}, (_, power) => 2 ** power),
      zero: true,
    },
  };

  function make(name, data, holder) {
    const kind = KINDS[name];
    const axis = {stroke: color("--soft"), grid: {stroke: color("--line"), width: 1}, ticks: {stroke: color("--line"), width: 1}};
    const section = document.createElement("section");
    const heading = document.createElement("h2");
    heading.textContent = kind.title;
    const note = document.createElement("p");
    note.className = "soft";
    const box = document.createElement("div");
    box.className = "curve-box";
    box.setAttribute("role", "img");
    section.append(heading, note, box);
    holder.replaceChildren(section);
    const chart = new uPlot(
      {
        width: Math.max(box.clientWidth, 200),
        height: 230,
        scales: {x: {time: false}, y: kind.zero ? {range: (_, low, high) => [0, (high || 1) * 1.05]} : {}},
        series: kind.series(data).map((one, index) => (index ? {...one, value: (_, value) => kind.format(value)} : one)),
        bands: kind.bands ? kind.bands(data) : [],
        axes: [axis, {...axis, size: 84, ...(kind.increments ? {incrs: kind.increments} : {}), values: (_, ticks) => ticks.map(kind.format)}],
        cursor: {drag: {x: true, y: false}},
      },
      kind.columns(data),
      box,
    );
    new ResizeObserver(() => {
      if (!box.clientWidth || box.clientWidth === chart.width) return;
      chart.setSize({width: box.clientWidth, height: 230});
      showLatest(chart);
    }).observe(box);
    return chart;
  }

  // Without a pointer the legend shows the latest measured values. A chart clears its legend when it commits a
  // new size or new data, which it does after the call that asks for it.
  const showLatest = (chart) => requestAnimationFrame(() => fillLegend(chart));

  function fillLegend(chart) {
    if (!chart.root.isConnected) return;  // another one took its place
    if (chart.cursor.left != null && chart.cursor.left >= 0) return;
    const values = chart.data[1];
    let last = values.length - 1;
    while (last > 0 && values[last] == null) last -= 1;
    chart.setLegend({idx: last});
  }

  function draw(data) {
    shown = data;
    if (data.step.length < 2) return;
    for (const name of Object.keys(KINDS)) {
      if (name === "memory" && !data.memory.some((value) => value != null)) continue;
      const holder = place.querySelector(`[data-chart="${name}"]`);
      const columns = KINDS[name].columns(data);
      if (charts[name] && charts[name].series.length === columns.length) charts[name].setData(columns);
      else {
        charts[name]?.destroy();  // the first validation is a further line
        charts[name] = make(name, data, holder);
      }
      showLatest(charts[name]);
      holder.querySelector("p.soft").textContent = KINDS[name].note(data);
      const known = columns[1].filter((value) => value != null);
      holder.querySelector(".curve-box").setAttribute(
        "aria-label",
        `${KINDS[name].title}, step ${data.step[0]} to ${data.step.at(-1)}: ${KINDS[name].format(known[0])} to ${KINDS[name].format(known.at(-1))}`,
      );
    }
    place.dataset.points = data.step.length;
  }

  document.addEventListener("htmx:sseMessage", (event) => {
    if (event.detail.type === "points") draw(JSON.parse(event.detail.data));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const name of Object.keys(charts)) {
      charts[name].destroy();
      delete charts[name];
    }
    if (shown) draw(shown);
  });
  fetch(place.dataset.curve).then((answer) => (answer.ok ? answer.json().then(draw) : null));
})();

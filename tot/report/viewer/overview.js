// An evaluation's overview: scores, distributions, and a table of all questions with links to their trees.

const PAGE = 200; // table rows per page

function drawOverview(data) {
  return [
    data.finished ? null : make("p", { class: "notice" }, "This evaluation is not finished; it shows the samples so far."),
    figures(data.figures),
    make("div", { class: "charts" }, ...data.charts.map(chart)),
    ...table(data.samples),
    data.config ? folded("Configuration", make("pre", {}, visible(data.config))) : null,
  ].filter(Boolean);
}

function figures(rows) {
  const cells = rows.map(([name, value, note], i) =>
    make(
      "div",
      { class: i === 0 ? "figure first" : "figure" },
      make("dt", {}, name),
      make("dd", {}, value),
      make("dd", { class: "quiet" }, note),
    ),
  );
  return make("dl", { class: "figures" }, ...cells);
}

function chart({ title, ends, bars }) {
  const [width, height, gap] = [360, 120, 2];
  const top = Math.max(...bars.map((bar) => bar.height)) || 1;
  const step = width / bars.length;
  const label = `${title}. ${bars.map((bar) => bar.note).join("; ")}`;
  const drawing = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  bars.forEach((bar, i) => {
    const tall = (bar.height / top) * (height - 16);
    const [x, y] = [i * step + gap / 2, height - tall];
    drawing.append(makeSvg("rect", { x, y, width: step - gap, height: tall, rx: 2 }, makeSvg("title", {}, bar.note)));
    if (bar.height) drawing.append(makeSvg("text", { x: (i + 0.5) * step, y: y - 4, "text-anchor": "middle" }, bar.text));
  });
  const axis = make("div", { class: "axis" }, ...ends.map((end) => make("span", {}, end)));
  return make("figure", {}, make("figcaption", {}, title), drawing, axis);
}

const COLUMNS = [
  ["#", (sample) => sample.order],
  ["question", (sample) => sample.question],
  ["answer", (sample) => sample.answer ?? ""],
  ["reference", (sample) => sample.reference ?? ""],
  ["score", (sample) => sample.score ?? -1],
  ["certainty", (sample) => sample.certainty ?? -1],
  ["tokens", (sample) => sample.tokens],
  ["latency", (sample) => sample.seconds],
];

function table(samples) {
  let rows = samples;
  let shown = PAGE;
  let sorted = { by: 0, down: false };
  const body = make("tbody");
  const more = make("button", { type: "button" }, "Show more");
  const count = make("output", { class: "quiet" });
  const filter = make("select", { "aria-label": "Which questions" }, ...["all", "right", "wrong", "failed"].map((kind) => make("option", { value: kind }, kind)));
  const query = make("input", { type: "search", placeholder: "Search questions and answers", "aria-label": "Search questions and answers" });
  const heads = COLUMNS.map(([title], i) => {
    const button = make("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      sorted = { by: i, down: sorted.by === i && !sorted.down };
      draw();
    });
    return make("th", { scope: "col", class: i > 3 ? "number" : "" }, button);
  });

  function draw() {
    const wanted = query.value.toLowerCase();
    const kinds = {
      all: () => true,
      right: (sample) => sample.score >= 1,
      wrong: (sample) => !sample.error && !(sample.score >= 1),
      failed: (sample) => sample.error,
    };
    const key = COLUMNS[sorted.by][1];
    rows = samples
      .filter(kinds[filter.value])
      .filter(({ question, answer, reference }) => `${question}\n${answer}\n${reference}`.toLowerCase().includes(wanted))
      .sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.order - b.order) * (sorted.down ? -1 : 1));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== sorted.by ? "none" : sorted.down ? "descending" : "ascending"));
    body.replaceChildren(...rows.slice(0, shown).map(row));
    more.hidden = rows.length <= shown;
    count.replaceChildren(`${rows.length} of ${samples.length}`);
  }

  filter.addEventListener("change", draw);
  query.addEventListener("input", draw);
  more.addEventListener("click", () => {
    shown += PAGE;
    draw();
  });
  draw();
  return [
    make("div", { class: "heading" }, make("h2", {}, "Problems"), query, filter, count),
    make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body)),
    more,
  ];
}

function row(sample) {
  const kind = sample.error ? "failed" : sample.score >= 1 ? "right" : sample.score > 0 ? "partly" : "wrong";
  const name = sample.tree === null ? sample.name : make("a", { href: `#${sample.tree}`, "aria-label": `Tree of question ${sample.name}` }, sample.name);
  return make(
    "tr",
    { class: kind },
    make("td", {}, name),
    make("td", { dir: "auto" }, brief(sample.question, 110)),
    make("td", { dir: "auto" }, sample.error ? brief(sample.error, 140) : brief(sample.answer ?? "none", 60)),
    make("td", { dir: "auto" }, brief(sample.reference ?? "", 40)),
    make("td", { class: "number" }, make("b", {}, sample.error ? "failed" : shortNumber(sample.score))),
    make("td", { class: "number" }, (sample.certainty ?? null) === null ? "" : share(sample.certainty)),
    make("td", { class: "number" }, shortNumber(sample.tokens)),
    make("td", { class: "number" }, seconds(sample.seconds)),
  );
}

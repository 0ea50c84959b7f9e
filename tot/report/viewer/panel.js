// The panel of one thought: its text, its numbers, and the model calls about it.

const EXPLAINED = {
  exact: "exact",
  approximate: "approximate: drafted but never verified",
  undecoded: "never decoded",
  trigger: "answer trigger: inserted, not decoded",
  step: "parallel step: decoded in parallel with the others",
  thinking: "thinking: not part of the reply",
  closing: "end of the thinking: inserted, not decoded",
};

class Panel {
  constructor(element) {
    this.element = element;
  }

  show(tree, node, query, scale) {
    const { fields } = node;
    this.element.replaceChildren(
      this.head(node),
      ...this.text(tree, node, query),
      ...this.path(node, scale),
      ...(node.parent === null || node === tree.end ? this.run(tree.saved.run ?? {}) : []),
      ...this.numbers(fields),
      ...this.world(fields),
      ...this.calls(tree, node),
    );
    this.element.scrollTop = 0;
  }

  head(node) {
    const { fields } = node;
    const flags = [
      ["chosen", fields.chosen, "on the chosen path"],
      ["good", fields.verified, "verified"],
      ["", fields.terminal && !fields.verified, "end"],
      ["", fields.pruned, "pruned"],
    ].filter(([, set]) => set);
    return make(
      "header",
      {},
      make("h2", {}, node.parent ? `Thought ${placeOf(node)}` : "Question"),
      ...flags.map(([kind, , name]) => make("span", { class: `flag ${kind}` }, name)),
    );
  }

  text(tree, node, query) {
    const parts = node.fields.thought ? Object.entries(node.fields.thought.parts) : [["", tree.question]];
    const thinking = node.fields.thought?.thinking ?? 0; // characters at the beginning of its only part
    const shown = parts.map(([name, text]) =>
      make(
        "div",
        { class: "part" },
        parts.length > 1 ? make("h3", {}, brief(name.replaceAll("_", " "), 60)) : null,
        ...this.thinking([...text].slice(0, thinking).join(""), query),
        make("div", { class: "text", dir: "auto" }, ...marked([...text].slice(thinking).join(""), query)),
      ),
    );
    const seen = node.fields.thought?.observation;
    if (seen && !parts.some(([, text]) => text.trimEnd().endsWith(seen.text))) {
      const title = seen.verified ? "Observed (solved)" : "Observed";
      shown.push(make("div", { class: "part" }, make("h3", {}, title), make("div", { class: "text", dir: "auto" }, ...marked(seen.text, query))));
    }
    return shown.length ? shown : [make("p", { class: "quiet" }, "The thought is empty.")];
  }

  /** The thoughts from the question to this one, each with the value of the path that ends with it. */
  /** The thinking of a thought, collapsed unless the search finds something in it. */
  thinking(text, query) {
    if (!text) return [];
    const words = counted(text.split(/\s+/).filter(Boolean).length, "word");
    const details = folded(`Thinking, ${words}`, make("div", { class: "text", dir: "auto" }, ...marked(text, query)));
    details.open = Boolean(query) && text.toLowerCase().includes(query.toLowerCase());
    return [details];
  }

  path(node, scale) {
    const path = [];
    for (let each = node; each.parent !== null; each = each.parent) path.unshift(each);
    if (path.length < 2) return [];
    const rows = path.map((each) => {
      const part = scale.of(each);
      const row = make(
        "li",
        { class: part === null ? "unvalued" : null, "aria-label": `thought ${placeOf(each)}` },
        make("div", { class: "text", dir: "auto" }, visible(each.text)),
        make("b", { class: "value" }, shortNumber(each.fields[scale.field] ?? null)),
      );
      if (part !== null) row.style.setProperty("--share", `${(100 * part).toFixed(1)}%`);
      return row;
    });
    return [make("h3", { class: "section" }, "Path"), make("ol", { class: "path" }, ...rows)];
  }

  /** The result of the search, shown with the question. */
  run(run) {
    const usage = run.usage ?? {};
    const said = (value) => (Array.isArray(value) ? value.join("\n") : typeof value === "object" ? JSON.stringify(value) : String(value));
    const texts = [
      [run.solved ? `Answer (${run.verdict ?? "verified"})` : "Answer", run.answer],
      ["Reference", run.reference],
      ["Ended", run.stopped],
      ["Failed", run.error],
    ].filter(([, value]) => value !== undefined && value !== null);
    return [
      ...texts.map(([name, value]) =>
        make("div", { class: "part" }, make("h3", {}, name), make("div", { class: "text", dir: "auto" }, visible(said(value)))),
      ),
      ...grid([
        ["score", run.score],
        ["certainty", run.certainty === null ? "not known" : run.certainty === undefined ? undefined : share(run.certainty)],
        ["votes", run.votes ? `${run.votes[0]} of ${run.votes[1]}` : undefined],
        ["seconds", usage.seconds ? seconds(usage.seconds) : undefined],
        ["calls", run.calls],
        ["new tokens", usage.new_tokens],
        ["forced tokens", usage.forced_tokens || undefined],
        ["masked tokens", usage.masked_tokens || undefined],
        ["prompt tokens", usage.prompt_tokens],
        ["reused prompt tokens", usage.reused_prompt_tokens],
        ["forwards", usage.forwards],
        ["acceptance rate", usage.reached ? share(usage.accepted / usage.reached) : undefined],
        ["accepted of drafted", usage.drafted ? share(usage.accepted / usage.drafted) : undefined],
        ["unreadable replies", run.parse_failures],
      ]),
    ];
  }

  numbers(fields) {
    const tokens = fields.new_tokens ?? 0;
    const time = fields.seconds ?? 0;
    return grid([
      ["answer", fields.answer],
      ["share of votes", fields.share === undefined ? undefined : share(fields.share)],
      ["value", fields.value],
      ["Q", fields.q],
      ["visits", fields.visits],
      ["prior", fields.prior],
      ["confidence", fields.confidence],
      ["reward", fields.reward],
      ["fast judgement", fields.fast],
      ["cost", fields.cost],
      ["decoder", fields.decoder],
      ["drafted tokens", fields.drafted],
      ["acceptance rate", fields.reached ? share((fields.accepted ?? 0) / fields.reached) : undefined],
      ["accepted of drafted", fields.drafted ? share((fields.accepted ?? 0) / fields.drafted) : undefined],
      ["new tokens", fields.new_tokens],
      ["approximate tokens", fields.approximate_tokens],
      ["tokens never decoded", fields.undecoded_tokens],
      ["forced tokens", fields.forced_tokens],
      ["masked tokens", fields.masked_tokens],
      ["prompt tokens", fields.prompt_tokens],
      ["seconds", time ? seconds(time) : undefined],
      ["tokens/s", tokens && time ? shortNumber(tokens / time) : undefined],
      ["equal thoughts merged", fields.merged],
      ["rejected thoughts after it", fields.rejected],
      ["unreadable replies", fields.parse_failures],
    ]);
  }

  world(fields) {
    if (fields.world === undefined || fields.world === null) return [];
    const text = typeof fields.world === "string" ? fields.world : JSON.stringify(fields.world, null, 1);
    return [folded("World state after it", make("pre", { dir: "auto" }, visible(text)))];
  }

  calls(tree, node) {
    const calls = tree.calls(node);
    if (!calls.length) {
      const why = tree.saved.calls ? "No model call is about this thought." : "Prompts and replies were not kept in this tree.";
      return node.parent === null ? [] : [make("p", { class: "quiet" }, why)];
    }
    return [make("h3", { class: "section" }, "Model calls"), ...calls.map((call) => this.call(call))];
  }

  call(call) {
    const parts = call.parts.length ? call.parts : call.output ? [{ kind: "exact", text: call.output, tokens: 0 }] : [];
    const kinds = [...new Set(parts.map((part) => part.kind))].filter((kind) => kind !== "exact");
    return make(
      "section",
      { class: "call" },
      make("h4", {}, brief(call.template.replaceAll("_", " "), 60), make("small", {}, call.purpose)),
      parts.length ? make("div", { class: "output", dir: "auto" }, ...parts.map(part)) : null,
      choices(Object.entries(call.choices)),
      kinds.length ? make("p", { class: "keys" }, ...kinds.map((kind) => make("span", { class: `key ${kind}` }, EXPLAINED[kind]))) : null,
      folded("Prompt", ...call.prompt.map(message)),
    );
  }
}

/** Names and numbers in two columns, without unknown values. */
function grid(rows) {
  const known = rows.filter(([, value]) => value !== undefined && value !== null);
  if (!known.length) return [];
  const cells = known.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, typeof value === "string" ? brief(value, 40) : shortNumber(value))),
  );
  return [make("dl", { class: "numbers" }, ...cells)];
}

/** A part of a reply, marked by kind; thinking is collapsed. */
function part({ kind, text, tokens }) {
  const title = EXPLAINED[kind] ?? kind;
  const known = kind in EXPLAINED ? kind : "exact";
  if (kind === "undecoded") return make("span", { class: "undecoded", title }, `${counted(tokens, "token")} never decoded`);
  if (kind === "thinking") {
    const details = folded(`Thinking, ${counted(tokens, "token")}`, visible(text));
    details.className = "thinking";
    return details;
  }
  return make("span", { class: known, title }, visible(text));
}

/** The scored choices, with probabilities normalized over the choices. */
function choices(scored) {
  const known = scored.filter(([, logprob]) => Number.isFinite(logprob));
  if (!known.length) return null;
  const top = Math.max(...known.map(([, logprob]) => logprob));
  const total = known.reduce((sum, [, logprob]) => sum + Math.exp(logprob - top), 0);
  const rows = known.map(([choice, logprob]) => {
    const part = Math.exp(logprob - top) / total;
    const bar = make("i");
    bar.style.width = `${100 * part}%`;
    return make("div", {}, make("dt", { dir: "auto" }, brief(choice, 60)), bar, make("dd", {}, share(part)));
  });
  return make("dl", { class: "choices" }, ...rows);
}

function message({ role, content }) {
  return make("div", { class: "message" }, make("h5", {}, role), make("pre", { dir: "auto" }, visible(content)));
}

/** A collapsed section, filled when it is first opened. */
function folded(name, ...children) {
  const details = make("details", {}, make("summary", {}, name));
  details.addEventListener("toggle", () => details.append(...children), { once: true });
  return details;
}

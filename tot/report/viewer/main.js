// The page: the current view, the toolbar and keyboard shortcuts.

const overview = embedded("evaluation");
const canvas = byId("canvas");
const panel = new Panel(byId("panel"));
const view = new TreeView(canvas, (node) => panel.show(view.tree, node, search.query, view.scale));
const search = new Search(view, (text) => byId("found").replaceChildren(text));

function embedded(id) {
  const block = byId(id);
  return block && JSON.parse(block.textContent);
}

// -- views ------------------------------------------------------------------------------------------------------

/** Show the view that the URL fragment names: #tree-3 is a tree; by default the overview, or the only tree. */
function route() {
  const name = location.hash.slice(1);
  const saved = (/^tree-\d+$/.test(name) && embedded(name)) || (overview ? null : embedded("tree-0"));
  if (saved) showTree(saved);
  else if (overview) showOverview();
}

function showTree(saved) {
  reveal("canvas", "panel", "tools");
  byId("back").hidden = !overview;
  const tree = new Tree(saved);
  name(tree.question);
  byId("query").value = "";
  search.query = "";
  search.found = [];
  byId("found").replaceChildren();
  view.show(tree);
  showMeasures();
  canvas.focus({ preventScroll: true });
}

function showOverview() {
  reveal("overview");
  byId("back").hidden = true;
  name(overview.title);
  if (!byId("overview").hasChildNodes()) byId("overview").append(...drawOverview(overview));
}

function reveal(...names) {
  for (const id of ["canvas", "panel", "tools", "overview"]) byId(id).hidden = !names.includes(id);
}

function name(text) {
  byId("title").replaceChildren(brief(text, 160));
  byId("title").title = visible(text.slice(0, 1000));
}

function showMeasures() {
  const measures = view.tree.measures();
  const options = measures.map(([name, field]) => make("option", { value: field, selected: field === view.scale.field }, name));
  byId("measure").replaceChildren(...options);
  byId("measure").parentElement.hidden = measures.length === 0;
  showScale();
}

function showScale() {
  const { low, high } = view.scale;
  byId("scale").hidden = !(low < high);
  byId("low").replaceChildren(shortNumber(low));
  byId("high").replaceChildren(shortNumber(high));
}

function back() {
  if (!byId("back").hidden) location.hash = "";
}

function changeTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = dark === "dark" ? "light" : "dark";
}

// -- toolbar ----------------------------------------------------------------------------------------------------

const clicks = {
  back,
  theme: changeTheme,
  help: () => byId("keys").showModal(),
  in: () => view.zoom(1.25),
  out: () => view.zoom(0.8),
  fit: () => view.fit(true),
  next: () => search.step(1),
  previous: () => search.step(-1),
};
for (const [id, act] of Object.entries(clicks)) byId(id).addEventListener("click", act);

byId("measure").addEventListener("change", (event) => {
  view.measure(event.target.value);
  showScale();
});

byId("query").addEventListener("input", (event) => search.run(event.target.value));
byId("query").addEventListener("keydown", (event) => {
  if (event.key === "Enter") search.step(event.shiftKey ? -1 : 1);
  else if (event.key === "Escape") canvas.focus();
  else return;
  event.preventDefault();
});

// -- keys -------------------------------------------------------------------------------------------------------

const PAN = 80;
const pans = { ArrowLeft: [PAN, 0], ArrowRight: [-PAN, 0], ArrowUp: [0, PAN], ArrowDown: [0, -PAN] };

const onTree = {
  ArrowLeft: () => view.selected.parent,
  ArrowRight: () => {
    if (view.selected.children.length && !view.selected.open) view.toggle(view.selected);
    return view.selected.children[0];
  },
  ArrowUp: () => view.neighbour(view.selected, -1),
  ArrowDown: () => view.neighbour(view.selected, 1),
  Home: () => view.tree.root,
  End: () => {
    view.reveal(view.tree.end);
    return null;
  },
};

const anywhere = {
  "/": () => {
    byId("query").focus();
    byId("query").select();
  },
  "?": clicks.help,
  "+": clicks.in,
  "=": clicks.in,
  "-": clicks.out,
  0: clicks.fit,
  n: clicks.next,
  p: clicks.previous,
  d: changeTheme,
  o: back,
  i: () => (document.activeElement === panel.element ? canvas : panel.element).focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  if (event.target.closest("input, select, textarea")) return;
  const { key } = event;
  const treeShown = !canvas.hidden;
  if (key in anywhere && (treeShown || "?do".includes(key))) anywhere[key]();
  else if (!treeShown || event.target !== canvas) return;
  else if (event.shiftKey && key in pans) view.move(...pans[key]);
  else if (key in onTree) {
    const node = onTree[key]();
    if (node) view.select(node);
  } else if (key === "Enter" || key === " ") view.toggle(view.selected);
  else return;
  event.preventDefault();
});

addEventListener("hashchange", route);
route();

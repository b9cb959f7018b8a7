// The review page. Text of the data reaches the page as text only (textContent), never as markup.

const $ = (id) => document.getElementById(id);
const NBSP = "\u00a0";
const percent = (p) => (p >= 0.995 ? ">99" : p < 0.005 ? "<1" : `${Math.round(100 * p)}`) + NBSP + "%";
const PAGE = 24;
const AT_ONCE = 1000; // decisions of one step that the server takes
const STATE = { kept: "Kept", unsure: "Unsure", skipped: "Skipped" };

function make(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// ---- what is known -----------------------------------------------------------------------------------------------
let session; // names, classes, counts
let items = []; // those fetched so far, in the order of review
let at = 0; // the one that is shown
let total = 0; // how many the filters let through
let reached = -1; // the place of the last one fetched: undo may bring back others from anywhere
let ended = false; // there are no more to fetch
let view = "one";
let selected = new Set(); // rows, in the grid
let anchor = 0; // where a range of the selection begins
let failed = null; // what was not saved, to be tried again

const filters = { scope: "first", state: "open", given: "", suggested: "" };
const tab = (sessionStorage.tab ||= crypto.randomUUID()); // undo takes back what this tab did; a reload stays the same tab
const others = new BroadcastChannel("warpi-review"); // other tabs of this browser

// ---- talking to the server -----------------------------------------------------------------------------------------
async function ask(path, body) {
  const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("No connection to warpi review: is it still running?");
  }
  const content = await answer.json();
  if (answer.status === 403) throw new Error("warpi review was started anew: open the link that it printed.");
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

let line = Promise.resolve(); // one thing after the other: a key pressed meanwhile waits for the one before it
function inTurn(work) {
  line = line.then(work).catch((error) => trouble(error.message));
  return line;
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("what").textContent = failed ? `Not saved. ${text}` : text;
}

let fading;
function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("on");
  clearTimeout(fading);
  fading = setTimeout(() => $("toast").classList.remove("on"), 2600);
}

// ---- fetching --------------------------------------------------------------------------------------------------------
async function fetchMore(limit = PAGE) {
  if (ended) return;
  const found = await ask(`/api/items?${new URLSearchParams({ ...filters, after: reached, limit })}`);
  if (reached < 0) total = found.total;
  reached = found.items.at(-1)?.place ?? reached;
  const known = new Set(items.map((item) => item.row));
  items.push(...found.items.filter((item) => !known.has(item.row)));
  ended = found.items.length < limit;
}

async function restart() {
  [items, at, reached, ended] = [[], 0, -1, false];
  selected.clear();
  await fetchMore(view === "one" ? PAGE : gridPage());
  trouble("");
  show();
}

const gridPage = () => (session.pictures ? 48 : 24);
const fits = (item) => filters.state === "all" || filters.state === item.state
  || (filters.state === "decided" && ["kept", "changed"].includes(item.state));

async function forward() {
  at += 1;
  while (true) {
    while (at < items.length && !fits(items[at])) at += 1; // decided meanwhile, here or in another tab
    if (at < items.length || ended) break;
    await fetchMore();
  }
  if (!ended && at > items.length - 6) await fetchMore();
  show();
}

function back() {
  if (at > 0) at -= 1;
  show();
}

// ---- deciding ----------------------------------------------------------------------------------------------------------
function took(states) {
  for (const item of items) if (states[item.row]) Object.assign(item, states[item.row]);
}

async function send(path, body) {
  failed = { path, body };
  const answer = await ask(path, body); // where this fails, `failed` stays, and is sent again with the same step
  failed = null;
  trouble("");
  session.counts = answer.counts;
  others.postMessage(answer.done || Object.fromEntries(answer.items.map((i) => [i.row, { state: i.state, label: i.label, seen: i.seen }])));
  return answer;
}

async function decide(choices) {
  if (failed || !choices.length) return;
  const answer = await send("/api/decide", { tab, step: crypto.randomUUID(), choices });
  await decided(answer);
}

async function decided(answer) {
  took(answer.done);
  took(answer.refused);
  const lost = Object.keys(answer.refused).length;
  if (lost) toast(lost === 1 ? "Decided in another tab meanwhile: that stands, unless you decide again" : `${lost} were decided in another tab meanwhile: those stand`);
  if (view === "many") {
    const n = Object.keys(answer.done).length;
    if (!lost) toast(`${n} decided`);
    selected.clear();
    show();
  } else if (lost) show();
  else await forward();
}

function act(action, label = null) {
  return inTurn(() => {
    const rows = view === "one" ? items.slice(at, at + 1) : items.filter((item) => selected.has(item.row));
    const able = action === "accept" ? rows.filter((item) => item.suggested !== null) : rows;
    return decide(able.map(({ row, seen }) => ({ row, seen, action, label })));
  });
}

function undo() {
  return inTurn(async () => {
    if (failed) return;
    undone(await send("/api/undo", { tab, step: crypto.randomUUID() }));
  });
}

function undone(answer) {
  if (!answer.rows.length) return toast("Nothing to undo in this tab. Earlier decisions: Filter, State, decided");
  const back = answer.rows.length === 1 ? `Taken back: row ${answer.rows[0]}` : `Taken back: ${answer.rows.length} rows`;
  toast(answer.items.length ? back : `${back}, not on this list`);
  if (!answer.items.length) return show();
  let here = at; // what lies beyond those fetched comes in between: afterwards it goes on as before
  for (const item of answer.items) {
    const known = items.find((other) => other.row === item.row);
    if (known) Object.assign(known, item);
    else {
      const later = items.findIndex((other) => other.place > item.place);
      items.splice(later < 0 ? here++ : later, 0, item);
    }
  }
  at = items.findIndex((item) => item.row === answer.items[0].row);
  show();
}

function again() {
  return inTurn(async () => {
    if (!failed) return restart();
    const { path, body } = failed;
    const answer = await send(path, body);
    if (path === "/api/undo") undone(answer);
    else await decided(answer);
  });
}

others.onmessage = ({ data }) => inTurn(async () => {
  // What this tab has seen stays as it is: who decides about such a row here is told first, and may then overrule it.
  for (const item of items) if (data[item.row]) Object.assign(item, data[item.row], { seen: item.seen });
  session.counts = (await ask("/api/session")).counts;
  show();
});

// ---- showing -----------------------------------------------------------------------------------------------------------
function show() {
  showProgress();
  const none = !items.length || (view === "one" && at >= items.length);
  $("empty").hidden = !none;
  $("single").hidden = none || view !== "one";
  $("grid").hidden = none || view !== "many";
  for (const id of ["one", "many"]) $(id).setAttribute("aria-pressed", String(view === id));
  $("filter").classList.toggle("active", filters.state !== "open" || filters.given !== "" || filters.suggested !== "");
  if (none) showEmpty();
  else if (view === "one") showOne(items[at]);
  else showGrid();
  showActions(none);
}

function showProgress() {
  const counts = session.counts[filters.scope];
  const sum = Object.values(counts).reduce((a, b) => a + b, 0);
  const done = counts.kept + counts.changed + counts.unsure;
  const what = !session.audited ? "rows" : filters.scope === "first" ? "suspicious rows" : "rows";
  $("bar").max = Math.max(1, sum);
  $("bar").value = done;
  $("count").replaceChildren(`${done} of ${sum} `, make("span", { className: "long", textContent: `${what} ` }), "reviewed");
  $("count").title = Object.entries(counts).map(([name, n]) => `${n} ${name}`).join(", ");
  document.title = `${done} / ${sum} · Review`;
}

function showEmpty() {
  const counts = session.counts[filters.scope];
  const plain = filters.state === "open" && !filters.given && !filters.suggested;
  $("empty-title").textContent = plain ? "All done here" : "Nothing fits these filters";
  $("empty-text").textContent = plain
    ? `${counts.kept} kept, ${counts.changed} changed, ${counts.unsure} unsure, ${counts.skipped} skipped.`
    : "Choose other filters.";
  $("empty-all").hidden = filters.scope === "all" && plain;
}

function picture(source, alt) {
  const img = make("img", { src: source, alt, className: session.small ? "small" : "", draggable: false, decoding: "async" });
  img.onerror = () => img.replaceWith(make("div", { className: "lost", textContent: "This picture cannot be shown" }));
  return img;
}

// A long path loses its middle: where it begins and what the file is called tell the most.
function shortened(path, most = 48) {
  const signs = Array.from(path);
  return signs.length <= most ? path : `${signs.slice(0, 15).join("")}…${signs.slice(16 - most).join("")}`;
}

function showOne(item) {
  const old = $("stage").dataset.row;
  $("where").replaceChildren(`Row ${item.row} · rank ${item.place + 1}`,
    ...(item.path === null ? [] : [" · ", make("bdi", { className: "path", textContent: shortened(item.path), title: item.path })]));
  ribbon($("ribbon"), item);
  const long = Math.max(item.given.length, item.suggested?.length ?? 0) > 9;
  name($("given-name"), item.given, long);
  name($("guess-name"), item.suggested ?? "", long);
  const tile = $("guess-name").parentNode;
  tile.classList.toggle("same", item.suggested === item.given);
  tile.hidden = tile.previousElementSibling.hidden = item.suggested === null;
  $("wrong").hidden = item.wrong === null;
  $("wrong").replaceChildren("The given label is wrong with probability ", make("b", { textContent: item.wrong === null ? "" : percent(item.wrong) }), ".",
    make("span", { className: "muted", title: "how far to trust this probability: see warpi audit", textContent: !(item.uncertainty >= 0.01) ? "" : ` Uncertainty ${item.uncertainty.toFixed(2)}.` }));
  showBars(item);
  if (old === String(item.row)) return;
  $("stage").dataset.row = item.row;
  $("stage").replaceChildren();
  if (session.pictures) $("stage").append(picture(`/picture/${item.row}`, `Row ${item.row}, given label ${item.given}`));
  const texts = item.words.filter(([, text]) => text.length > 60);
  for (const [, text] of texts) $("stage").append(make("p", { className: "text", textContent: text }));
  const cells = item.words.filter((pair) => !texts.includes(pair));
  if (cells.length) $("stage").append(table(cells, []));
  showNear(item, cells);
  for (const next of items.slice(at + 1, at + 4)) if (session.pictures) new Image().src = `/picture/${next.row}`;
}

function name(node, text, long) {
  node.textContent = text;
  node.classList.toggle("long", long);
}

function ribbon(node, item, changed = "Changed to") {
  node.hidden = item.state === "open";
  node.className = `ribbon ${item.state}`;
  node.textContent = item.state === "changed" ? `${changed} ${item.label}` : STATE[item.state] ?? "";
}

// A digit chooses the class of that name, where classes are digits; else the class at that place.
const digits = () => session.classes.every((c) => /^[0-9]$/.test(c));
const keyOf = (k) => (digits() ? session.classes[k] : k < 9 ? String(k + 1) : k === 9 ? "0" : null);
const classOf = (key) => session.classes.find((_, k) => keyOf(k) === key);

function showBars(item) {
  const p = item.p;
  const given = session.classes.indexOf(item.given);
  const order = session.classes.map((_, k) => k);
  if (p) order.sort((x, y) => p[y] - p[x]);
  const shown = order.slice(0, p ? 5 : 10);
  if (!shown.includes(given)) shown.splice(-1, 1, given);
  $("model").firstElementChild.textContent = p ? "What the model thinks" : "Which class is it?";
  $("bars").classList.toggle("plain", !p);
  $("bars").replaceChildren(...shown.map((k) => {
    const fill = make("span", { className: "fill" });
    if (p) fill.style.width = `${100 * p[k]}%`;
    const key = keyOf(k);
    const button = make("button", { type: "button", title: `Choose ${session.classes[k]}`, onclick: () => act("change", session.classes[k]) },
      make(key ? "kbd" : "span", { className: "key", textContent: key ?? "" }),
      make("span", { className: "name", textContent: session.classes[k] }),
      ...(p ? [make("span", { className: "track" }, fill), make("span", { className: "share", textContent: percent(p[k]) })] : []));
    const row = make("li", {}, button);
    row.classList.toggle("is-guess", session.classes[k] === item.suggested);
    row.classList.toggle("is-given", k === given);
    return row;
  }));
}

async function showNear(item, cells) {
  $("neighbours").replaceChildren();
  let near = [];
  try {
    near = (await ask(`/api/near/${item.row}`)).near;
  } catch {
    return; // what is nearest is a help; trouble is said where something is to be saved
  }
  if (items[at]?.row !== item.row) return; // the person went on meanwhile
  $("near").hidden = false;
  if (!near.length) $("neighbours").append(make("span", { className: "muted", textContent: "None yet: what you decide will be compared here." }));
  else if (session.pictures) {
    $("neighbours").replaceChildren(...near.map((n) => make("figure", {},
      picture(n.trusted === undefined ? `/picture/${n.row}` : `/trusted/${n.trusted}`, `Trusted example of class ${n.label}`),
      make("figcaption", { textContent: n.label, title: n.label }))));
  } else {
    $("neighbours").replaceChildren(...near.map((n) => make("span", { className: "tag", textContent: n.label })));
    const old = $("stage").querySelector(".table");
    if (old && innerWidth > 560) old.replaceWith(table(cells, near.slice(0, 3)));
  }
}

// Sixteen digits of a number are not read by anybody; pointing at it shows them all.
const brief = (text) => (/^-?\d+\.\d{7,}$/.test(text) ? String(Number(Number(text).toPrecision(6))) : text);

function table(cells, near) {
  const head = make("tr", {}, make("th", { textContent: "" }), make("th", { textContent: "This row", scope: "col" }),
    ...near.map((n) => make("th", { scope: "col" }, "Trusted", make("br"), make("span", { className: "tag", textContent: n.label }))));
  const body = cells.map(([key, value]) => make("tr", {}, make("th", { textContent: key, scope: "row" }), make("td", { textContent: brief(value), title: value, className: near.length ? "own" : "" }),
    ...near.map((n) => {
      const other = n.words.find(([k]) => k === key)?.[1] ?? "";
      return make("td", { textContent: brief(other), title: other, className: other === value ? "" : "far" });
    })));
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function showGrid() {
  $("tiles").classList.toggle("wide", !session.pictures);
  const focused = document.activeElement?.dataset?.row;
  $("tiles").replaceChildren(...items.map((item, i) => {
    const node = make("div", { className: "pick", tabIndex: i === 0 ? 0 : -1 });
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", String(selected.has(item.row)));
    node.setAttribute("aria-label", `Row ${item.row}, given ${item.given}, suggestion ${item.suggested ?? "none"}, ${item.state}`);
    node.dataset.row = item.row;
    node.title = item.path ?? "";
    node.classList.toggle("past", item.state !== "open");
    const mark = make("span");
    ribbon(mark, item, "→");
    const label = make("span", { textContent: item.given });
    if (item.suggested !== null && item.suggested !== item.given) label.append(" → ", make("em", { textContent: item.suggested }));
    const seen = session.pictures ? Object.assign(picture(`/picture/${item.row}`, ""), { loading: "lazy" })
      : make("div", { className: "brief", textContent: item.words.map(([k, v]) => (v.length > 60 ? v : `${k}: ${v}`)).join("\n") });
    node.append(seen, make("div", { className: "line" }, label,
      make("span", { className: "chance", textContent: item.wrong === null ? "" : percent(item.wrong) })), mark, make("span", { className: "tick", textContent: "✓" }));
    node.onclick = (event) => choose(i, event.shiftKey);
    return node;
  }));
  if (focused) $("tiles").querySelector(`[data-row="${focused}"]`)?.focus();
  $("more").textContent = ended ? "That is all" : `Next page (${Math.max(0, total - items.length)} more)`;
  $("more").disabled = ended;
}

function choose(i, range) {
  const rows = range ? items.slice(Math.min(i, anchor), Math.max(i, anchor) + 1).map((item) => item.row) : [items[i].row];
  const on = range || !selected.has(items[i].row);
  for (const row of rows) on ? selected.add(row) : selected.delete(row);
  if (!range) anchor = i;
  if (selected.size > AT_ONCE) {
    selected = new Set([...selected].slice(0, AT_ONCE));
    toast(`${AT_ONCE} at most are decided at once`);
  }
  for (const node of $("tiles").children) node.setAttribute("aria-selected", String(selected.has(Number(node.dataset.row))));
  $("tiles").children[i].focus();
  showActions(false);
}

function selectAll() {
  const rows = items.filter((item) => item.state === "open").map((item) => item.row).slice(0, AT_ONCE);
  selected = new Set(rows.length === selected.size ? [] : rows);
  show();
}

function nextPage() {
  return inTurn(async () => {
    const first = items.length;
    await fetchMore(gridPage());
    show();
    $("tiles").children[first]?.scrollIntoView({ block: "start" });
    $("tiles").children[first]?.focus();
  });
}

function showActions(none) {
  const many = view === "many";
  const item = many ? null : items[at];
  const chosen = items.filter((i) => selected.has(i.row));
  const able = many ? chosen.filter((i) => i.suggested !== null) : item && item.suggested !== null && item.suggested !== item.given ? [item] : [];
  const idle = none || (many && !chosen.length);
  for (const id of ["keep", "other", "unsure", "skip"]) $(id).disabled = idle;
  $("accept").disabled = idle || !able.length;
  $("accept").hidden = !session.audited;
  $("keep-name").textContent = many ? "" : item?.given ?? "";
  $("accept").firstElementChild.textContent = many ? "Accept suggestion" : "Change to";
  $("accept-name").textContent = many ? "" : item?.suggested === item?.given ? "…" : item?.suggested ?? "…";
  $("all").hidden = !many;
  $("chosen").hidden = !many;
  $("chosen").textContent = `${chosen.length} selected`;
}

// ---- dialogs ---------------------------------------------------------------------------------------------------------
function openPicker() {
  if ($("other").disabled) return;
  $("search").value = "";
  showChoices();
  $("picker").showModal();
  $("search").focus();
}

function showChoices() {
  const text = $("search").value.trim().toLowerCase();
  const p = view === "one" ? items[at]?.p : null;
  const order = session.classes.map((_, k) => k).filter((k) => session.classes[k].toLowerCase().includes(text));
  if (p && session.classes.length > 10) order.sort((a, b) => p[b] - p[a]);
  $("choices").replaceChildren(...order.map((k, i) => make("button", { type: "button", className: text && i === 0 ? "at" : "", onclick: () => pickClass(session.classes[k]) },
    make("span", { textContent: session.classes[k], title: session.classes[k] }), p ? make("small", { textContent: percent(p[k]) }) : "")));
}

function pickClass(label) {
  $("picker").close();
  act("change", label);
}

const short = (names) => names.slice(0, 12).join(", ") + (names.length > 12 ? ", …" : "");

function exportAll() {
  return inTurn(async () => {
    const text = $("exported-text");
    try {
      const made = await ask("/api/export", {});
      $("exported-title").textContent = "Exported";
      text.replaceChildren(
        make("p", {}, make("b", { textContent: "Corrected labels of all rows: " }), make("code", { textContent: made.corrected }), " (", make("a", { href: "/api/corrected.csv", textContent: "download" }), ")"),
        make("p", {}, make("b", { textContent: `${made.size} trusted examples, as many of each class: ` }), make("code", { textContent: made.path })));
      if (made.lacking.length) text.append(make("p", { className: "note", textContent: `None yet of: ${short(made.lacking)}. warpi fit needs at least one of every class.` }));
      else if (made.left) text.append(make("p", { className: "muted", textContent: `${made.left} more that you decided count by their corrected labels. To trust more of them, decide about more of: ${short(made.fewest)}.` }));
      text.append(make("p", {}, "Train with them:", make("pre", { textContent: made.command })));
    } catch (error) {
      if (error.status !== 409) throw error;
      $("exported-title").textContent = "Not exported";
      text.replaceChildren(make("p", { textContent: error.message }));
    }
    $("exported").showModal();
  });
}

const KEYS = [
  [["K"], "keep the given label"], [["A"], "change to the suggestion"], [["1", "…", "0"], "the class with this number"], [["C"], "another class: type its name"],
  [["U"], "unsure: looked at, cannot be told"], [["S"], "skip: later"], [["Z"], "undo the last decision of this tab"], [["←", "→"], "look back, look ahead"],
  [["G"], "one at a time, or a grid"], [["Space"], "grid: select; with Shift and a click: a range"], [["X"], "grid: select all"], [["N"], "grid: next page"],
  [["F"], "filters; Esc leaves them"], [["E"], "export"], [["?"], "this list"],
];

// ---- the beginning ---------------------------------------------------------------------------------------------------
function setView(to) {
  return inTurn(async () => {
    if (view === to) return;
    view = to;
    $("stage").dataset.row = "";
    if (to === "one") at = Math.max(0, items.findIndex(fits));
    else if (items.length < gridPage()) await fetchMore(gridPage() - items.length);
    selected.clear();
    show();
    if (to === "many") $("tiles").firstElementChild?.focus();
  });
}

function toggleFilters() {
  const open = $("filters").hidden;
  $("filters").hidden = !open;
  $("filter").setAttribute("aria-expanded", String(open));
  if (open) $("scope").focus();
}

function setFilter(change) {
  Object.assign(filters, change);
  for (const id of Object.keys(filters)) $(id).value = filters[id];
  return inTurn(restart);
}

function moveFocus(by) {
  const nodes = [...$("tiles").children];
  const now = nodes.indexOf(document.activeElement);
  nodes[Math.min(nodes.length - 1, Math.max(0, now + by))]?.focus();
}

const columns = () => getComputedStyle($("tiles")).gridTemplateColumns.split(" ").length;

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key.toLowerCase() === "z" && !event.altKey && !event.target.matches("input")) { event.preventDefault(); undo(); }
    return;
  }
  if (event.key === "Escape" && event.target.matches("select")) event.target.blur();
  if (document.querySelector("dialog[open]") || event.target.matches("input, select")) return;
  if (event.repeat && !event.key.startsWith("Arrow")) return; // a key held down decides once
  const many = view === "many";
  const keys = {
    k: () => act("keep"), a: () => !$("accept").disabled && act("accept"), u: () => act("unsure"), s: () => act("skip"), z: undo, c: openPicker,
    g: () => setView(many ? "one" : "many"), f: toggleFilters, e: exportAll, "?": () => $("keys").showModal(),
    arrowleft: () => (many ? moveFocus(-1) : inTurn(back)), arrowright: () => (many ? moveFocus(1) : inTurn(() => at < items.length && forward())),
    ...(many && { arrowup: () => moveFocus(-columns()), arrowdown: () => moveFocus(columns()), x: selectAll, n: () => !ended && nextPage(),
      " ": () => { const i = [...$("tiles").children].indexOf(document.activeElement); if (i >= 0) choose(i, event.shiftKey); else return false; } }),
  };
  const key = event.key.toLowerCase();
  const label = classOf(event.key);
  const work = keys[key] ?? (label !== undefined ? () => act("change", label) : null);
  if (work && work() !== false) event.preventDefault();
}

async function begin() {
  history.replaceState(null, "", "/"); // the key is in a cookie now, and need not stand in the address
  session = await ask("/api/session");
  $("name").textContent = session.name;
  $("name").title = session.folder;
  for (const id of ["given", "suggested"]) $(id).append(...session.classes.map((c) => make("option", { value: c, textContent: c })));
  document.body.classList.toggle("plain", !session.audited);
  if (!session.audited) $("scope").closest("label").hidden = $("suggested").closest("label").hidden = true;
  const plain = { first: session.counts.first.open, all: session.counts.all.open };
  if (!plain.first && plain.all) filters.scope = $("scope").value = "all";
  for (const [keys, text] of KEYS) $("key-list").append(make("dt", {}, ...keys.map((k) => (k === "…" ? "–" : make("kbd", { textContent: k })))), make("dd", { textContent: text }));
  const clicks = {
    keep: () => act("keep"), accept: () => act("accept"), unsure: () => act("unsure"), skip: () => act("skip"), other: openPicker, undo, all: selectAll, more: nextPage, again,
    one: () => setView("one"), many: () => setView("many"), filter: toggleFilters, export: exportAll, help: () => $("keys").showModal(),
    "empty-export": exportAll, "empty-all": () => setFilter({ scope: "all", state: "open", given: "", suggested: "" }),
  };
  for (const [id, work] of Object.entries(clicks)) $(id).onclick = work;
  for (const id of Object.keys(filters)) {
    let mouse = false;
    $(id).onpointerdown = () => { mouse = true; };
    $(id).onkeydown = () => { mouse = false; };
    $(id).onchange = () => {
      if (mouse) $(id).blur(); // the next K is to keep a label, not to choose a filter that begins with it
      return setFilter({ [id]: $(id).value });
    };
  }
  $("search").oninput = showChoices;
  $("search").onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); $("choices").firstElementChild?.click(); } };
  document.addEventListener("keydown", onKey);
  await restart();
  document.body.dataset.ready = "yes";
}

inTurn(begin);

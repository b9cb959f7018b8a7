// The review page. Text from the data is inserted with textContent, never as markup.

const $ = (id) => document.getElementById(id);
const NBSP = "\u00a0";
const percent = (p) => (p >= 0.995 ? ">99" : p < 0.005 ? "<1" : `${Math.round(100 * p)}`) + NBSP + "%";
const PAGE = 24;
const AT_ONCE = 1000; // decisions per step, limited by the server
const STATE = { kept: "Kept", unsure: "Unsure", skipped: "Skipped" };

function make(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// ---- state ------------------------------------------------------------------------------------------------------
let session; // names, classes, counts
let items = []; // fetched so far, in the order of review
let current = 0; // index of the item that is shown
let total = 0; // number of items that match the filters
let lastPlace = -1; // place of the last fetched item; undo may insert items from other places
let allFetched = false;
let view = "one";
let selected = new Set(); // rows selected in the grid
let anchor = 0; // index of the first item of a range selection
let unsaved = null; // a request that failed and can be sent again

const filters = { scope: "first", state: "open", given: "", suggested: "" };
const tab = (sessionStorage.tab ||= crypto.randomUUID()); // undo applies to the decisions of this tab; a reload keeps its id
const otherTabs = new BroadcastChannel("warpi-review"); // other tabs of this browser

// ---- requests to the server ----------------------------------------------------------------------------------------
async function request(path, body) {
  const options = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("No connection to warpi review. Is it still running?");
  }
  const content = await answer.json();
  if (answer.status === 403) throw new Error("warpi review was restarted. Open the link that it printed.");
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

let queue = Promise.resolve(); // actions run one after the other; a key pressed in the meantime waits
function enqueue(work) {
  queue = queue.then(work).catch((error) => showError(error.message));
  return queue;
}

function showError(text) {
  $("trouble").hidden = !text;
  $("what").textContent = unsaved ? `Not saved. ${text}` : text;
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
  if (allFetched) return;
  const page = await request(`/api/items?${new URLSearchParams({ ...filters, after: lastPlace, limit })}`);
  if (lastPlace < 0) total = page.total;
  lastPlace = page.items.at(-1)?.place ?? lastPlace;
  const known = new Set(items.map((item) => item.row));
  items.push(...page.items.filter((item) => !known.has(item.row)));
  allFetched = page.items.length < limit;
}

async function restart() {
  [items, current, lastPlace, allFetched] = [[], 0, -1, false];
  selected.clear();
  await fetchMore(view === "one" ? PAGE : gridPage());
  showError("");
  show();
}

const gridPage = () => (session.pictures ? 48 : 24);
const matchesFilter = (item) => filters.state === "all" || filters.state === item.state
  || (filters.state === "decided" && ["kept", "changed"].includes(item.state));

async function showNext() {
  current += 1;
  while (true) {
    while (current < items.length && !matchesFilter(items[current])) current += 1; // decided in the meantime, here or in another tab
    if (current < items.length || allFetched) break;
    await fetchMore();
  }
  if (!allFetched && current > items.length - 6) await fetchMore();
  show();
}

function showPrevious() {
  if (current > 0) current -= 1;
  show();
}

// ---- deciding ----------------------------------------------------------------------------------------------------------
function updateItems(states) {
  for (const item of items) if (states[item.row]) Object.assign(item, states[item.row]);
}

async function send(path, body) {
  unsaved = { path, body };
  const answer = await request(path, body); // if this fails, `unsaved` stays and can be sent again as the same step
  unsaved = null;
  showError("");
  session.counts = answer.counts;
  otherTabs.postMessage(answer.done || Object.fromEntries(answer.items.map((i) => [i.row, { state: i.state, label: i.label, seen: i.seen }])));
  return answer;
}

async function decide(choices) {
  if (unsaved || !choices.length) return;
  const answer = await send("/api/decide", { tab, step: crypto.randomUUID(), choices });
  await showDecided(answer);
}

async function showDecided(answer) {
  updateItems(answer.done);
  updateItems(answer.refused);
  const lost = Object.keys(answer.refused).length;
  if (lost) toast(lost === 1 ? "Already decided in another tab. Decide again to change it" : `${lost} were already decided in another tab and stay as they are`);
  if (view === "many") {
    const n = Object.keys(answer.done).length;
    if (!lost) toast(`${n} decided`);
    selected.clear();
    show();
  } else if (lost) show();
  else await showNext();
}

function act(action, label = null) {
  return enqueue(() => {
    const rows = view === "one" ? items.slice(current, current + 1) : items.filter((item) => selected.has(item.row));
    const able = action === "accept" ? rows.filter((item) => item.suggested !== null) : rows;
    return decide(able.map(({ row, seen }) => ({ row, seen, action, label })));
  });
}

function undo() {
  return enqueue(async () => {
    if (unsaved) return;
    showUndone(await send("/api/undo", { tab, step: crypto.randomUUID() }));
  });
}

function showUndone(answer) {
  if (!answer.rows.length) return toast("Nothing to undo in this tab. To find earlier decisions, filter by state");
  const text = answer.rows.length === 1 ? `Undone: row ${answer.rows[0]}` : `Undone: ${answer.rows.length} rows`;
  toast(answer.items.length ? text : `${text}, not on this list`);
  if (!answer.items.length) return show();
  let end = current; // items that were not fetched yet are inserted here
  for (const item of answer.items) {
    const known = items.find((other) => other.row === item.row);
    if (known) Object.assign(known, item);
    else {
      const later = items.findIndex((other) => other.place > item.place);
      items.splice(later < 0 ? end++ : later, 0, item);
    }
  }
  current = items.findIndex((item) => item.row === answer.items[0].row);
  show();
}

function retry() {
  return enqueue(async () => {
    if (!unsaved) return restart();
    const { path, body } = unsaved;
    const answer = await send(path, body);
    if (path === "/api/undo") showUndone(answer);
    else await showDecided(answer);
  });
}

otherTabs.onmessage = ({ data }) => enqueue(async () => {
  // Keep `seen`, so that the server refuses a decision about such a row once and the person is told about the other one.
  for (const item of items) if (data[item.row]) Object.assign(item, data[item.row], { seen: item.seen });
  session.counts = (await request("/api/session")).counts;
  show();
});

// ---- display -----------------------------------------------------------------------------------------------------------
function show() {
  showProgress();
  const none = !items.length || (view === "one" && current >= items.length);
  $("empty").hidden = !none;
  $("single").hidden = none || view !== "one";
  $("grid").hidden = none || view !== "many";
  for (const id of ["one", "many"]) $(id).setAttribute("aria-pressed", String(view === id));
  $("filter").classList.toggle("active", filters.state !== "open" || filters.given !== "" || filters.suggested !== "");
  if (none) showEmpty();
  else if (view === "one") showOne(items[current]);
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
  $("empty-title").textContent = plain ? "All done" : "No row matches these filters";
  $("empty-text").textContent = plain
    ? `${counts.kept} kept, ${counts.changed} changed, ${counts.unsure} unsure, ${counts.skipped} skipped.`
    : "Choose other filters.";
  $("empty-all").hidden = filters.scope === "all" && plain;
}

function picture(source, alt) {
  const img = make("img", { src: source, alt, className: session.small ? "small" : "", draggable: false, decoding: "async" });
  img.onerror = () => img.replaceWith(make("div", { className: "lost", textContent: "This image cannot be displayed" }));
  return img;
}

// Shorten a long path in the middle, and keep its beginning and the file name.
function shorten(path, limit = 48) {
  const characters = Array.from(path);
  return characters.length <= limit ? path : `${characters.slice(0, 15).join("")}…${characters.slice(16 - limit).join("")}`;
}

function showOne(item) {
  const old = $("stage").dataset.row;
  $("where").replaceChildren(`Row ${item.row} · rank ${item.place + 1}`,
    ...(item.path === null ? [] : [" · ", make("bdi", { className: "path", textContent: shorten(item.path), title: item.path })]));
  setRibbon($("ribbon"), item);
  const long = Math.max(item.given.length, item.suggested?.length ?? 0) > 9;
  setName($("given-name"), item.given, long);
  setName($("guess-name"), item.suggested ?? "", long);
  const tile = $("guess-name").parentNode;
  tile.classList.toggle("same", item.suggested === item.given);
  tile.hidden = tile.previousElementSibling.hidden = item.suggested === null;
  $("wrong").hidden = item.wrong === null;
  $("wrong").replaceChildren("The given label is wrong with probability ", make("b", { textContent: item.wrong === null ? "" : percent(item.wrong) }), ".",
    make("span", { className: "muted", title: "uncertainty of this probability, see warpi audit", textContent: !(item.uncertainty >= 0.01) ? "" : ` Uncertainty ${item.uncertainty.toFixed(2)}.` }));
  showBars(item);
  if (old === String(item.row)) return;
  $("stage").dataset.row = item.row;
  $("stage").replaceChildren();
  if (session.pictures) $("stage").append(picture(`/picture/${item.row}`, `Row ${item.row}, given label ${item.given}`));
  const texts = item.cells.filter(([, text]) => text.length > 60);
  for (const [, text] of texts) $("stage").append(make("p", { className: "text", textContent: text }));
  const cells = item.cells.filter((pair) => !texts.includes(pair));
  if (cells.length) $("stage").append(table(cells, []));
  showNear(item, cells);
  for (const next of items.slice(current + 1, current + 4)) if (session.pictures) new Image().src = `/picture/${next.row}`;
}

function setName(node, text, long) {
  node.textContent = text;
  node.classList.toggle("long", long);
}

function setRibbon(node, item, changed = "Changed to") {
  node.hidden = item.state === "open";
  node.className = `ribbon ${item.state}`;
  node.textContent = item.state === "changed" ? `${changed} ${item.label}` : STATE[item.state] ?? "";
}

// A digit key chooses the class with that name if all classes are digits, else the class at that position.
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
  $("model").firstElementChild.textContent = p ? "Prediction of the model" : "Which class is it?";
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
  $("neighbors").replaceChildren();
  let near = [];
  try {
    near = (await request(`/api/near/${item.row}`)).near;
  } catch {
    return; // optional information; connection errors are shown when a decision is saved
  }
  if (items[current]?.row !== item.row) return; // the person has moved on in the meantime
  $("near").hidden = false;
  if (!near.length) $("neighbors").append(make("span", { className: "muted", textContent: "None yet. Rows that you decide will appear here." }));
  else if (session.pictures) {
    $("neighbors").replaceChildren(...near.map((n) => make("figure", {},
      picture(n.trusted === undefined ? `/picture/${n.row}` : `/trusted/${n.trusted}`, `Trusted example of class ${n.label}`),
      make("figcaption", { textContent: n.label, title: n.label }))));
  } else {
    $("neighbors").replaceChildren(...near.map((n) => make("span", { className: "tag", textContent: n.label })));
    const old = $("stage").querySelector(".table");
    if (old && innerWidth > 560) old.replaceWith(table(cells, near.slice(0, 3)));
  }
}

// Round long numbers; the tooltip shows all digits.
const roundNumber = (text) => (/^-?\d+\.\d{7,}$/.test(text) ? String(Number(Number(text).toPrecision(6))) : text);

function table(cells, near) {
  const head = make("tr", {}, make("th", { textContent: "" }), make("th", { textContent: "This row", scope: "col" }),
    ...near.map((n) => make("th", { scope: "col" }, "Trusted", make("br"), make("span", { className: "tag", textContent: n.label }))));
  const body = cells.map(([key, value]) => make("tr", {}, make("th", { textContent: key, scope: "row" }), make("td", { textContent: roundNumber(value), title: value, className: near.length ? "own" : "" }),
    ...near.map((n) => {
      const other = n.cells.find(([k]) => k === key)?.[1] ?? "";
      return make("td", { textContent: roundNumber(other), title: other, className: other === value ? "" : "far" });
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
    setRibbon(mark, item, "→");
    const label = make("span", { textContent: item.given });
    if (item.suggested !== null && item.suggested !== item.given) label.append(" → ", make("em", { textContent: item.suggested }));
    const seen = session.pictures ? Object.assign(picture(`/picture/${item.row}`, ""), { loading: "lazy" })
      : make("div", { className: "brief", textContent: item.cells.map(([k, v]) => (v.length > 60 ? v : `${k}: ${v}`)).join("\n") });
    node.append(seen, make("div", { className: "line" }, label,
      make("span", { className: "wrong-share", textContent: item.wrong === null ? "" : percent(item.wrong) })), mark, make("span", { className: "tick", textContent: "✓" }));
    node.onclick = (event) => choose(i, event.shiftKey);
    return node;
  }));
  if (focused) $("tiles").querySelector(`[data-row="${focused}"]`)?.focus();
  $("more").textContent = allFetched ? "No more rows" : `Next page (${Math.max(0, total - items.length)} more)`;
  $("more").disabled = allFetched;
}

function choose(i, range) {
  const rows = range ? items.slice(Math.min(i, anchor), Math.max(i, anchor) + 1).map((item) => item.row) : [items[i].row];
  const on = range || !selected.has(items[i].row);
  for (const row of rows) on ? selected.add(row) : selected.delete(row);
  if (!range) anchor = i;
  if (selected.size > AT_ONCE) {
    selected = new Set([...selected].slice(0, AT_ONCE));
    toast(`You can decide at most ${AT_ONCE} rows at once`);
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
  return enqueue(async () => {
    const first = items.length;
    await fetchMore(gridPage());
    show();
    $("tiles").children[first]?.scrollIntoView({ block: "start" });
    $("tiles").children[first]?.focus();
  });
}

function showActions(none) {
  const many = view === "many";
  const item = many ? null : items[current];
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
  const p = view === "one" ? items[current]?.p : null;
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
  return enqueue(async () => {
    const text = $("exported-text");
    try {
      const made = await request("/api/export", {});
      $("exported-title").textContent = "Exported";
      text.replaceChildren(
        make("p", {}, make("b", { textContent: "Corrected labels of all rows: " }), make("code", { textContent: made.corrected }), " (", make("a", { href: "/api/corrected.csv", textContent: "download" }), ")"));
      if (made.size) text.append(make("p", {}, make("b", { textContent: `${made.size} trusted examples: ` }), make("code", { textContent: made.path })));
      else text.append(make("p", { className: "muted", textContent: "No trusted examples: the decided rows looked suspicious, so they do not represent the data. Their corrected labels are used." }));
      if (made.missing?.length) text.append(make("p", { className: "note", textContent: `No trusted example yet of: ${short(made.missing)}.` }));
      if (made.corrected_only) text.append(make("p", { className: "muted", textContent: `${made.corrected_only} more decided rows correct their labels but are not trusted examples: they looked suspicious, so they do not represent the data.` }));
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
  [["K"], "keep the given label"], [["A"], "change to the suggestion"], [["1", "…", "0"], "choose the class with this number"], [["C"], "choose another class by typing its name"],
  [["U"], "unsure: you looked but cannot tell"], [["S"], "skip for now"], [["Z"], "undo the last decision of this tab"], [["←", "→"], "previous and next row"],
  [["G"], "switch between one row and the grid"], [["Space"], "grid: select (Shift and click: a range)"], [["X"], "grid: select all"], [["N"], "grid: next page"],
  [["F"], "filters (Esc to leave)"], [["E"], "export"], [["?"], "this list"],
];

// ---- start -----------------------------------------------------------------------------------------------------------
function setView(to) {
  return enqueue(async () => {
    if (view === to) return;
    view = to;
    $("stage").dataset.row = "";
    if (to === "one") current = Math.max(0, items.findIndex(matchesFilter));
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
  return enqueue(restart);
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
  if (event.repeat && !event.key.startsWith("Arrow")) return; // a key that is held down decides only once
  const many = view === "many";
  const keys = {
    k: () => act("keep"), a: () => !$("accept").disabled && act("accept"), u: () => act("unsure"), s: () => act("skip"), z: undo, c: openPicker,
    g: () => setView(many ? "one" : "many"), f: toggleFilters, e: exportAll, "?": () => $("keys").showModal(),
    arrowleft: () => (many ? moveFocus(-1) : enqueue(showPrevious)), arrowright: () => (many ? moveFocus(1) : enqueue(() => current < items.length && showNext())),
    ...(many && { arrowup: () => moveFocus(-columns()), arrowdown: () => moveFocus(columns()), x: selectAll, n: () => !allFetched && nextPage(),
      " ": () => { const i = [...$("tiles").children].indexOf(document.activeElement); if (i >= 0) choose(i, event.shiftKey); else return false; } }),
  };
  const key = event.key.toLowerCase();
  const label = classOf(event.key);
  const work = keys[key] ?? (label !== undefined ? () => act("change", label) : null);
  if (work && work() !== false) event.preventDefault();
}

async function start() {
  history.replaceState(null, "", "/"); // the key is in a cookie now; remove it from the address
  session = await request("/api/session");
  $("name").textContent = session.name;
  $("name").title = session.folder;
  for (const id of ["given", "suggested"]) $(id).append(...session.classes.map((c) => make("option", { value: c, textContent: c })));
  document.body.classList.toggle("plain", !session.audited);
  if (!session.audited) $("scope").closest("label").hidden = $("suggested").closest("label").hidden = true;
  const plain = { first: session.counts.first.open, all: session.counts.all.open };
  if (!plain.first && plain.all) filters.scope = $("scope").value = "all";
  for (const [keys, text] of KEYS) $("key-list").append(make("dt", {}, ...keys.map((k) => (k === "…" ? "–" : make("kbd", { textContent: k })))), make("dd", { textContent: text }));
  const clicks = {
    keep: () => act("keep"), accept: () => act("accept"), unsure: () => act("unsure"), skip: () => act("skip"), other: openPicker, undo, all: selectAll, more: nextPage, again: retry,
    one: () => setView("one"), many: () => setView("many"), filter: toggleFilters, export: exportAll, help: () => $("keys").showModal(),
    "empty-export": exportAll, "empty-all": () => setFilter({ scope: "all", state: "open", given: "", suggested: "" }),
  };
  for (const [id, work] of Object.entries(clicks)) $(id).onclick = work;
  for (const id of Object.keys(filters)) {
    let mouse = false;
    $(id).onpointerdown = () => { mouse = true; };
    $(id).onkeydown = () => { mouse = false; };
    $(id).onchange = () => {
      if (mouse) $(id).blur(); // so that K keeps a label instead of choosing a filter option
      return setFilter({ [id]: $(id).value });
    };
  }
  $("search").oninput = showChoices;
  $("search").onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); $("choices").firstElementChild?.click(); } };
  document.addEventListener("keydown", onKey);
  await restart();
  document.body.dataset.ready = "yes";
}

enqueue(start);

// The review page. Text from the data is inserted with textContent, never as markup.

import { openCopies, showKept, startCopies } from "./copies.js";

export const $ = (id) => document.getElementById(id);
const NBSP = "\u00a0";
const percent = (p) => (p >= 0.995 ? ">99" : p < 0.005 ? "<1" : `${Math.round(100 * p)}`) + NBSP + "%";
const PAGE = 24;
const AT_ONCE = 1000; // decisions per step, limited by the server
const STATE = { kept: "Kept", unsure: "Unsure", skipped: "Skipped", dropped: "Dropped: a copy is kept" };
const ORDERS = { listed: "as in the list", suspicious: "most suspicious first", gain: "largest expected gain first" };
const TELLING = 5; // columns that a tile of the grid shows

export function make(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

// Text with commands in backticks.
const marked = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", { textContent: part }) : part));

// ---- state ------------------------------------------------------------------------------------------------------
export let session; // names, classes, counts
let items = []; // fetched so far, in the order of review
let current = 0; // index of the item that is shown
let total = 0; // number of items that match the filters
let lastPlace = -1; // place of the last fetched item; undo may insert items from other places
let allFetched = false;
let view = "one";
let selected = new Set(); // rows selected in the grid
let anchor = 0; // index of the first item of a range selection
let unsaved = null; // a request that failed and can be sent again
const revealed = new Set(); // rows whose hidden label the person wanted to see

const filters = { scope: "first", state: "open", given: "", suggested: "", order: "" };
export const tab = (sessionStorage.tab ||= crypto.randomUUID()); // undo applies to the decisions of this tab; a reload keeps its id
const otherTabs = new BroadcastChannel("warpi-review"); // other tabs of this browser

// ---- requests to the server ----------------------------------------------------------------------------------------
export async function request(path, body) {
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
export function enqueue(work) {
  queue = queue.then(work).catch((error) => showError(error.message));
  return queue;
}

function showError(text) {
  $("trouble").hidden = !text;
  $("what").textContent = unsaved ? `Not saved. ${text}` : text;
}

let fading;
export function toast(text, milliseconds = 2600) {
  $("toast").textContent = text;
  $("toast").classList.add("on");
  clearTimeout(fading);
  fading = setTimeout(() => $("toast").classList.remove("on"), milliseconds);
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
export function updateItems(states) {
  for (const item of items) if (states[item.row]) Object.assign(item, states[item.row]);
}

export async function send(path, body) {
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
  const hidden = view === "one" && isHidden(items[current]) ? items[current] : null;
  const answer = await send("/api/decide", { tab, step: crypto.randomUUID(), choices });
  await showDecided(answer);
  if (hidden && answer.done[hidden.row]?.label) tellHidden(hidden, answer.done[hidden.row].label);
}

// The labels of some rows are hidden until the person has chosen a class, so that they do not influence the choice.
const isHidden = (item) => item.blind && item.state === "open" && !revealed.has(item.row);

function tellHidden(item, label) {
  const guess = item.suggested === null || item.suggested === item.given ? "" : `, suggestion ${item.suggested}`;
  toast(label === item.given ? `You chose ${label}, like the given label` : `You chose ${label}. Given label ${item.given}${guess}. Undo with Z`, 6000);
}

async function showDecided(answer) {
  updateItems(answer.done);
  updateItems(answer.refused);
  const lost = Object.keys(answer.refused).length;
  if (lost) toast(lost === 1 ? "Already decided in another tab or by someone else. Decide again to change it" : `${lost} were already decided in another tab or by someone else and stay as they are`);
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
    if (view === "one" && ["keep", "accept"].includes(action) && rows.some(isHidden)) return toast("Choose a class first. The labels are hidden until then; V shows them");
    const able = action === "accept" ? rows.filter((item) => item.suggested !== null) : rows;
    return decide(able.map(({ row, seen }) => ({ row, seen, action, label })));
  });
}

export const undoRequest = () => ["/api/undo", { tab, step: crypto.randomUUID(), order: filters.order }];

function undo() {
  return enqueue(async () => {
    if (unsaved) return;
    await showUndone(await send(...undoRequest()));
  });
}

export function showUndone(answer) {
  if (!answer.rows.length) return toast("Nothing to undo in this tab. To find earlier decisions, filter by state");
  const text = answer.rows.length === 1 ? `Undone: row ${answer.rows[0]}` : `Undone: ${answer.rows.length} rows`;
  toast(answer.items.length ? text : `${text}, not on this list`);
  if (!answer.items.length) return show();
  if (answer.rows.length > PAGE) return restart();
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
    if (path === "/api/undo") await showUndone(answer);
    else if (path === "/api/accept") await showAccepted(answer);
    else if (path === "/api/copies") showKept(answer);
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
export function show() {
  showProgress();
  const none = !items.length || (view === "one" && current >= items.length);
  $("empty").hidden = !none;
  $("single").hidden = none || view !== "one";
  $("grid").hidden = none || view !== "many";
  document.body.classList.toggle("wide", view === "many");
  for (const id of ["one", "many"]) $(id).setAttribute("aria-pressed", String(view === id));
  $("filter").classList.toggle("active", filters.state !== "open" || filters.given !== "" || filters.suggested !== "");
  if (none) showEmpty();
  else if (view === "one") showOne(items[current]);
  else showGrid();
  showActions(none);
}

function showProgress() {
  const counts = session.counts[filters.scope];
  const sum = countAll(counts);
  const done = counts.kept + counts.changed + counts.unsure + counts.accepted + counts.dropped;
  const what = filters.scope === "unusual" ? "unusual rows" : filters.scope !== "first" || (!session.audited && !session.listed) ? "rows" : session.listed ? "rows of the list" : "suspicious rows";
  $("bar").max = Math.max(1, sum);
  $("bar").value = done;
  $("count").replaceChildren(`${done} of ${sum} `, make("span", { className: "long", textContent: `${what} ` }), "reviewed");
  $("count").title = Object.entries(counts).map(([name, n]) => `${n} ${name}`).join(", ");
  document.title = `${done} / ${sum} · Review`;
  $("intro").hidden = !session.is_new || sessionStorage.intro === "read" || session.counts.all.open < countAll(session.counts.all) - 2;
}

const countAll = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function showEmpty() {
  const counts = session.counts[filters.scope];
  const plain = filters.state === "open" && !filters.given && !filters.suggested;
  $("empty-title").textContent = plain ? "All done" : "No row matches these filters";
  $("empty-text").textContent = plain
    ? `${counts.kept} kept, ${counts.changed} changed, ${counts.unsure} unsure, ${counts.skipped} skipped, ${counts.accepted} accepted without looking${counts.dropped ? `, ${counts.dropped} dropped as copies` : ""}.`
    : "Choose other filters.";
  $("empty-all").hidden = filters.scope === "all" && plain;
}

export function picture(source, alt) {
  const img = make("img", { src: source, alt, className: session.small ? "small" : "", draggable: false, decoding: "async" });
  img.onerror = () => img.replaceWith(make("div", { className: "lost", textContent: "This image cannot be displayed" }));
  return img;
}

// Shorten a long path in the middle, and keep its beginning and the file name.
function shorten(path, limit = 48) {
  const characters = Array.from(path);
  return characters.length <= limit ? path : `${characters.slice(0, 15).join("")}…${characters.slice(16 - limit).join("")}`;
}

function nameRow(item) {
  return item.id === undefined || item.id === null ? `Row${NBSP}${item.row}` : `${item.id} (row${NBSP}${item.row})`;
}

// What a decision about this row will do, as the export does it.
function describeEffect(item) {
  if (item.becomes_trusted && item.random) return "This row was drawn at random. Your decision sets its label, makes it a trusted example, and helps to measure how many labels are wrong.";
  if (item.becomes_trusted) return "Your decision sets the label of this row and makes it a trusted example.";
  return "Your decision sets the label of this row. It does not become a trusted example, because it was chosen by its score and not at random.";
}

function showOne(item) {
  const hidden = isHidden(item);
  const old = $("stage").dataset.shown;
  const path = hidden ? item.path?.split("/").at(-1) ?? null : item.path; // its folder may be the given label
  $("where").replaceChildren(`${nameRow(item)} · ${item.place + 1} of ${countAll(session.counts.all)}`,
    ...(path === null ? [] : [" · ", make("bdi", { className: "path", textContent: shorten(path), title: path })]),
    ...(item.random ? [make("span", { className: "tag random", textContent: "drawn at random" })] : []),
    ...(item.unusual ? [make("span", { className: "tag unusual", textContent: item.unusual })] : []));
  setRibbon($("ribbon"), item);
  const long = Math.max(item.given.length, item.suggested?.length ?? 0) > 7;
  setName($("given-name"), hidden ? "hidden until you choose" : item.given, long || hidden);
  $("reveal").hidden = !hidden;
  setName($("guess-name"), hidden ? "" : item.suggested ?? "", long);
  const tile = $("guess-name").parentNode;
  tile.classList.toggle("same", item.suggested === item.given);
  tile.hidden = tile.previousElementSibling.hidden = item.suggested === null || hidden;
  $("wrong").hidden = item.wrong_probability === null || hidden;
  const sure = item.suggestion_probability === null || item.suggested === item.given ? "" : ` The suggestion is right with probability ${percent(item.suggestion_probability)}.`;
  $("wrong").replaceChildren("The given label is wrong with probability ", make("b", { textContent: item.wrong_probability === null ? "" : percent(item.wrong_probability) }), `.${sure}`);
  $("effect").textContent = describeEffect(item);
  showBars(item, hidden);
  if (old === `${item.row} ${hidden}`) return;
  $("stage").dataset.row = item.row;
  $("stage").dataset.shown = `${item.row} ${hidden}`;
  $("stage").replaceChildren();
  if (session.pictures) $("stage").append(picture(`/picture/${item.row}`, hidden ? `Row ${item.row}` : `Row ${item.row}, given label ${item.given}`));
  const texts = item.cells.filter((cell) => cell.value.length > 60);
  for (const cell of texts) $("stage").append(make("p", { className: "text", textContent: cell.value }));
  const cells = item.cells.filter((cell) => !texts.includes(cell));
  if (cells.length) $("stage").append(table(item, cells, [], hidden));
  showNear(item, cells, hidden);
  for (const next of items.slice(current + 1, current + 4)) if (session.pictures) new Image().src = `/picture/${next.row}`;
}

function reveal() {
  const item = items[current];
  if (view !== "one" || !item || !isHidden(item)) return false;
  revealed.add(item.row);
  show();
}

function setName(node, text, long) {
  node.textContent = text;
  node.classList.toggle("long", long);
}

export function setRibbon(node, item, changed = "Changed to") {
  node.hidden = item.state === "open";
  node.className = `ribbon ${item.state}`;
  const accepted = item.state === "accepted" ? " (not looked at)" : "";
  node.textContent = ["changed", "accepted"].includes(item.state) ? `${changed} ${item.label}${accepted}` : STATE[item.state] ?? "";
}

// A digit key chooses the class with that name if all classes are digits, else the class at that position.
const digits = () => session.classes.every((c) => /^[0-9]$/.test(c));
const keyOf = (k) => (digits() ? session.classes[k] : k < 9 ? String(k + 1) : k === 9 ? "0" : null);
const classOf = (key) => session.classes.find((_, k) => keyOf(k) === key);

function showBars(item, hidden) {
  const p = hidden ? null : item.p;
  const given = session.classes.indexOf(item.given);
  const order = session.classes.map((_, k) => k);
  if (item.p && (p || order.length > 10)) order.sort((x, y) => item.p[y] - item.p[x]);
  const shown = order.slice(0, p ? 5 : 10);
  if (!shown.includes(given)) shown.splice(-1, 1, given);
  if (!p) shown.sort((x, y) => x - y);
  $("model").firstElementChild.textContent = p ? "Prediction without the given label" : "Which class is it?";
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
    row.classList.toggle("is-guess", !hidden && session.classes[k] === item.suggested);
    row.classList.toggle("is-given", !hidden && k === given);
    return row;
  }));
}

async function showNear(item, cells, hidden) {
  $("neighbors").replaceChildren();
  let near = [];
  try {
    near = (await request(`/api/near/${item.row}${hidden ? "?hidden=yes" : ""}`)).near;
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
    if (old && innerWidth > 560) old.replaceWith(table(item, cells, contrast(item, near, hidden), hidden));
  }
}

// At most three trusted rows next to the row, with the nearest ones of the suggestion and of the given class.
function contrast(item, near, hidden) {
  const wanted = hidden ? [] : [item.suggested, item.given].map((label) => near.find((n) => n.label === label));
  const chosen = new Set([...wanted.filter((n) => n), ...near].slice(0, 3));
  for (const n of near) if (chosen.size < Math.min(3, near.length)) chosen.add(n);
  return near.filter((n) => chosen.has(n));
}

// A bar to the right speaks for the suggestion, to the left for the given label.
function evidence(speaks) {
  const bar = make("i", { className: speaks > 0 ? "for" : "against" });
  bar.style.width = `${Math.min(50, 50 * Math.sqrt(Math.abs(speaks) / 8))}%`;
  return make("span", { className: "speaks", title: `log-likelihood ratio ${speaks.toFixed(1)}` }, bar);
}

function table(item, cells, near, hidden) {
  const told = !hidden && cells.some((cell) => cell.speaks !== null);
  const head = make("tr", {}, make("th", { textContent: "" }), make("th", { textContent: "This row", scope: "col" }),
    ...(told ? [make("th", { className: "evidence", scope: "col", textContent: "Evidence", title: `To the right (blue): for ${item.suggested}. To the left (amber): for ${item.given}. Each column is considered separately.` })] : []),
    ...near.map((n) => make("th", { scope: "col" }, "Trusted", make("br"), make("span", { className: "tag", textContent: n.label }))));
  const body = cells.map((cell) => make("tr", {}, make("th", { textContent: cell.name, scope: "row" }), make("td", { textContent: cell.short, title: cell.value, className: near.length ? "own" : "" }),
    ...(told ? [make("td", { className: "evidence" }, ...(cell.speaks === null ? [] : [evidence(cell.speaks)]))] : []),
    ...near.map((n) => {
      const other = n.cells.find((c) => c.name === cell.name);
      return make("td", { textContent: other?.short ?? "", title: other?.value ?? "", className: other?.value === cell.value ? "" : "far" });
    })));
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// The cells that say most: those that speak for the suggestion, and the one that speaks most for the given label.
function telling(cells) {
  const chosen = cells.slice(0, TELLING);
  const last = cells.at(-1);
  if (cells.length > TELLING && last.speaks !== null && last.speaks < -0.5) chosen.splice(-1, 1, last);
  return chosen;
}

function brief(item) {
  const texts = item.cells.filter((cell) => cell.value.length > 60);
  const cells = telling(item.cells.filter((cell) => !texts.includes(cell)));
  const rows = cells.map((cell) => make("tr", {}, make("th", { textContent: cell.name, scope: "row" }), make("td", { textContent: cell.short, title: cell.value }),
    ...(cell.speaks === null ? [] : [make("td", {}, evidence(cell.speaks))])));
  return make("div", { className: "brief" }, ...texts.map((cell) => make("p", { textContent: cell.value })),
    ...(rows.length ? [make("table", {}, make("tbody", {}, ...rows))] : []));
}

// A tile with an example, its given label and the whole suggestion.
function makeTile(item) {
  const node = make("div", { className: "pick" });
  node.dataset.row = item.row;
  node.title = item.path ?? "";
  const label = make("div", { className: "line" }, make("span", { textContent: item.given }));
  if (item.suggested !== null && item.suggested !== item.given) label.append(" → ", make("em", { textContent: item.suggested }));
  const seen = session.pictures ? Object.assign(picture(`/picture/${item.row}`, ""), { loading: "lazy" }) : brief(item);
  const share = [nameRow(item), ...(item.wrong_probability === null ? [] : [`wrong:${NBSP}${percent(item.wrong_probability)}`]), ...(item.random ? ["random"] : []), ...(item.unusual ? [item.unusual] : [])];
  node.append(seen, label, make("div", { className: "share", textContent: share.join(" · ") }));
  return node;
}

function showGrid() {
  $("tiles").classList.toggle("wide", !session.pictures);
  const focused = document.activeElement?.dataset?.row;
  $("tiles").replaceChildren(...items.map((item, i) => {
    const node = Object.assign(makeTile(item), { tabIndex: i === 0 ? 0 : -1 });
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", String(selected.has(item.row)));
    node.setAttribute("aria-label", `${nameRow(item)}, given ${item.given}, suggestion ${item.suggested ?? "none"}, ${item.state}`);
    node.classList.toggle("past", item.state !== "open");
    const mark = make("span");
    setRibbon(mark, item, "→");
    node.append(mark, make("span", { className: "tick", textContent: "✓" }));
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
  const hidden = item && isHidden(item);
  if (hidden) $("keep").disabled = true;
  $("accept").disabled = idle || !able.length || hidden;
  $("accept").hidden = !session.audited;
  $("keep-name").textContent = many || hidden ? "" : item?.given ?? "";
  $("accept").firstElementChild.textContent = many ? "Accept suggestion" : "Change to";
  $("accept-name").textContent = many ? "" : hidden || item?.suggested === item?.given ? "…" : item?.suggested ?? "…";
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
  const p = view === "one" && items[current] && !isHidden(items[current]) ? items[current].p : null;
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
      if (made.size) text.append(make("p", {}, make("b", { textContent: `${countOf(made.size, "trusted example")}: ` }), make("code", { textContent: made.path })));
      else text.append(make("p", { className: "muted", textContent: "No trusted examples: the decided rows were chosen, not drawn at random, so they do not represent the data. Their corrected labels are used." }));
      if (made.missing?.length) text.append(make("p", { className: "note", textContent: `No trusted example yet of: ${short(made.missing)}.` }));
      if (made.corrected_only) text.append(make("p", { className: "muted", textContent: `${countOf(made.corrected_only, "more decided row")} with corrected labels, but not as trusted examples: chosen, not drawn at random, and therefore not representative of the data.` }));
      const accepted = session.counts.all.accepted;
      if (accepted) text.append(make("p", { className: "muted", textContent: `${rowsOf(accepted)} with accepted suggestions: the labels are corrected, but nobody has checked them.` }));
      if (made.dropped) text.append(make("p", { textContent: `${rowsOf(made.dropped)} ${made.dropped === 1 ? "is" : "are"} left out of these files and of the training, because you kept a copy.` }));
      text.append(make("p", {}, "Train with them:", make("pre", { textContent: made.command })));
    } catch (error) {
      if (error.status !== 409) throw error;
      $("exported-title").textContent = "Not exported";
      text.replaceChildren(make("p", { textContent: error.message }));
    }
    $("exported").showModal();
  });
}

// ---- accepting many suggestions --------------------------------------------------------------------------------------
function openBulk() {
  if (!session.audited) return;
  return enqueue(async () => {
    await showPairs();
    if (!$("bulk-dialog").open) $("bulk-dialog").showModal();
  });
}

const countOf = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
export const rowsOf = (n) => countOf(n, "row");

async function showPairs() {
  $("bulk-preview").hidden = true;
  const { pairs } = await request(`/api/pairs?${new URLSearchParams({ above: $("bulk-above").value })}`);
  if (!pairs.length) return $("bulk-pairs").replaceChildren(make("p", { className: "muted", textContent: "No open row has such a suggestion. Lower the probability, or decide rows one by one." }));
  const head = make("tr", {}, ...["Given label", "Suggestion"].map((text) => make("th", { textContent: text, scope: "col" })),
    make("th", { textContent: "Open rows", scope: "col", className: "number" }), make("th", { textContent: "Expected to be right", scope: "col", className: "number" }), make("th"));
  const body = pairs.map((pair) => make("tr", {}, make("td", { textContent: pair.given }), make("td", { textContent: pair.suggested }),
    make("td", { textContent: pair.n, className: "number" }), make("td", { textContent: percent(pair.expected_right / pair.n), className: "number" }),
    make("td", {}, make("button", { type: "button", textContent: "Preview", onclick: () => enqueue(() => showPreview(pair)) }))));
  $("bulk-pairs").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

async function showPreview({ given, suggested }) {
  const above = $("bulk-above").value;
  const found = await request(`/api/preview?${new URLSearchParams({ given, suggested, above })}`);
  const wrong = Math.round(found.n - found.expected_right);
  const tiles = make("div", { className: session.pictures ? "tiles" : "tiles wide" }, ...found.items.map(makeTile));
  $("bulk-preview").replaceChildren(
    make("p", {}, make("b", { textContent: `${rowsOf(found.n)}: ${given} → ${suggested}` }), `. Of these, about ${wrong} ${wrong === 1 ? "is" : "are"} expected to be wrong afterwards. `,
      `The ${found.items.length} least certain:`),
    tiles,
    make("div", { className: "last" }, make("p", { className: "muted", textContent: "Nobody looks at these rows one by one. Their labels are corrected, they do not become trusted examples, and the audit does not learn from them. Undo takes all of them back." }),
    make("button", { id: "bulk-accept", type: "button", className: "primary", textContent: `Change ${rowsOf(found.n)} to ${suggested}`, disabled: !found.n,
      onclick: () => enqueue(() => acceptPair({ given, suggested, above })) })));
  $("bulk-preview").hidden = false;
  $("bulk-preview").scrollIntoView({ block: "nearest" });
}

async function acceptPair(pair) {
  if (unsaved) return;
  await showAccepted(await send("/api/accept", { tab, step: crypto.randomUUID().slice(0, 32), ...pair }));
}

async function showAccepted(answer) {
  $("bulk-dialog").close();
  await restart();
  toast(`${countOf(Object.keys(answer.done).length, "label")} changed. Undo with Z`, 6000);
}

// ---- the curve of right labels ----------------------------------------------------------------------------------------
function openCurve() {
  if (!session.has_posterior && !session.people) return;
  return enqueue(async () => {
    const progress = await request("/api/progress");
    $("together").replaceChildren(...(progress.together ? describeTogether(progress.together) : []));
    if (!progress.points.length) {
      $("curve-title").textContent = "Progress";
      $("curve-text").replaceChildren();
      $("curve-dialog").showModal();
      return;
    }
    const [m, people, audit] = progress.points.at(-1);
    const text = (share) => `${(100 * share).toFixed(1)}${NBSP}%`;
    const parts = m < 2 ? [make("p", { className: "muted", textContent: "The curve appears after a few decisions." })] : [drawCurve(progress.points)];
    parts.push(make("p", {}, `${rowsOf(m)} of ${progress.n_rows} decided, ${progress.n_random} of them drawn at random. Expected share of right labels now: `,
      make("b", { textContent: text(people) }), " with your decisions only (Export), ", make("b", { textContent: text(audit) }), " if the suggestions are applied to all other rows as well (warpi correct)."),
      make("p", { className: progress.can_stop && m ? "stop" : "" }, ...marked(progress.hint)),
      make("p", { className: "muted", textContent: "For rows that nobody has checked, the share is the expectation of the audit." }));
    $("curve-text").replaceChildren(...parts);
    $("curve-dialog").showModal();
  });
}

// Who has decided how many rows, and how often two people agree.
function describeTogether({ people, pairs, disputes }) {
  const head = make("tr", {}, make("th", { textContent: "Person", scope: "col" }), make("th", { textContent: "Decided", scope: "col", className: "number" }), make("th", { textContent: "Rows", scope: "col", className: "number" }));
  const body = people.map((person) => make("tr", {}, make("td", { textContent: person.name === session.person ? `${person.name} (you)` : person.name }), make("td", { textContent: person.done, className: "number" }), make("td", { textContent: person.of, className: "number" })));
  const lines = pairs.map((pair) => make("p", { textContent: `${pair.first} and ${pair.second} agree on ${pair.same} of ${rowsOf(pair.n)}.` }));
  if (!lines.length) lines.push(make("p", { className: "muted", textContent: "No row was decided by two people yet." }));
  if (disputes) lines.push(make("p", { textContent: `${rowsOf(disputes)} with different labels. The person who started the review settles them.` }));
  return [make("table", { className: "people" }, make("thead", {}, head), make("tbody", {}, ...body)), ...lines];
}

function svg(tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function drawCurve(points) {
  const [left, right, top, bottom] = [48, 470, 12, 200];
  const last = points.at(-1);
  const low = Math.min(...points.map((p) => Math.min(p[1], p[2])));
  const step = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2].find((s) => (1 - low) / s <= 5) ?? 0.25;
  const floor = Math.max(0, Math.floor(low / step) * step);
  const x = (m) => left + (m / last[0]) * (right - left);
  const y = (share) => bottom - ((share - floor) / (1 - floor)) * (bottom - top);
  const chart = svg("svg", { class: "curve", viewBox: "0 0 640 240", role: "img", "aria-label": `Share of right labels: from ${percent(points[0][2])} to ${percent(last[2])} after ${last[0]} decisions` });
  for (let share = floor; share <= 1 + 1e-9; share += step) {
    chart.append(svg("path", { class: "grid", d: `M${left} ${y(share)}H${right}` }), svg("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${+(100 * share).toFixed(1)} %`));
  }
  for (const m of [...new Set([0, Math.round(last[0] / 2), last[0]])]) chart.append(svg("text", { x: x(m), y: bottom + 18, "text-anchor": "middle" }, m));
  chart.append(svg("text", { x: (left + right) / 2, y: 236, "text-anchor": "middle" }, "decisions"));
  const apart = Math.max(0, 15 - Math.abs(y(last[1]) - y(last[2]))) / 2;
  for (const [name, k, label] of [["audit", 2, "with suggestions"], ["people", 1, "your decisions only"]]) {
    chart.append(svg("polyline", { class: name, points: points.map((p) => `${x(p[0]).toFixed(1)},${y(p[k]).toFixed(1)}`).join(" ") }));
    const shift = (last[k] >= last[3 - k] ? -apart : apart);
    chart.append(svg("text", { class: name, x: right + 8, y: y(last[k]) + 4 + shift }, label));
  }
  return chart;
}

const KEYS = [
  [["K"], "keep the given label"], [["A"], "change to the suggestion"], [["1", "…", "0"], "choose the class with this number"], [["C"], "choose another class by typing its name"],
  [["U"], "unsure: you looked but cannot tell"], [["S"], "skip for now"], [["Z"], "undo the last decision of this tab"], [["←", "→"], "previous and next row"],
  [["G"], "switch between one row and the grid"], [["Space"], "grid: select (Shift and click: a range)"], [["X"], "grid: select all"], [["N"], "grid: next page"],
  [["V"], "show the labels of a row before choosing"], [["B"], "accept the suggestions of a pair of classes"], [["D"], "copies side by side: 1 … 9 keeps one, the others are dropped"], [["P"], "progress: the share of right labels, and when to stop"],
  [["F"], "filters and order (Esc to leave)"], [["E"], "export"], [["?"], "this list"],
];

// ---- start -----------------------------------------------------------------------------------------------------------
function setView(to) {
  return enqueue(async () => {
    if (view === to) return;
    view = to;
    $("stage").dataset.row = $("stage").dataset.shown = "";
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
  Object.assign(filters, change, change.order === "gain" ? { scope: "all" } : {}); // the audit may be unsure about labels that it does not suspect
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
    g: () => setView(many ? "one" : "many"), f: toggleFilters, e: () => !session.person && exportAll(), "?": () => $("keys").showModal(), v: reveal, b: () => !session.person && openBulk(), p: openCurve, d: openCopies,
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
  history.replaceState(null, "", "/"); // the token is in a cookie now; remove it from the address
  session = await request("/api/session");
  $("name").textContent = session.name;
  $("name").title = session.folder;
  for (const id of ["given", "suggested"]) $(id).append(...session.classes.map((c) => make("option", { value: c, textContent: c })));
  document.body.classList.toggle("plain", !session.audited);
  $("bulk").hidden = !session.audited || Boolean(session.person);
  startCopies();
  $("curve").hidden = !session.has_posterior && !session.people;
  $("person").hidden = !session.person;
  $("person").textContent = session.person;
  $("export").hidden = $("empty-export").hidden = Boolean(session.person);
  if (session.listed) $("scope").firstElementChild.textContent = "rows of the list";
  $("order").append(...session.orders.map((name) => make("option", { value: name, textContent: ORDERS[name] })));
  filters.order = session.orders[0];
  $("order").closest("label").hidden = session.orders.length < 2;
  $("concerns").hidden = !session.concerns.length;
  $("concerns").replaceChildren(...session.concerns.map((c) => make("p", {}, make("b", { textContent: c.problem }), " ", ...marked(c.advice))));
  if (!session.unusual) $("scope").querySelector("[value=unusual]").remove();
  if (!session.audited) $("scope").closest("label").hidden = $("suggested").closest("label").hidden = true;
  const plain = { first: session.counts.first.open, all: session.counts.all.open };
  if (!plain.first && plain.all) filters.scope = $("scope").value = "all";
  for (const [keys, text] of KEYS) $("key-list").append(make("dt", {}, ...keys.map((k) => (k === "…" ? "–" : make("kbd", { textContent: k })))), make("dd", { textContent: text }));
  const clicks = {
    keep: () => act("keep"), accept: () => act("accept"), unsure: () => act("unsure"), skip: () => act("skip"), other: openPicker, undo, all: selectAll, more: nextPage, again: retry,
    one: () => setView("one"), many: () => setView("many"), filter: toggleFilters, export: exportAll, help: () => $("keys").showModal(),
    "empty-export": exportAll, "empty-all": () => setFilter({ scope: "all", state: "open", given: "", suggested: "" }),
    reveal, bulk: openBulk, curve: openCurve, "intro-close": () => { sessionStorage.intro = "read"; show(); },
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
  $("bulk-above").onchange = () => enqueue(showPairs);
  $("search").onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); $("choices").firstElementChild?.click(); } };
  document.addEventListener("keydown", onKey);
  await restart();
  document.body.dataset.ready = "yes";
}

enqueue(start);

// Copies side by side: one key keeps a row, and the other rows of the data are dropped.

import { $, enqueue, make, picture, request, rowsOf, send, session, setRibbon, show, showUndone, tab, toast, updateItems, undoRequest } from "./page.js";

const CELLS = 12; // columns of a table that are shown per row
let groups = [];
let at = 0; // index of the group that is shown
let shown = null; // its rows
let kept = []; // groups in which this tab has kept a row, for undo

export function openCopies() {
  if (!session.copies) return;
  return enqueue(async () => {
    groups = (await request("/api/copies")).groups;
    at = Math.max(0, groups.findIndex((group) => group.open));
    await showGroup();
    if (!$("copies-dialog").open) $("copies-dialog").showModal();
  });
}

async function showGroup() {
  shown = await request(`/api/copies/${groups[at].group}`);
  groups[at].open = shown.open;
  const left = groups.filter((group) => group.open).length;
  $("copies-where").textContent = `Group ${at + 1} of ${groups.length}, ${left ? `${left} undecided` : "all decided"}`;
  const differ = new Set(shown.members.map((member) => member.given)).size > 1;
  $("copies-text").replaceChildren(...describe(differ));
  $("copies-rows").classList.toggle("wide", !session.pictures);
  $("copies-rows").replaceChildren(...shown.members.map((member, i) => card(member, i, differ)));
  $("copies-rows").scrollTop = 0;
  $("copies-previous").disabled = at === 0;
  $("copies-next").disabled = at === groups.length - 1;
}

function describe(differ) {
  const parts = [];
  if (differ) parts.push(make("b", { textContent: "The labels contradict each other. " }));
  const fixed = shown.members.filter((member) => !member.in_data);
  const elsewhere = [...new Set(fixed.map((member) => (member.part === "test" ? "test" : "trusted")))]; // a training row that is also trusted is used as trusted only
  if (fixed.length) parts.push(`A copy is in the ${elsewhere.join(" and the ")} set and stays there. Keep that one; the other training rows are left out of the export and of the next training.`);
  else parts.push(`Keep one; the others are left out of the export and of the next training.${differ ? " The label of the one that you keep counts as right." : ""}`);
  const hidden = shown.n - shown.members.length;
  if (hidden > 0) parts.push(` Not shown, but also dropped: ${hidden} more ${hidden === 1 ? "copy" : "copies"}.`);
  return parts;
}

const PART = { train: "training", trusted: "trusted", test: "test" };

function card(member, i, differ) {
  const ribbon = make("span");
  setRibbon(ribbon, member);
  const name = member.name === null ? `Row ${member.row}` : `${member.name} (row ${member.row})`;
  const key = i < 9 ? [make("kbd", { textContent: i + 1 })] : [];
  return make("figure", { className: "copy" },
    session.pictures ? picture(`/copy/${member.at}`, `${name}, label ${member.given}`) : cells(member),
    ribbon,
    make("figcaption", {}, make("strong", { textContent: member.given, className: differ ? "differs" : "" }),
      make("span", { className: "share", textContent: `${PART[member.part]} · ${name}` }),
      ...(member.path === null ? [] : [make("bdi", { className: "share path", textContent: member.path })])),
    make("button", { type: "button", disabled: !member.can_keep, onclick: () => keep(member), title: member.can_keep ? "" : "Its copy elsewhere is always kept" }, make("span", {}, "Keep", make("span", { className: "long", textContent: " this one" })), ...key));
}

// The cells of a row: those that differ from the first row come first.
function cells(member) {
  const first = shown.members[0].cells;
  const differs = (cell, j) => member !== shown.members[0] && first[j]?.value !== cell.value;
  const others = shown.members.slice(1);
  const varies = first.map((cell, j) => others.some((other) => other.cells[j]?.value !== cell.value));
  const texts = member.cells.filter((cell) => cell.value.length > 60);
  const order = member.cells.map((_, j) => j).filter((j) => !texts.includes(member.cells[j])).sort((a, b) => Number(varies[b] ?? false) - Number(varies[a] ?? false) || a - b);
  const rows = order.slice(0, CELLS).map((j) => {
    const cell = member.cells[j];
    return make("tr", {}, make("th", { textContent: cell.name, scope: "row" }), make("td", { textContent: cell.short, title: cell.value, className: differs(cell, j) ? "own" : "" }));
  });
  const more = member.cells.length - texts.length - rows.length;
  return make("div", { className: "brief" }, ...texts.map((cell) => make("p", { textContent: cell.value })), make("table", {}, make("tbody", {}, ...rows)),
    ...(more > 0 ? [make("p", { className: "muted", textContent: `and ${more} more ${more === 1 ? "column" : "columns"}` })] : []));
}

function keep(member) {
  if (!member?.can_keep) return member && toast("This row cannot be kept, because its copy elsewhere stays in any case. Keep that one", 6000);
  return enqueue(async () => {
    const seen = Object.fromEntries(shown.members.filter((row) => row.in_data).map((row) => [row.row, row.seen]));
    const answer = await sendFromDialog("/api/copies", { tab, step: crypto.randomUUID(), at: member.at, seen });
    const lost = Object.keys(answer.refused).length;
    showKept(answer);
    if (lost) toast("Already decided in another tab or by someone else. Decide again to change it", 6000);
    else {
      kept.push(at);
      const n = Object.values(answer.done).filter((state) => state.state === "dropped").length;
      toast(`${rowsOf(n)} dropped. Undo with Z`, 4000);
      groups[at].open = false;
      const next = groups.findIndex((group, i) => group.open && i > at);
      at = next >= 0 ? next : groups.findIndex((group) => group.open) >= 0 ? groups.findIndex((group) => group.open) : at;
    }
    await showGroup();
  });
}

export function showKept(answer) {
  updateItems(answer.done);
  updateItems(answer.refused);
  show();
}

function undo() {
  return enqueue(async () => {
    await showUndone(await sendFromDialog(...undoRequest()));
    at = kept.pop() ?? at;
    await showGroup();
  });
}

// The message about a failed request is behind the dialog.
async function sendFromDialog(path, body) {
  try {
    return await send(path, body);
  } catch (error) {
    $("copies-dialog").close();
    throw error;
  }
}

function move(by) {
  return enqueue(async () => {
    at = Math.min(groups.length - 1, Math.max(0, at + by));
    await showGroup();
  });
}

export function startCopies() {
  $("copies").hidden = !session.copies;
  $("copies").onclick = openCopies;
  $("copies-previous").onclick = () => move(-1);
  $("copies-next").onclick = () => move(1);
  $("copies-undo").onclick = undo;
  document.addEventListener("keydown", (event) => { // a click on a card that is then replaced leaves nothing focused
    if (!$("copies-dialog").open || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const keys = { arrowleft: () => move(-1), arrowright: () => move(1), s: () => move(1), z: undo };
    const digit = "123456789".indexOf(event.key);
    const work = keys[event.key.toLowerCase()] ?? (digit >= 0 && shown?.members[digit] ? () => keep(shown.members[digit]) : null);
    if (work) { event.preventDefault(); work(); }
  });
}
